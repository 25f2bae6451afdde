"""EPLB: replicas from load history.

    eplb.py        replicas for the hot experts of the past, strategy `eplb`
    eplb_exact.py  replicas for the hot experts of the exact load, strategy `eplb_exact`
    rearrange.py   an arrangement of all experts, for checkpoint time

`lplb/` and `craft/` place replicas by the rules of `eplb.py`, too.
"""
