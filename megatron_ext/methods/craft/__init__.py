"""CRAFT: replicas placed before the run, by what each layer gains.

    place.py  which layers get how many replicas, and where, from a trace
    craft.py  loads split over such replicas, strategy `craft`

Replicas are placed in a layer by the rules of `eplb/`.
"""
