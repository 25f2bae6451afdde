"""Loads the compiled library, which defines `torch.ops.megatron_ext.*`.

The ops are declared in `csrc/bindings/library.cpp`; `csrc/include/megatron_ext/api.h` says what
they do. Importing this module loads nothing.

    build.py    the library for this Torch: as installed, or built at first use
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatron_ext.ops.build import library


@functools.cache
def load_library() -> None:
    """Load the compiled library once; later calls do nothing. Builds it where there is none.

    Raises:
        RuntimeError: If the library cannot be built or does not load; says why.
    """
    path = library()
    try:
        torch.ops.load_library(path)
    except OSError as error:
        reason = error.__cause__ or error
        raise RuntimeError(
            f"{path} does not load with torch {torch.__version__} ({reason}); remove it, and it is "
            "built again"
        ) from error
    torch.library.register_fake("megatron_ext::count_load", _fake_count_load)
    torch.library.register_fake("megatron_ext::solve_quota", _fake_solve)
    torch.library.register_fake("megatron_ext::solve_ladder", _fake_solve_ladder)
    torch.library.register_fake("megatron_ext::solve_fastest", _fake_solve_fastest)
    torch.library.register_fake("megatron_ext::solve_paper", _fake_solve)
    torch.library.register_fake("megatron_ext::lower_bound", _fake_lower_bound)
    torch.library.register_fake("megatron_ext::split_quota", _fake_split_quota)
    torch.library.register_fake("megatron_ext::share_plan", _fake_share_plan)
    torch.library.register_fake("megatron_ext::share_and_seal", _fake_share_and_seal)
    torch.library.register_fake("megatron_ext::assign", _fake_assign)
    torch.library.register_fake("megatron_ext::reroute", _fake_reroute)
    torch.library.register_fake("megatron_ext::place_back", _fake_place_back)


def has_cuda_part() -> bool:
    """Return whether the compiled library was built with its CUDA part; loads it."""
    load_library()
    try:
        torch.classes.megatron_ext.PeerExchange  # noqa: B018
    except RuntimeError:  # torch's way to say that there is no such class
        return False
    return True


def _fake_count_load(routing_map: Tensor, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
    tokens, experts = routing_map.shape
    tiles = (tokens + 31) // 32 if routing_map.is_cuda else 0
    return (
        routing_map.new_empty(experts + (tail is not None), dtype=torch.int64),
        routing_map.new_empty((2, tiles, experts), dtype=torch.int32),
    )


def _fake_solve(
    load: Tensor, num_slots: int, nvlink_domain: int, tolerance_ppm: int, min_quota: int
) -> tuple[Tensor, Tensor]:
    return _empty_plan(load, num_slots)


def _fake_solve_ladder(
    load: Tensor, num_slots: int, nvlink_domain: int, tolerances_ppm: list[int], min_quota: int
) -> tuple[Tensor, Tensor]:
    return _empty_plan(load, num_slots, len(tolerances_ppm))


def _fake_solve_fastest(
    load: Tensor,
    num_slots: int,
    nvlink_domain: int,
    tolerances_ppm: list[int],
    min_quota: int,
    expert_ps: int,
    token_ps: int,
    assignment_ps: int,
) -> tuple[Tensor, Tensor]:
    return _empty_plan(load, num_slots)


def _empty_plan(load: Tensor, num_slots: int, *num_tolerances: int) -> tuple[Tensor, Tensor]:
    *batch, ranks, experts = load.shape
    return (
        load.new_empty(*batch, *num_tolerances, experts, ranks),
        load.new_empty(*batch, *num_tolerances, ranks, num_slots, dtype=torch.int32),
    )


def _fake_lower_bound(load: Tensor, num_slots: int, nvlink_domain: int) -> Tensor:
    return load.new_empty(load.shape[:-2])


def _fake_split_quota(load: Tensor, quota: Tensor, source_rank: int | None) -> Tensor:
    ranks, experts = load.shape
    return load.new_empty((experts, ranks) if source_rank is not None else (ranks, experts, ranks))


def _fake_share_plan(
    load: Tensor, quota: Tensor, slots: Tensor, source_rank: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    experts, ranks = quota.shape
    num_bytes = experts * (8 * (2 + ranks) + 4 * (ranks + 1)) if load.is_cuda else 0
    lines = quota.new_empty(num_bytes, dtype=torch.uint8)
    arriving = quota.new_empty(ranks, experts // ranks + slots.shape[1])
    return quota.new_empty(quota.shape), quota.new_empty(quota.shape), lines, arriving


def _fake_share_and_seal(
    load: Tensor,
    quota: Tensor,
    slots: Tensor,
    source_rank: int,
    gathered: Tensor,
    layer: int,
    difference: Tensor,
    slots_on_host: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return *_fake_share_plan(load, quota, slots, source_rank), load.new_empty(1)


def _fake_assign(
    routing_map: Tensor,
    source_quota: Tensor,
    physical_index: Tensor,
    top_k: int,
    marks: Tensor | None = None,
    lines: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    logical = routing_map.new_empty((routing_map.shape[0], top_k), dtype=torch.int32)
    return logical, torch.empty_like(logical)


def _fake_reroute(
    probs: Tensor,
    routing_map: Tensor,
    source_quota: Tensor,
    physical_index: Tensor,
    top_k: int,
    marks: Tensor | None,
    lines: Tensor | None,
    placed: Tensor,
    placed_map: Tensor,
) -> tuple[Tensor, Tensor]:
    return _fake_assign(routing_map, source_quota, physical_index, top_k)


def _fake_place_back(grad: Tensor, logical: Tensor, physical: Tensor, num_experts: int) -> Tensor:
    return grad.new_empty((grad.shape[0], num_experts))
