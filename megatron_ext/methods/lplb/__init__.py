"""LPLB: a linear program splits each load over replicas placed from history.

    lplb.py  strategy `lplb`

Replicas are placed as in `eplb/`, with at most one replica of an expert.
"""
