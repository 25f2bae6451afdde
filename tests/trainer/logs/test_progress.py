"""The plain display: the first step has a line, slow ones have, and each says what is left.

A terminal shows the same behind a bar.
"""

import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios

from megatron_ext.trainer.logs import progress
from megatron_ext.trainer.logs.progress import TrainingProgress

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


ON_A_TERMINAL = """
from megatron_ext.trainer.logs.progress import TrainingProgress
with TrainingProgress("run[b]", start_step=4, steps=6, every=10) as display:
    for step in (5, 6):
        display.show(
            {"step": step, "loss": 1 / step, "imbalance_before": 2.5, "imbalance_after": 1.25}
            | {"tokens_per_s": 1000 * step}
        )
        display._bar.refresh()
"""


def test_a_terminal_shows_all_of_it_from_the_first_step_on():
    """In a pseudo-terminal of 100 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    subprocess.run(
        [sys.executable, "-c", ON_A_TERMINAL],
        stderr=theirs,
        env=environment | {"TERM": "xterm"},
        check=True,
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown)
    for step, loss, tokens in ((5, "0.2000", "5,000"), (6, "0.1667", "6,000")):
        line = rf"{step}/6 loss {loss}  imbalance 2\.50 -> 1\.25  {tokens} tokens/s"
        left = r"  \d:\d\d:\d\d left" if step == 5 else ""
        assert re.search(rf"run\[b\] \S+ {line}{left}\s", text), text
