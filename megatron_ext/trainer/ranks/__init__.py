"""The processes of a run, from their start to their end.

What is started is given: nothing here knows of models or checkpoints.
"""
