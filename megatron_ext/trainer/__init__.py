"""The program behind `megatron-ext train`.

    command.py     the command line, read without what takes long to import
    train.py       recipe, checks
    validate.py    what must hold between settings before a run starts
    settings.py    from a run's settings to Megatron's settings
    build.py       from Megatron's settings to Megatron's objects
    loop.py        one rank's part of a training run
    shape.py       a model's sizes, and its work per token
    dry_run.py     what a run would need, counted without running it
    meta_model.py  a rank's model without its memory, among ranks that do not exist
    checkpoint.py  save, load, resume; with
    checkpoint_choice.py  which checkpoint a run starts from
    checkpoint_state.py   what a checkpoint holds
    checkpoint_writer.py  how it becomes files
    finite.py      steps whose numbers are not finite: stop, skip or ignore
    latent.py      latent attention without Transformer Engine
    norms.py       PyTorch's norms for sequence parallelism
    pretrain.py    runs a program of Megatron's with its models balanced
    blocks.py      parts of a step, each run alone, for calibration
    launch.py      the ranks of one machine: started, watched, told to stop, started again
    signals.py     a run that is asked to stop, and all ranks agree after which step
    processes.py   processes that end with the process that started them
    watchdog.py    names the rank that hangs, and ends the run
    rendezvous.py  where the machines of a run find each other
    agent.py       torchrun for one machine of several
    rank_logs.py   what each rank says, in a file of its own
    progress.py    the display on rank 0
    run_log.py     the run directory: config.yaml, about.json, lines of steps, what sinks write
    about.py       where and with what a run trains
    dashboards.py  what W&B shows of a project: workspace and report
    sinks/         where steps are shown besides: W&B, TensorBoard
    reports/       runs compared: table, summary, page, live
    sweep.py       a run for each combination of values, and a page of all
    quickstart.py  the three runs of the quickstart, side by side in the same ranks

It uses every room but `lab/` and `cli/`.
"""
