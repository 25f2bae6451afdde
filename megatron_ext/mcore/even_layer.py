"""The MoE layer of the strategy `ideal`: Megatron's own layer with forced even routing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ext.balance.layer_report import LayerReport
from megatron_ext.balance.load import gather_counts, load_of
from megatron_ext.balance.metrics import home_loads
from megatron_ext.balance.strategies.ideal import force_even
from megatron_ext.config import BalanceConfig
from megatron_ext.mcore.limits import require_valid
from megatron_ext.mcore.planning_group import planning_group
from megatron_ext.mcore.stages import ObservedMoELayer


class EvenMoELayer(ObservedMoELayer):
    """Megatron's MoE layer with forced even routing: the speed that balancing cannot exceed.

    Only for comparison: tokens go to experts that the router did not choose. Beside the arguments
    of Megatron's MoELayer, the constructor takes `balance`, with a strategy that forces even
    routing.

    Raises:
        ValueError: A setting of `config` excludes the strategy (`check` says so earlier).
    """

    def __init__(self, config: Any, *args: Any, balance: BalanceConfig, **kwargs: Any) -> None:
        require_valid(config, balance)
        self.balance = balance
        super().__init__(config, *args, **kwargs)

    def preprocess_behind_graph(
        self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Preprocess as Megatron does, with all experts in turn in the place of the chosen ones."""
        group, ep_size = planning_group(self), self.ep_group.size()
        # Exact if all ranks have equally many tokens and drop none; else some experts get one more.
        dealt_before = group.rank() * len(routing_map) * self.config.moe_router_topk
        probs, routing_map = force_even(probs, routing_map, dealt_before)
        if self.observers and self.training and torch.is_grad_enabled():
            counts, _ = gather_counts(routing_map, group)
            load = load_of(counts, ep_size)
            no_slots = load.new_empty(ep_size, 0, dtype=torch.int32)
            for observer in self.observers:
                observer(LayerReport(self.layer_number, load, home_loads(load), no_slots))
        return super().preprocess_behind_graph(hidden_states, probs, routing_map)
