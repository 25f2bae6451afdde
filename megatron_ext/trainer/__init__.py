"""The program behind `megatron-ext train`.

    train.py       entry point: recipe, checks, ranks
    validate.py    what must hold between settings before a run starts
    settings.py    from a run's settings to Megatron's settings
    build.py       from Megatron's settings to Megatron's objects
    loop.py        one rank's part of a training run
    checkpoint.py  save, load, resume; with
    checkpoint_choice.py  which checkpoint a run starts from
    checkpoint_state.py   what a checkpoint holds
    checkpoint_writer.py  how it becomes files
    finite.py      steps whose numbers are not finite: stop, skip or ignore
    norms.py       PyTorch's norms for sequence parallelism
    blocks.py      parts of a step, each run alone, for calibration
    processes.py   processes that end with the process that started them
    watchdog.py    names the rank that hangs, and ends the run
    progress.py    the display on rank 0
    run_log.py     the run directory: config.yaml, metrics.jsonl, W&B
    report.py      runs compared: table, summary, picture, page
    quickstart.py  the three runs of the quickstart, side by side in the same ranks

It uses every room but `lab/` and `cli/`.
"""
