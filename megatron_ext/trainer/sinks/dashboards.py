"""A W&B project's workspace of sections, and its report "Is balancing worth it?".

Both are made from the panels of `sinks/panels.py`, so they fit what runs write. Needs the package
`wandb-workspaces`; only saving needs a login.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws

from megatron_ext.telemetry.names import LAYER_METRICS, MEGATRON_NAMES
from megatron_ext.trainer.sinks.panels import COUNT_OF_LAYERS, STEP, names_of, panels_by_section
from megatron_ext.trainer.sinks.pictures import (
    EXPERTS,
    EXPERTS_MAP,
    RANKS_AFTER,
    RANKS_BEFORE,
    RANKS_MAP,
)

WORKSPACE, REPORT = "Balance of experts", "Is balancing worth it?"
"""Their names."""


class PanelGroup(NamedTuple):
    """A part of the report: its question, how to read the answer, and the panels' titles."""

    asks: str
    read: str
    panels: tuple[str, ...]


QUESTIONS = (
    PanelGroup(
        "How much faster does it train?",
        "Each bar is the mean of a strategy's runs. `none` is Megatron alone; `ideal` forces even "
        "routing, which no training would want: it is the limit. The part of the way from `none` "
        "to `ideal` that a strategy goes is what it brings.",
        ("Tokens per second", "Time of a step (ms)", "TFLOP/s per GPU"),
    ),
    PanelGroup(
        "Are the ranks even?",
        "The busiest rank's load over the mean. Before is what the router chose, after is what "
        "was computed. Near 1 before, there is nothing to gain; above 1 + tolerance after, slots "
        "are too few or NVLink domains too small.",
        (
            "Imbalance, before and after",
            "Imbalance as computed, over layers and microbatches",
            "Above what any plan reaches",
            "Slots in use",
        ),
    ),
    PanelGroup(
        "What does it cost?",
        "Only what ranks wait for costs time; the rest is beside other work. Memory is that of "
        "the slots.",
        (
            "What ranks wait for (ms of a step)",
            "What is under way, waited for or not (ms of a step)",
            "Bytes moved",
            "Memory of the fullest rank (bytes)",
        ),
    ),
    PanelGroup(
        "Does it learn the same?",
        "Every token goes to the experts that it chose, so losses differ by rounding alone.",
        ("Loss", "Gradient norm"),
    ),
)


def workspace(entity: str, project: str) -> ws.Workspace:
    """Return the workspace: a section for each one of metrics, for layers and for Megatron's."""
    sections = {
        section: [_curves(title, names) for title, names in panels.items()]
        for section, panels in panels_by_section()
    }
    sections["balance"].append(_pictures())
    sections["balance"] += [
        _curves(f"Histogram of {name.partition('/')[2].replace('_', ' ')}", [name])
        for name in (RANKS_BEFORE, RANKS_AFTER, EXPERTS)
    ]
    sections["balance by layer"] = [
        wr.LinePlot(
            title=name.replace("_", " "), x=STEP, metric_regex=rf"^balance/{name}_layer_\d+$"
        )
        for name in LAYER_METRICS
    ]
    for section in ("balance by layer", "moe"):
        sections.setdefault(section, []).insert(0, wr.MarkdownPanel(markdown=COUNT_OF_LAYERS))
    sections["moe"] += [
        _curves(f"{name}, {what}", [name + suffix])
        for name in sorted({each.removesuffix("_routed") for each in MEGATRON_NAMES.values()})
        for suffix, what in (("", "as computed"), ("_routed", "as routed"))
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=WORKSPACE,
        sections=[
            ws.Section(name=name, panels=panels, is_open=name in ("train", "balance", "system"))
            for name, panels in sections.items()
        ],
        settings=ws.WorkspaceSettings(x_axis=STEP),
    )


def report(entity: str, project: str) -> wr.Report:
    """Return the report, which compares the project's runs by strategy."""
    blocks: list[Any] = [wr.TableOfContents()]
    for question in QUESTIONS:
        panels = [_curves(title, names_of(title)) for title in question.panels]
        if question is QUESTIONS[0]:
            bars = wr.BarPlot(
                title="Tokens per second, mean",
                metrics=[wr.SummaryMetric("system/tokens_per_s.mean")],
                groupby=wr.Config("balance.strategy"),
            )
            panels.insert(0, bars)
        blocks += _part(question.asks, question.read, panels)
    blocks += _part(
        "Which ranks and experts are hot?",
        "Load over the mean of its layer: 1 is even. Runs with logging.tier=detailed have curves "
        "of each layer in the workspace.",
        [_pictures()],
    )
    blocks += _part(
        "In what do the runs differ?",
        "Compare only runs that differ in nothing but what you ask about.",
        [wr.RunComparer(diff_only="split")],
        groupby=(),
    )
    return wr.Report(entity=entity, project=project, title=REPORT, blocks=blocks, width="fluid")


def serialised(entity: str, project: str) -> dict[str, Any]:
    """Return what W&B would be sent: the workspace and the report, for JSON."""
    made = {"workspace": workspace(entity, project), "report": report(entity, project)}
    return {
        name: one._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)
        for name, one in made.items()
    }


def save(entity: str | None, project: str) -> dict[str, str]:
    """Make both at W&B; return their addresses. Without an entity they are the login's own."""
    import wandb

    if not wandb.login(prompt=False):
        raise ValueError(
            "W&B has no login here: `wandb login` makes one; --dry-run needs none and shows what "
            "would be made"
        )
    owner = entity or str(wandb.Api().default_entity)
    return {
        "workspace": str(workspace(owner, project).save().url),
        "report": str(report(owner, project).save().url),
    }


def _part(
    asks: str,
    read: str,
    panels: Sequence[Any],
    groupby: Sequence[str] = ("config.balance.strategy",),
) -> list[Any]:
    # Without a project of its own, it has the report's; with one, W&B would be asked for its id.
    runs = wr.Runset(name="Runs", groupby=list(groupby))
    return [wr.H1(asks), wr.P(read), wr.PanelGrid(runsets=[runs], panels=list(panels))]


def _curves(title: str, names: Sequence[str]) -> wr.LinePlot:
    return wr.LinePlot(title=title, x=STEP, y=list(names))


def _pictures() -> wr.MediaBrowser:
    return wr.MediaBrowser(title="Loads over their mean", media_keys=[RANKS_MAP, EXPERTS_MAP])


def outline(made: Mapping[str, Any]) -> list[str]:
    """Return the sections or headings that `serialised` holds, with their panels, as lines."""
    lines = [f"workspace {WORKSPACE!r}"]
    for section in made["workspace"]["spec"]["section"]["panelBankConfig"]["sections"]:
        configs = [panel["config"] for panel in section["panels"]]
        titles = [config["chartTitle"] for config in configs if "chartTitle" in config]
        lines.append(f"  {section['name']}: {'; '.join(titles)}")
    lines.append(f"report {REPORT!r}")
    lines += [f"  {question.asks} {'; '.join(question.panels)}" for question in QUESTIONS]
    return lines
