"""What a run says, in the terminal and in its directory.

    progress.py   the display on rank 0
    run_log.py    the run directory: config.yaml, about.json, lines of steps, what sinks write
    about.py      where and with what a run trains
    rank_logs.py  what each rank says, in a file of its own

What is measured, and in which words, is in `telemetry/`.
"""
