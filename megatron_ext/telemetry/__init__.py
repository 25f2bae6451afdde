"""What a run tells about itself.

recorder.py   the loads of a step's MoE layers
trace.py      these loads written to files
progress.py   the display on rank 0
run_log.py    the run directory: config.yaml, metrics.jsonl, W&B
report.py     runs compared: table, summary, picture
"""
