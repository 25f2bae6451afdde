"""Libra: replicas from a prediction of the load to come, and own tokens first.

    libra.py        with top-up from the exact load, strategy `libra`
    libra_paper.py  as published, strategy `libra_paper`
    local_first.py  stages 5 to 7 in two parts: own tokens while the others travel

What a layer predicts of the next is `mcore/lookahead.py`: the layer calls it.
"""
