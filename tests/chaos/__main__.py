"""Strikes trainings at random, and says what became of them: `tests/chaos.sh --help`."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from megatron_ext.files.tables import text_table
from tests.chaos.campaign import SHAPES, Campaign, Decks
from tests.chaos.soak import soak
from tests.trainer.dataset import build


def main() -> int:
    """Run campaigns over all shapes, and a soak before them if asked for; return the status."""
    parser = argparse.ArgumentParser(
        prog="tests/chaos.sh",
        description="Kill, stop and starve small trainings, tear their files, let them continue, "
        "and compare losses and checkpoints bit by bit with undisturbed trainings.",
    )
    parser.add_argument("--kills", type=int, default=40, help="strikes, over all shapes (40)")
    parser.add_argument(
        "--minutes", type=float, default=0, help="length of a soak before them: is memory flat? (0)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is struck when (0)")
    arguments = parser.parse_args()
    problems, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        data = build(Path(folder))
        import megatron_ext.trainer.loop  # noqa: F401  What attempts are forked with.

        if arguments.minutes:
            problems += soak(data, Path(folder, "soak"), minutes=arguments.minutes)
        chooser = random.Random(arguments.seed)
        decks = Decks(chooser)
        for number, shape in enumerate(SHAPES):
            kills = arguments.kills // len(SHAPES) + (number < arguments.kills % len(SHAPES))
            campaign = Campaign(shape, data, Path(folder, f"shape_{number}"), kills)
            campaign.run(chooser, decks)
            problems += campaign.problems
            rows += [
                (shape.name, fault, str(count), outcome)
                for (fault, outcome), count in sorted(campaign.outcomes.items())
            ]
    print(text_table(("run", "fault", "count", "outcome"), rows))
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    print("no difference" if not problems else f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
