"""Libra: replicas from a prediction of the load to come, and own tokens first.

    libra.py        replicas topped up by the exact load, strategy `libra`
    libra_paper.py  Libra as published, strategy `libra_paper`
    local_first.py  stages 5 to 7 in two parts: own tokens are computed while the others travel

What a layer predicts of the next is `mcore/lookahead.py`: the layer calls it.
"""
