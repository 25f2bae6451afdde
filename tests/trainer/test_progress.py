"""The plain display: the first step has a line, slow ones have, and each says what is left."""

import logging

from megatron_ext.trainer import progress
from megatron_ext.trainer.progress import TrainingProgress

METRICS = {"loss": 1, "imbalance_before": 2, "imbalance_after": 1, "tokens_per_s": 1}


def test_lines_come_from_the_first_step_on(monkeypatch, caplog):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False, raising=False)
    caplog.set_level(logging.INFO, progress.__name__)
    with TrainingProgress("run", start_step=20, steps=45, every=10) as display:
        for step in range(21, 46):
            now += 45 if step == 34 else 3
            display.show(METRICS | {"step": step})
    said = [record.getMessage().split("  ") for record in caplog.records]
    assert [(words[0], words[-1]) for words in said] == [
        ("step 21/45", "0:01:12 left"),
        ("step 30/45", "0:00:45 left"),
        ("step 34/45", "0:01:06 left"),
        ("step 40/45", "0:00:26 left"),
        ("step 45/45", "1 tokens/s"),
    ]
