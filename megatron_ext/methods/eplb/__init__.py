"""EPLB: replicas from load history.

    eplb.py        replicas for the hot experts of the past, strategy `eplb`
    eplb_exact.py  the same fed the exact load, strategy `eplb_exact`
    rearrange.py   placement of all experts, for checkpoint time

`lplb/` and `craft/` place replicas by its rules, too.
"""
