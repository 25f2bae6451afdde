"""Planning without a model: synthetic loads, plans compared, machines simulated.

    synthetic.py  synthetic loads, one generator per kind of imbalance
    planning.py   plans for many loads, and the numbers by which they are compared
    replay.py     every strategy on the same trace
    alternatives.py  what other settings would have brought to a run
    replay_page.py  the same in a browser; `replay_page.js` draws it
    papers.py     a replay's results as the papers' tables and figures
    simulate.py   how long steps would take on other hardware, by strategy
    forecast.py   what balancing would move and choose in a run
    whatif.py     what balancing would bring to a run that was traced
    whatif_page.py  the same as a page
    shape.py      reads a model's sizes: of a recipe, or of a file
    hardware.py   files of a machine's constants, each with its source
    calibrate.py  measures this machine's constants, with the trainer's parts

It uses every room but `cli/`. Nothing here trains; `calibrate.py` alone starts ranks.
"""
