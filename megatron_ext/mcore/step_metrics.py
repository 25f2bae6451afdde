"""Computes the metrics of each step, for the logs of any program that trains with Megatron.

The program writes the metrics to its own W&B, TensorBoard or files; `run_steps.py` writes a run
directory for `megatron-ext report`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn

from megatron_ext.balance.layer_report import number_of
from megatron_ext.mcore import process_hooks
from megatron_ext.mcore.graph_limits import hold_routers, hold_whole_steps
from megatron_ext.mcore.planning_group import planning_group
from megatron_ext.mcore.stages import number_predicting
from megatron_ext.telemetry.gather import Place, gather_step
from megatron_ext.telemetry.names import MAX_KEYS, TIERS, shown
from megatron_ext.telemetry.recorder import LoadRecorder
from megatron_ext.telemetry.run_steps import RunSteps
from megatron_ext.transport.reach import gather

logger = logging.getLogger(__name__)


class StepMetrics:
    """Counts the loads and replicas of a model's MoE layers, until `close()`.

    Every rank makes a `StepMetrics` after the model, also on pipeline stages without MoE layers,
    and before the first step: what a CUDA graph of a whole step captures is counted in its replays.
    Layers that are not balanced are counted, too, so that an unbalanced run can be compared, unless
    CUDA graphs hold their routers: of such steps only times, loss and tokens go into `run_dir`.

    Args:
        model: The model's chunks on this rank, wrapped or not.
        run_dir: Where rank 0 writes the steps, for `megatron-ext report`; None for nowhere. Lines
            of later steps that are there, as of a run that was killed, are dropped.

    Raises:
        TypeError: `model` is one module.
    """

    def __init__(self, model: Iterable[nn.Module], *, run_dir: str | Path | None = None) -> None:
        if isinstance(model, nn.Module):
            raise TypeError(
                f"model must be a list of the model's chunks on this rank, not a "
                f"{type(model).__name__}: give [model]"
            )
        chunks = list(model)
        for chunk in chunks:
            number_predicting(chunk)
        parts = [part for chunk in chunks for part in chunk.modules()]
        if any(hold_whole_steps(part.config) for part in parts if hasattr(part, "config")):
            process_hooks.install()
        layers = [part for part in parts if isinstance(part, MoELayer)]
        self._recorder = LoadRecorder((), None)
        self._layers: list[Any] = []  # Those that are counted.
        self.has_uncounted = False
        """Whether there are layers whose loads are not known: of all ranks after `take`."""
        self._balance: dict[str, Any] | None = None
        self._place: Place | None = None
        self._run_dir = None if run_dir is None else RunSteps(Path(run_dir))
        for layer in layers:
            self.watch(layer)

    def watch(self, layer: Any) -> None:
        """Count this layer, too; called before the first `take`."""
        if not hasattr(layer, "observers") and hold_routers(layer.config):
            if not self.has_uncounted and layer.ep_group.rank() == 0:
                logger.warning(
                    "warning: MoE layers of Megatron's own are not counted, for CUDA graphs hold "
                    "their routers (leave moe_router and moe_preprocess out of the graphs)"
                )
            self.has_uncounted = True
            return
        self._layers.append(layer)
        if self._balance is None and hasattr(layer, "balance"):
            self._balance = asdict(layer.balance)
        self._recorder.watch(layer)

    def take(
        self,
        *,
        tier: str = "brief",
        step: int | None = None,
        loss: float | None = None,
        tokens: int | None = None,
    ) -> dict[str, float]:
        """Return the metrics of the steps since the last call, by name; all ranks call together.

        The metrics cover all ranks, layers and pipeline stages, and are equal on every rank. Call
        `take` after each step: the counts stay in memory until the call. Evaluation is not counted.

        Args:
            tier: `brief`, or `detailed` with metrics of each layer as well. If the layers need more
                than `MAX_KEYS` names, those with the largest imbalance before are returned.
            step: The step's number in `run_dir`; None for the next one.
            loss: The step's loss, for `run_dir`.
            tokens: Tokens of the step on all ranks, for the throughput in `run_dir`.

        Returns:
            Numbers as `balance/imbalance_after` or `balance/imbalance_after_layer_3`, and under
            Megatron's names where it has any (`moe/avg_overload_factor`); `telemetry/names.py`
            gives units and meanings. Empty if nothing was trained.

        Raises:
            ValueError: There is no such tier.
        """
        if tier not in TIERS:
            raise ValueError(f"tier ({tier!r}) must be one of {', '.join(TIERS)}")
        loads = self._recorder.take_step()
        if self._place is None:
            self._place = self._agree()
        if not self._place.num_layers:
            if self._run_dir is not None and self.has_uncounted and dist.get_rank() == 0:
                self._run_dir.write(step, {}, {}, {"strategy": "none"}, loss=loss, tokens=tokens)
            return {}
        gathered = gather_step(loads.computed, self._place, loads.own)
        metrics = gathered.metrics()
        if self._run_dir is not None and metrics and dist.get_rank() == 0:
            with_experts = gathered.layers(with_experts=True)
            balance = self._balance or {"strategy": "none"}
            self._run_dir.write(step, metrics, with_experts, balance, loss=loss, tokens=tokens)
        layers = gathered.layers(with_experts=False)
        return shown(metrics, layers, tier=tier, max_keys=MAX_KEYS)

    def _agree(self) -> Place:
        """Return this rank's place among all; learn how layers are balanced, which others have."""
        said = gather((self._balance, self.has_uncounted))
        self._balance = next((balance for balance, _ in said if balance), None)
        self.has_uncounted = any(has_uncounted for _, has_uncounted in said)
        return place_of_rank(self._layers)

    def close(self) -> None:
        """Stop counting, and close the files in `run_dir`."""
        self._recorder.close()
        if self._run_dir is not None:
            self._run_dir.close()


def place_of_rank(layers: Sequence[Any]) -> Place:
    """Return this rank's place by the groups of its MoE layers; all ranks call.

    EP groups with layers of the same numbers hold the same experts.
    """
    group = planning_group(layers[0]) if layers else None
    peers = dist.get_process_group_ranks(group) if group is not None else []
    ep_size = layers[0].ep_group.size() if layers else 0
    numbers = tuple(number_of(layer) or 0 for layer in layers)
    said = gather((numbers, peers, ep_size))
    alike: dict[tuple[int, ...], list[list[int]]] = {}
    for of_rank, its_peers, _ in said:
        groups = alike.setdefault(of_rank, [])
        groups += [its_peers] * (its_peers not in groups)
    return Place(
        group=alike[numbers].index(peers),
        groups=max(map(len, alike.values())),
        ep_size=max(size for *_, size in said),
        speaks=group is not None and group.rank() == 0,
        num_layers=max(max(of_rank, default=0) for of_rank in alike),
    )
