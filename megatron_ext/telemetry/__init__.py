"""Records loads and choices of MoE layers, and where a rank is, for any training program.

    recorder.py    the loads of a step's MoE layers
    trace.py       these loads written to files
    routes.py      some tokens' choices written to files
    step_files.py  when and where such files are written
    heartbeat.py   where each rank is, in files that others read

It knows neither Megatron nor the trainer.
"""
