"""Libra: replicas from a prediction of the load to come.

    libra.py        with top-up from the exact load, strategy `libra`
    libra_paper.py  as published, strategy `libra_paper`

The other half of the paper, own tokens first, is `mcore/local_first.py`, and what a layer predicts
of the next is `mcore/lookahead.py`: the layer calls both.
"""
