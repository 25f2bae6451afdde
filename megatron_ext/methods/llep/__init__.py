"""LLEP: overload spills to the least loaded ranks.

    llep.py  strategy `llep`

It solves every load by itself.
"""
