"""The program behind `megatron-ext train`.

    command.py     the command line, read without what takes long to import
    train.py       recipe, checks
    validate.py    what must hold between settings before a run starts
    loop.py        one rank's part of a training run
    finite.py      steps whose numbers are not finite: stop, skip or ignore
    sweep.py       a run for each combination of values, and a page of all
    quickstart.py  the three runs of the quickstart, side by side in the same ranks
    pretrain.py    runs a program of Megatron's with its models balanced
    model/         from a run's settings to Megatron's objects; their sizes, and a dry run
    checkpoints/   save, load, resume
    ranks/         the processes: started, watched, told to stop, started again
    logs/          what a run says: its display, its directory, its ranks' output
    sinks/         where steps are shown besides: W&B, TensorBoard
    reports/       runs compared: table, summary, page, live

It uses every room but `lab/` and `cli/`.
"""
