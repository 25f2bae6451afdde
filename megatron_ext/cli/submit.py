"""`megatron-ext submit`: a training as a job of Slurm.

The job is `launch/slurm.sbatch` with other `#SBATCH` lines, and the words of the training in it.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import signal
import sys
import unicodedata
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.arguments import WRONG_USAGE, OneLineParser, error_line, positive
from megatron_ext.cli import slurm
from megatron_ext.cli.output import DONE, FAILED
from megatron_ext.config import ConfigError
from megatron_ext.trainer.ranks.signals import exit_status

if TYPE_CHECKING:
    from megatron_ext.trainer.config import TrainConfig

_PROGRAM = "megatron-ext submit"
_SUMMARY = "train as a job of Slurm, and follow its log"
_MARK = "#SBATCH --"

_OPPOSITES = {
    "gres": "gpus-per-node",
    "gpus": "gpus-per-node",
    "oversubscribe": "exclusive",
    "mem-per-cpu": "mem",
    "mem-per-gpu": "mem",
    "requeue": "no-requeue",
    "no-requeue": "requeue",
}
"""Options of sbatch, and what a job of ours may have that contradicts them."""

_INSTEAD = {"output": "--logs", "array": "--variants"}
"""Options of sbatch that would hide a log from who follows it, and what to give in their place."""


def add(commands: Any) -> None:
    """List the command; its words go to `run` unread: settings may stand between options."""
    commands.add_parser("submit", help=_SUMMARY)


def run(words: list[str]) -> int:
    """Check the settings and the cluster, then queue the job, or show its script."""
    options = parser().parse_intermixed_args(words)
    try:
        variants, config = _trainings(options)
        if slurm.is_here() and options.partition:
            # A script can be shown where Slurm's controller cannot be asked.
            with suppress(RuntimeError) if options.dry_run else nullcontext():
                slurm.check_partitions(options.partition)
        script = render(options, variants, config)
        if not (options.dry_run or slurm.is_here()):
            raise ValueError("there is no Slurm here (no sbatch in PATH); --dry-run shows the job")
        if not config.checkpoint.every:
            ends = "the job does not queue again, having no checkpoint to go on from"
            sys.stderr.write(f"{_PROGRAM}: checkpoint.every is 0: {ends}\n")
        if options.dry_run:
            sys.stdout.write(script)
            return DONE
        return _queue_and_follow(options, script)
    except ConfigError as error:
        sys.stderr.write("".join(error_line(_PROGRAM, problem) for problem in error.problems))
        return WRONG_USAGE
    except (ValueError, RuntimeError, OSError) as error:
        sys.stderr.write(error_line(_PROGRAM, error))
        return WRONG_USAGE if isinstance(error, ValueError) else FAILED


def _queue_and_follow(options: argparse.Namespace, script: str) -> int:
    options.logs.mkdir(parents=True, exist_ok=True)
    job = slurm.queue(script)
    if options.variants:
        files = {f"{name} | ": f"{job}_{i}" for i, name in enumerate(options.variants)}
    else:
        files = {"": job}
    logs = {label: options.logs / f"{_name(options)}-{file}.out" for label, file in files.items()}
    sys.stdout.write(f"job {job}; log: {' '.join(map(str, logs.values()))}\n")
    if options.detach:
        return DONE
    try:
        return DONE if slurm.follow(job, logs) else FAILED
    except KeyboardInterrupt:
        sys.stdout.write(f"\njob {job} goes on; `scancel {job}` ends it\n")
        return exit_status(signal.SIGINT)


def parser() -> OneLineParser:
    """Return the parser of the command line."""
    parser = OneLineParser(
        prog=_PROGRAM,
        description="Train as a job of Slurm, and follow its log. All machines must see the run "
        "directory.",
        epilog="example:\n  megatron-ext submit --config-name gpt_8x64e_8_h100_bf16 --nodes 2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config-dir", "-cd", metavar="DIR", help="folder of recipes, as for `train`")
    add("--config-name", "-cn", metavar="NAME", help="the recipe to start from")
    add("--nodes", type=positive, default=1, metavar="N", help="machines (%(default)s)")
    add(
        "--gpus-per-node",
        type=_gpus,
        metavar="[TYPE:]N",
        help="GPUs of each machine (as many as a server of the recipe's hardware has, or 8)",
    )
    add("--cpu-ranks", type=positive, metavar="N", help="ranks of each machine, if it has no GPUs")
    add("--task-per-rank", action="store_true", help="start a task for each rank, not each machine")
    add("--partition", metavar="NAME", help="partition of the job, if not the default one")
    add("--account", metavar="NAME", help="account that is charged for the job")
    add("--time", metavar="LIMIT", help="how long the job may run, as sbatch reads it")
    add(
        "--notice",
        type=positive,
        metavar="S",
        help="seconds before that limit at which the ranks save and the job queues again",
    )
    add(
        "--variants",
        type=lambda text: text.split(","),
        metavar="NAME,...",
        help="options of the group `balance`, e.g. none,quota,ideal: an array with a job for each",
    )
    add(
        "--container",
        metavar="IMAGE",
        help="run in this image of launch/Containerfile; needs pyxis",
    )
    add("--container-mounts", metavar="FROM:TO,...", help="further folders that the container sees")
    add(
        "--logs",
        type=Path,
        default=Path("runs/slurm"),
        metavar="DIR",
        help="folder for the logs of jobs (%(default)s)",
    )
    add(
        "--sbatch",
        action="append",
        type=_sbatch_option,
        default=[],
        metavar="--NAME[=VALUE]",
        help="any other option of sbatch, as in --sbatch=--qos=high; it overrides the job's own "
        "option of that name (--gres also --gpus-per-node, --oversubscribe also --exclusive); may "
        "be repeated",
    )
    add("--dry-run", action="store_true", help="show the script and stop; needs no Slurm")
    add("--detach", action="store_true", help="do not follow the log")
    add("overrides", nargs="*", help="settings, as section.name=value")
    return parser


def _gpus(text: str) -> str:
    """Read a number of GPUs, with their type before it or without, for argparse."""
    positive(text.rpartition(":")[2])
    return text


def _sbatch_option(text: str) -> tuple[str, str]:
    """Read an option of sbatch as its name and its value, for argparse."""
    if not (option := re.fullmatch(r"--([\w-]+)(?:=(.*))?", text)):
        raise argparse.ArgumentTypeError(f"{text!r} must be an option's long form, as --qos=high")
    if instead := _INSTEAD.get(option[1]):
        raise argparse.ArgumentTypeError(f"{text!r} would hide the log: give {instead}")
    return option[1], option[2] or ""


def _trainings(options: argparse.Namespace) -> tuple[list[list[str]], TrainConfig]:
    """Return the words of `train` for each job of an array, and the settings of the first.

    Runs that would share a directory get one each, inside it. All settings are checked.
    """
    from megatron_ext.trainer.compose import load_config
    from megatron_ext.trainer.early import check_early

    recipe = [options.config_dir, options.config_name]
    names = options.variants or []
    jobs = [[*options.overrides, f"balance={name}"] for name in names] or [options.overrides]
    run_dirs = [load_config(job, *recipe).run_dir for job in jobs]
    if len(set(run_dirs)) < len(jobs):
        jobs = [
            [*job, f"run_dir={run_dir}/{name}"]
            for job, run_dir, name in zip(jobs, run_dirs, names, strict=True)
        ]
    configs = [load_config(job, *recipe) for job in jobs]
    for config in configs:
        check_early(config)
    from megatron_ext.trainer.train import check

    for config in configs:
        check(config, num_ranks=options.nodes * _ranks_per_node(options, config))
    if options.notice and not configs[0].checkpoint.every:
        raise ValueError(f"--notice ({options.notice}) needs checkpoint.every > 0, to save then")
    if options.container_mounts and not options.container:
        raise ValueError(f"--container-mounts ({options.container_mounts}) needs --container")
    words = []
    if options.config_dir:
        words += ["--config-dir", str(Path(options.config_dir).absolute())]
    if options.config_name:
        words += ["--config-name", options.config_name]
    return [[*words, *job] for job in jobs], configs[0]


def _gpus_per_node(options: argparse.Namespace, config: TrainConfig) -> str:
    of_server = config.hardware.server_ranks or _template()[0]["gpus-per-node"]
    return str(options.gpus_per_node or of_server)


def _ranks_per_node(options: argparse.Namespace, config: TrainConfig) -> int:
    return int(options.cpu_ranks or _gpus_per_node(options, config).rpartition(":")[2])


def _name(options: argparse.Namespace) -> str:
    return str(options.config_name or "train")


def render(
    options: argparse.Namespace, variants: Sequence[Sequence[str]], config: TrainConfig
) -> str:
    """Return the script of a job.

    `variants` are the words of `train`, for each job of an array; `config` are settings of one.
    """
    header, body = _template()
    ranks = _ranks_per_node(options, config)
    name = _name(options).replace("%", "%%")  # Else Slurm puts numbers and names in its place.
    log = f"{name}-{'%A_%a' if options.variants else '%j'}.out"
    chosen = {
        "job-name": _name(options),
        "output": f"{options.logs.absolute()}/".replace("%", "%%") + log,
        "nodes": options.nodes,
        "ntasks-per-node": ranks if options.task_per_rank else 1,
        "gpus-per-node": _gpus_per_node(options, config),
        "partition": options.partition,
        "account": options.account,
        "time": options.time,
        "signal": options.notice and f"B:USR1@{options.notice}",
        "array": f"0-{len(variants) - 1}" if options.variants else None,
    }
    header |= {name: str(value) for name, value in chosen.items() if value}
    if options.cpu_ranks:
        del header["gpus-per-node"]
    if not config.checkpoint.every:  # It would begin again, and again.
        del header["signal"], header["requeue"]
        header["no-requeue"] = ""
    for name, value in options.sbatch:
        header.pop(_OPPOSITES.get(name, name), None)
        header[name] = value
    settings = {
        "LAUNCH": str(_launch_folder()),
        "MAX_RESTARTS": str(config.restarts),
        "RANKS_PER_NODE": str(ranks) if options.cpu_ranks else "",
        # The Python that has checked the settings.
        "VENV": "" if options.container else sys.prefix,
        "CONTAINER": options.container or "",
        "CONTAINER_MOUNTS": options.container_mounts or "",
    }
    for name, value in (header | settings).items():
        # A line of the script is one of Slurm's or of the shell's, where another could begin.
        if any(unicodedata.category(letter) == "Cc" for letter in value):
            raise ValueError(f"{name} ({value!r}) must be without control characters")
    words = [f"set -- {shlex.join(each)}" for each in variants]
    if options.variants:
        cases = [f"{index}) {line} ;;" for index, line in enumerate(words)]
        words = ["case $SLURM_ARRAY_TASK_ID in", *cases, "esac"]
    lines = [
        "#!/usr/bin/env bash",
        *(f"{_MARK}{name}" + (value and f"={_quoted(value)}") for name, value in header.items()),
        *(f"export {name}={shlex.quote(value)}" for name, value in settings.items() if value),
        *words,
        *body,
    ]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    """Return a value as sbatch reads it, for which a backslash escapes in quotes, too."""
    if value == shlex.quote(value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def _template() -> tuple[dict[str, str], list[str]]:
    """Return the options of sbatch in `launch/slurm.sbatch`, and its lines after the comments."""
    lines = (_launch_folder() / "slurm.sbatch").read_text().splitlines()
    options = [line.removeprefix(_MARK) for line in lines if line.startswith(_MARK)]
    header = {name: value for name, _, value in (each.partition("=") for each in options)}
    return header, list(itertools.dropwhile(lambda line: line.startswith("#"), lines))


def _launch_folder() -> Path:
    """Return the folder `launch`: in the repository, or in an installed package."""
    package = Path(__file__).parents[1]
    folders = [package.parent / "launch", package / "launch"]
    return next((folder for folder in folders if (folder / "slurm.sbatch").is_file()), folders[0])
