"""From a run's settings to Megatron's objects, and what is known of a model without training it.

    settings.py    from a run's settings to Megatron's settings
    build.py       from Megatron's settings to Megatron's objects
    latent.py      latent attention without Transformer Engine
    norms.py       PyTorch's norms for sequence parallelism
    shape.py       a model's sizes, and its work per token
    blocks.py      parts of a step, each run alone, for calibration
    dry_run.py     what a run would need, counted without running it
    meta_model.py  a rank's model without its memory, among ranks that do not exist

The balanced layers themselves are in `mcore/`.
"""
