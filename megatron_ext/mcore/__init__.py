"""The plug-in that balances Megatron's MoE layers. Start reading in `moe_layer.py`.

It imports Megatron, and nothing of `methods/`, `trainer/` or `lab/`.
"""
