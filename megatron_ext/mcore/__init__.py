"""The attachment: the only room that imports Megatron. Start reading in `moe_layer.py`."""
