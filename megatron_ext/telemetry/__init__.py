"""Records loads and choices of MoE layers, and where a rank is, for any training program.

    recorder.py    the loads of a step's MoE layers
    gather.py      what all ranks know of a step, on every rank
    layers.py      the same by layer, in a file of the run
    names.py       what metrics are called, and what they mean
    step_lines.py  files with a line a step
    trace.py       these loads written to files
    routes.py      some tokens' choices written to files
    step_files.py  when and where such files are written
    heartbeat.py   where each rank is, in files that others read
    profile.py     some steps of all ranks as one trace for Perfetto

It knows neither Megatron nor the trainer.
"""
