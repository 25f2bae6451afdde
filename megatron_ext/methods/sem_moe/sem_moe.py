"""Sem-MoE: no replicas; experts, samples and tokens that belong together are put on one rank.

`learn.py` decides from recorded routes which rank that is. Experts are moved in a checkpoint,
samples by `samples.py`, tokens by `tokens.py`, so that nothing is left to plan in a layer. These
moves also go with other strategies.
"""

from __future__ import annotations

from megatron_ext.balance.strategies.strategy import StaysMegatron, Strategy

SEM_MOE = Strategy(
    name="sem_moe",
    summary="Sem-MoE: no replicas; samples or tokens go to the ranks that have their experts",
    kind=StaysMegatron(needs_semantics=True),
)
