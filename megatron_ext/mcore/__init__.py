"""The plug-in that balances Megatron's MoE layers. Start reading in `moe_layer.py`.

It imports Megatron, and nothing of `methods/`, `trainer/` or `lab/`.
"""

from megatron_ext import gloo_peers

# A program imports this package before it makes its groups.
gloo_peers.watch()
