"""Checkpoints of a run.

    checkpoint.py  save, load, resume
    choice.py      which checkpoint a run starts from
    state.py       what a checkpoint holds
    writer.py      how it becomes files

`checkpoints_tools` looks into them without the package.
"""
