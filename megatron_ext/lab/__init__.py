"""Planning without a model: synthetic loads, plans compared, machines simulated.

    synthetic.py  loads from a seed, by what is wrong with them
    planning.py   plans for many loads, and the numbers by which they are compared
    replay.py     every strategy on the same trace
    papers.py     the same as the papers' tables and figures
    simulate.py   what strategies would make of a trace on other hardware
    shape.py      a model's sizes, and its work per token
    hardware.py   files of a machine's constants, each with its source
    calibrate.py  measures this machine's, with the trainer's parts

It uses every room but `cli/`. Nothing here trains; `calibrate.py` alone starts ranks.
"""
