"""Random programs around the MoE layers: equal to Megatron's own, or refused on all ranks.

Layer 2 (2 gloo ranks), the first programs of `random_graphs.py`; more of them run by hand.
"""

from __future__ import annotations

from collections import Counter

from tests.mcore.random_graphs import SETTLED, described, try_programs

NUM_PROGRAMS = 60


def test_no_program_is_silently_wrong() -> None:
    found = list(try_programs(range(NUM_PROGRAMS)))
    wrong = [
        f"{described(seed)}\n  -> {verdict} {error}"
        for seed, verdict, error in found
        if verdict not in SETTLED
    ]
    assert not wrong, "\n".join(wrong)
    counts = Counter(verdict for _, verdict, _ in found)
    assert counts["equal"] > NUM_PROGRAMS // 2, "few programs ran to their end"
    assert counts["refused"] > 0
