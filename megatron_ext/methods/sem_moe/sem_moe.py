"""Sem-MoE: no replicas; experts, samples and tokens are put on the ranks where they meet.

`learn.py` decides from recorded routes where that is. Experts are moved in a checkpoint,
samples by `samples.py`, tokens by `tokens.py`, so that nothing is left to plan in a layer. All of
it also goes with other strategies.
"""

from __future__ import annotations

from megatron_ext.balance.strategies.strategy import StaysMegatron, Strategy

SEM_MOE = Strategy(
    name="sem_moe",
    summary="Sem-MoE: no replicas; samples or tokens go to the ranks that have their experts",
    kind=StaysMegatron(needs_semantics=True),
)
