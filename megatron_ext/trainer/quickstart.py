"""The quickstart: one model on one text, without balancing, with it, and with ideal routing.

    python -m megatron_ext.trainer.quickstart [overrides]

It gathers a corpus from this machine's own text, trains the recipe `quickstart` three ways, prints
a table, writes `summary.json` and a page, `report.html`, beside the runs, and opens the page where
there is a display. The three models live in the same processes and take their steps in turn, so
that other work on the machine slows all alike.

A fourth run is the yardstick for the losses: it trains without balancing, with the samples of every
microbatch in reverse order. It computes the same sums in another order, so its distance from `none`
is the effect of rounding alone. Sooner or later rounding turns the choice of a token that likes two
experts equally, and the losses jump apart; in which step is chance, in any two runs. So losses are
compared up to the first step in which a token chose otherwise, and separately after it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    # Ctrl-C ends the process without a word of Python, also while what follows takes its seconds.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch.distributed as dist

from megatron_ext.config import ConfigError
from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.files.json_files import json_text
from megatron_ext.files.loads import read_loads
from megatron_ext.files.run_dir import TRACE_FOLDER
from megatron_ext.files.whole import write_whole
from megatron_ext.trainer.compose import load_config, said_in_lines
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.data import has_data
from megatron_ext.trainer.logs.progress import TrainingProgress
from megatron_ext.trainer.logs.rank_logs import keep_output
from megatron_ext.trainer.logs.run_log import RunLog, hold_run_dir, read_metrics
from megatron_ext.trainer.ranks.launch import join_ranks, launch_ranks, quiet_megatron
from megatron_ext.trainer.ranks.signals import exit_status
from megatron_ext.trainer.ranks.watchdog import watch_over
from megatron_ext.trainer.reports.read import read_runs
from megatron_ext.trainer.reports.run_page import FILE, write_run_page
from megatron_ext.trainer.reports.summary import Drift, summarize, summarize_runs, table
from megatron_ext.trainer.sinks.wandb import keep_comparison
from megatron_ext.trainer.validate import validate

logger = logging.getLogger("megatron_ext.trainer.quickstart")  # With -m, __name__ is __main__.

CORPUS = Path("runs/corpus")
DOMAIN_BYTES = 8 << 20
"""Text gathered for each domain: far more than the quickstart reads."""

COMPARED_STEPS = 50
"""Steps over which losses are compared. Rounding grows with every step, in any run."""

YARDSTICK = "none_reversed"


def main(overrides: Sequence[str] | None = None) -> None:
    """Run the quickstart; its runs are in the working directory.

    Raises:
        SystemExit: With status 2 if a setting is wrong, 1 if a rank failed or the machine has too
            little text.
    """
    quiet_megatron()
    overrides = list(sys.argv[1:] if overrides is None else overrides)
    with ExitStack() as held, said_in_lines():
        try:
            enable_cpu_platform()
            runs = {
                name: load_config([f"balance={name}", *overrides], config_name="quickstart")
                for name in ("none", "quota", "ideal")
            }
            runs[YARDSTICK] = load_config(
                ["balance=none", "data.reverse_samples=true", *overrides], config_name="quickstart"
            )
            folder = give_each_a_folder(runs)
            if steps := runs["none"].profile.steps:
                raise ConfigError(
                    [f"profile.steps ({steps}) must be 0: the runs of a quickstart take turns"]
                )
            if not has_data(runs["none"]):
                build_data(Path(runs["none"].data.path))
            num_ranks = runs["none"].parallel.ep_size
            for config in runs.values():
                config.logging.trace_steps = COMPARED_STEPS  # Choices are compared as well.
                config.overwrite = True  # Its runs never go on from others.
                validate(config, num_ranks=num_ranks)
                held.enter_context(hold_run_dir(config))
        except RuntimeError as error:
            raise SystemExit(f"error: {error}") from None
        launch_ranks(train_in_turn, runs, num_ranks=num_ranks)
    sys.stdout.write(write_report(runs, folder))
    sys.stdout.flush()
    open_page(folder / FILE)
    keep_comparison(runs["quota"], folder)


def give_each_a_folder(runs: dict[str, TrainConfig]) -> Path:
    """Set the runs' folders and their group; return the folder that they are in.

    A `run_dir` that does not depend on the strategy, as one on the command line, holds all runs.
    """
    if runs["none"].run_dir == runs["quota"].run_dir:
        folder = Path(runs["none"].run_dir)
    else:
        folder = Path(runs["none"].run_dir).parent
    for name, config in runs.items():
        config.run_dir = str(folder / name)
        config.logging.wandb_group = config.logging.wandb_group or folder.name
    return folder


def build_data(path: Path) -> None:
    """Gather the corpus and tokenize it into bytes, unless the dataset exists."""
    from megatron_ext.data.build import build_dataset, parse_sources
    from megatron_ext.data.corpus import gather_corpus

    if path.exists():
        return
    logger.info("gathering text into %s", CORPUS)
    gather_corpus(CORPUS, limit_bytes=DOMAIN_BYTES, overwrite=True, on_bytes=lambda _: None)
    domains = sorted(str(domain) for domain in CORPUS.iterdir() if domain.is_dir())
    manifest, _ = build_dataset(parse_sources(domains), path)
    for name, domain in manifest.domains.items():
        logger.info("%s: %d documents, %d tokens", name, domain.documents, domain.tokens)


def train_in_turn(runs: dict[str, TrainConfig]) -> None:
    """Train all runs on this rank, a step of each in turn."""
    first = runs["none"]
    keep_output(Path(first.run_dir))
    with watch_over(first), join_ranks(first.group_timeout), ExitStack() as stack:
        from megatron_ext.trainer.loop import Training

        trainings = {name: Training(config) for name, config in runs.items()}
        steps, every = first.steps, runs["quota"].logging.every
        logs = {}
        displays = {}
        if dist.get_rank() == 0:
            for name, config in runs.items():
                logs[name] = stack.enter_context(
                    RunLog(config, start_step=0, settled=trainings[name].settled())
                )
            displays["quota"] = stack.enter_context(
                TrainingProgress("quota", start_step=0, steps=steps, every=every)
            )
        for training in trainings.values():
            stack.callback(training.close)  # Before the logs end.
        for step in range(steps):
            for name, training in trainings.items():
                if name == YARDSTICK and step >= COMPARED_STEPS:
                    continue
                metrics = training.train_step()
                if name in logs:
                    logs[name].write(metrics, training.layers)
                if name in displays:
                    displays[name].show(metrics)


def write_report(runs: dict[str, TrainConfig], folder: Path) -> str:
    """Write `summary.json` and the page of the runs into `folder`; return a table of them."""
    metrics = {name: read_metrics(Path(config.run_dir)) for name, config in runs.items()}
    yardstick = summarize(metrics.pop(YARDSTICK))
    summaries = summarize_runs(metrics, against=("none", "ideal"))
    none, quota = summaries["none"], summaries["quota"]
    drifts = {
        name: Drift.of(
            none["losses"][:COMPARED_STEPS], losses, steps_alike(runs["none"], runs[name])
        )
        for name, losses in (("quota", quota["losses"]), (YARDSTICK, yardstick["losses"]))
    }
    quota["drift_from_none"] = asdict(drifts["quota"])
    none["drift_by_rounding"] = asdict(drifts[YARDSTICK])
    write_whole(folder / "summary.json", [json_text(summaries, indent=2), "\n"])
    write_run_page(read_runs([folder / name for name in metrics]), folder / FILE)
    return (
        f"\n{table(summaries)}\n\n"
        f"Losses of the first {COMPARED_STEPS} steps, the largest difference to those of none:\n"
        f"  quota: {drifts['quota'].text()}\n"
        f"  none with its sums in another order: {drifts[YARDSTICK].text()}\n"
        "Where two experts score equally, rounding decides, so runs start to differ at a random "
        "step.\n"
        f"Written: {folder / 'summary.json'}, {folder / FILE}\n"
    )


def open_page(page: Path) -> None:
    """Open the page in a browser, if `BROWSER` or a display is set and `CI` is not."""
    has_screen = any(os.environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))
    if has_screen and not os.environ.get("CI"):
        with suppress(Exception):  # The page's path has been printed.
            webbrowser.open(page.resolve().as_uri())


def steps_alike(config: TrainConfig, other: TrainConfig) -> int:
    """Steps before the first in which the experts' loads of two runs differ."""
    loads, others = (read_loads(Path(run.run_dir) / TRACE_FOLDER) for run in (config, other))
    steps = [each.trace["step"].tolist() for each in (loads, others)]
    shared = min(COMPARED_STEPS, steps[0][-1], steps[1][-1])
    pairs = zip(*steps, loads.load, others.load, strict=False)
    differ = (step for step, _, load, of_other in pairs if not load.equal(of_other))
    return min(next(differ, shared + 1) - 1, shared)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:  # Before there are ranks; then their launcher deals with it.
        sys.exit(exit_status(signal.SIGINT))
