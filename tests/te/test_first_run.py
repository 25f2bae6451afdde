"""The part of a first run on GPUs that has Transformer Engine's experts, on its twin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.first_run import parity
from tests.gpu.first_run.parts import TE, parts
from tests.trainer import dataset


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the part itself runs on a machine with GPUs")
def test_parity_holds_with_the_experts_of_transformer_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_ext.mcore import te_experts

    (part,) = (part for part in parts(1) if part.name == "one_gpu_te_parity_ep2")
    assert not part.lacks
    assert part.command[-len(TE) :] == TE
    given = [
        one
        for one in dataset.overrides(dataset.build(tmp_path), tmp_path)
        if not one.startswith(("run_dir", "steps"))
    ]
    note = tmp_path / "used"
    made = te_experts.TEGroupedWeights.__init__

    def note_and_make(*args: object, **options: object) -> None:
        note.touch()
        made(*args, **options)

    monkeypatch.setattr(te_experts.TEGroupedWeights, "__init__", note_and_make)
    folder = f"run_dir={tmp_path}/${{balance.strategy}}"
    row = parity.measure(2, 1, 6, [*given, "data.global_batch_size=8", folder, *TE])
    assert note.exists()
    assert parity.is_right(row), row
