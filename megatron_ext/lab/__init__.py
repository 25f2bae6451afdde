"""Planning without a model: synthetic loads, plans compared, machines simulated.

    synthetic.py  synthetic loads, one generator per kind of imbalance
    planning.py   plans for many loads, and the numbers by which they are compared
    replay.py     every strategy on the same trace
    papers.py     a replay's results as the papers' tables and figures
    simulate.py   how long steps would take on other hardware, by strategy
    forecast.py   what balancing would move and choose in a run
    shape.py      a model's sizes, and its work per token
    hardware.py   files of a machine's constants, each with its source
    calibrate.py  measures this machine's constants, with the trainer's parts

It uses every room but `cli/`. Nothing here trains; `calibrate.py` alone starts ranks.
"""
