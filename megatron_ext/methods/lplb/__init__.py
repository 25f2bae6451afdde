"""LPLB: a linear program splits each load over replicas placed from history.

    lplb.py  strategy `lplb`

The placement is that of `eplb/`, with at most one replica of an expert.
"""
