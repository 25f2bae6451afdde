"""What balancing would bring to a run that was traced without it.

Slots are tried one after the other; plans are those of strategy `quota`. `replay.py` says how even
ranks become, and `simulate.py`, if model and machine are known, how long steps would take: no other
model of time is here. Legend: B loads, R ranks of the EP group, E logical experts.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megatron_ext.balance.metrics import home_loads, imbalances
from megatron_ext.files.loads import Loads
from megatron_ext.files.tables import Cells, fill, html_table, markdown_table
from megatron_ext.lab.planning import Asked
from megatron_ext.lab.replay import replay
from megatron_ext.lab.simulate import LEFT_OUT, NONE, Setting, simulate
from megatron_ext.trainer.reports.page import Page, page_html, part, sentences, wide
from megatron_ext.words import counted, ranges

STRATEGY = "quota"
SLOTS = (1, 2, 4, 8)
"""Slots to try."""
GOOD_ENOUGH = 0.01
"""Part of the best step, or of the best imbalance, that fewer slots may miss."""
MODEL_ERROR = 0.1
"""How far modelled step times of the quickstart were off at most, on a machine with measured rates
(`docs/results.md`, section 6): the range of a speed-up."""
MOST_LOADS = 1024
"""Loads that are planned; of more, some microbatches that are spread evenly over the trace."""
_LOADS_OF_BREAK_EVEN = 64
_LARGEST_SCALE = 10
"""Break-even is looked for up to 2 to this power times the trace's tokens, and as far below."""
_HALVINGS = 5
"""After which a bracket of 2 is known to 2 %."""


def count_plans(loads: Loads) -> int:
    """Return how often `what_if` calls `on_load`, at most, for loads of `sample`."""
    return len(loads) * (2 * len(SLOTS) + 1)


def sample(loads: Loads, most: int = MOST_LOADS) -> Loads:
    """Return at most so many loads: whole microbatches, at least one, spread evenly."""
    if len(loads) <= most:
        return loads
    if {"step", "microbatch"} <= loads.trace.keys():
        keys = torch.stack([loads.trace["step"], loads.trace["microbatch"]], 1)
        _, of = keys.unique(dim=0, return_inverse=True)
    else:
        of = torch.arange(len(loads))
    microbatches = int(of.max()) + 1
    count = max(1, most * microbatches // len(loads))
    kept = torch.isin(of, torch.linspace(0, microbatches - 1, count).long())
    return Loads(loads.load[kept], {name: values[kept] for name, values in loads.trace.items()})


def what_if(
    loads: Loads, asked: Asked, *, on_load: Callable[[int], object] = lambda count: None
) -> dict[str, Any]:
    """Return what balancing would bring, for JSON.

    Args:
        loads: Loads in the order of time.
        asked: What planners are asked for, with any number of slots; there are times if it is a
            `Setting`, which knows model and machine.
        on_load: Called with the number of loads that were planned.

    Returns:
        `tried`: for each number of slots the imbalance before and after, and if model and machine
        are known what `simulate` says; `slots`: those to take; `speed_up`, `share_of_ideal`,
        and `slot_bytes` with them, or None; `capacity_factor` before and after;
        `layers`: for each its imbalances and, or None, the time of a layer and its gain;
        `break_even`: None where times are not known, else whether balancing `gains` "always",
        "never", or "from" so many `tokens` of an expert in a microbatch.

    Raises:
        ValueError: There is nobody to share experts with, or sizes do not fit each other.
    """
    _, ranks, experts = loads.load.shape
    if ranks < 2:
        raise ValueError("an EP group of 1 rank has nobody to share its experts with: --ep-size")
    foreign = experts - experts // ranks
    tried = [
        _try_slots(loads, dataclasses.replace(asked, slots=slots), on_load)
        for slots in SLOTS
        if slots <= max(foreign, 1)
    ]
    # The fewest slots that are almost as good as the best.
    by = "imbalance" if tried[0]["step_ms"] is None else "step_ms"
    enough = (1 + GOOD_ENOUGH) * min(one[by] for one in tried)
    best = next(one for one in tried if one[by] <= enough)
    before, after = best["of_loads"]
    asked = dataclasses.replace(asked, slots=best["slots"])
    setting = asked if isinstance(asked, Setting) else None
    tokens = float(loads.load.sum((-2, -1)).double().mean()) / experts
    taken = ("slots", "speed_up", "share_of_ideal", "slot_bytes")
    report = {
        "loads": len(loads),
        "ranks": ranks,
        "experts": experts,
        "tokens_per_expert": tokens,
        "model": setting and setting.shape.name,
        "machine": setting and setting.hardware.summary,
        "nvlink_domain": asked.nvlink_domain,
        "settings": asked.settings(),
        "tried": [{key: value for key, value in one.items() if key != "of_loads"} for one in tried],
        **{name: best[name] for name in (*taken, "imbalance_before", "imbalance", "replicas")},
        "capacity_factor": {
            "before": _capacity_factor(loads, before, 0.0),
            "after": _capacity_factor(loads, after, asked.planning.tolerance),
        },
        "layers": _layers(loads, setting, best["of_loads"], on_load),
        "break_even": setting and _break_even(loads, setting, tokens),
        "left_out": list(LEFT_OUT) if best["speed_up"] is not None else [],
    }
    return report | {"verdict": verdict(report)}


def _try_slots(loads: Loads, asked: Asked, on_load: Callable[[int], object]) -> dict[str, Any]:
    """Return the numbers of the slots that are asked for, those of JSON and `of_loads`.

    `of_loads` has the imbalance of each load before and after, float64 [B].
    """
    measured = replay(loads, [STRATEGY], asked, on_load=on_load)[STRATEGY]
    before, after = imbalances(home_loads(loads.load)).numpy(), measured["imbalance"]
    numbers = {
        "slots": asked.slots,
        **_imbalances(before, after),
        "replicas": float(measured["replicas"].mean()),
        "of_loads": (before, after),
        **dict.fromkeys(("speed_up", "share_of_ideal", "step_ms", "slot_bytes")),
    }
    if isinstance(asked, Setting):
        simulated = simulate(loads, [STRATEGY], asked)["strategies"]
        of, plain = simulated[STRATEGY], simulated[NONE]
        numbers |= {
            "speed_up": plain["step_ms"] / of["step_ms"],
            "share_of_ideal": of["share_of_ideal"],
            "step_ms": of["step_ms"],
            "slot_bytes": asked.machine(loads).slot_bytes(asked.slots),
        }
        on_load(len(loads))
    return numbers


def _imbalances(before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    of = {"imbalance_before": before, "imbalance": after}
    worst = {f"{name}_worst": float(values.max()) for name, values in of.items()}
    return {name: float(values.mean()) for name, values in of.items()} | worst


def _capacity_factor(loads: Loads, imbalance: np.ndarray, tolerance: float) -> float:
    """Return the least factor that drops nothing, in hundredths, as a balanced layer asks for it.

    HybridEP leaves a row empty, and a layer has room for all that its tolerance allows
    (`mcore/capacity.py`).
    """
    mean = loads.load.sum((1, 2)).numpy() / loads.load.shape[1]
    needed = (imbalance + 1 / np.where(mean > 0, mean, np.inf)).max()
    # But for what is off by float's last digits.
    return math.ceil(max(needed, 1 + tolerance) * 100 - 1e-6) / 100


def _layers(
    loads: Loads,
    setting: Setting | None,
    of_loads: Sequence[np.ndarray],
    on_load: Callable[[int], object],
) -> list[dict[str, Any]]:
    """Return each layer's imbalances, and what the simulation makes of its loads alone."""
    layers, (before, after) = np.array(loads.layers()), of_loads
    report = []
    for layer in np.unique(layers):
        chosen = layers == layer
        ms: dict[str, float] = {}
        if setting is not None:
            own = Loads(loads.load[torch.from_numpy(chosen)])
            simulated = simulate(own, [STRATEGY], setting)["strategies"]
            ms = {name: of["layer_ms"]["total"] for name, of in simulated.items()}
        on_load(int(chosen.sum()))
        report.append(
            {
                "layer": int(layer),
                **_imbalances(before[chosen], after[chosen]),
                "ms": ms,
                "speed_up": ms[NONE] / ms[STRATEGY] if ms else None,
            }
        )
    return report


def _break_even(loads: Loads, setting: Setting, tokens: float) -> dict[str, Any]:
    """Scale the loads until a layer takes as long with balancing as without it."""
    few = sample(loads, _LOADS_OF_BREAK_EVEN)

    def gains(exponent: float) -> bool:
        scaled = (few.load.double() * 2**exponent).round().long()
        if not scaled.any():
            return False
        of = simulate(dataclasses.replace(few, load=scaled), [STRATEGY], setting)["strategies"]
        return bool(of[STRATEGY]["layer_ms"]["total"] < of[NONE]["layer_ms"]["total"])

    # From the trace's own size to the first power of two where the answer changes.
    here = gains(0)
    step = -1 if here else 1
    end = next((step * k for k in range(1, _LARGEST_SCALE + 1) if gains(step * k) != here), None)
    if end is None:
        return {"gains": "always" if here else "never", "tokens": None}
    low, high = sorted((float(end), float(end - step)))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if gains(middle) else (middle, high)
    return {"gains": "from", "tokens": tokens * 2**high}


def verdict(report: Mapping[str, Any]) -> str:
    """Return the answer in a sentence."""
    before, after, slots = report["imbalance_before"], report["imbalance"], report["slots"]
    taken = f"{slots} slot{'s' if slots > 1 else ''} a rank"
    even = f"{before:.2f} x the mean before, {after:.2f} x with {taken}"
    if report["speed_up"] is None:
        return (
            f"The busiest rank computes {even}: the experts would take {after / before:.2f} of "
            "their time, at best. --model and --hardware say what that makes of a step."
        )
    gain = f"{report['speed_up']:.2f} x as fast ({_range_of_gain(report['speed_up'])})"
    if _loses(report):
        return (
            f"Balancing would not pay here: a step would be {gain}. The busiest rank computes "
            f"{even}."
        )
    return (
        f"A step would be {gain} with {taken}, "
        f"{report['share_of_ideal']:.2f} of what even routing would bring. The busiest rank "
        f"computes {even}."
    )


def _range_of_gain(speed_up: float) -> str:
    low, high = speed_up * (1 - MODEL_ERROR), speed_up * (1 + MODEL_ERROR)
    return f"{low:.2f} to {high:.2f} if the model is {100 * MODEL_ERROR:.0f} % off"


def _loses(report: Mapping[str, Any]) -> bool:
    return report["speed_up"] is not None and report["speed_up"] < 1 + GOOD_ENOUGH


def answers(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the answers: what is asked, and what to do."""
    capacity = report["capacity_factor"]
    gaining = [one["layer"] for one in report["layers"] if _gains(one)]
    slots = "none" if _loses(report) else f"{report['slots']} (--moe-balance-slots)"
    rows = [
        ("slots to take", slots),
        (
            "rank capacity factor",
            f"{capacity['after']:.2f} instead of {capacity['before']:.2f} drops none of these "
            "tokens in bf16 (moe_expert_rank_capacity_factor, where a run sets one)",
        ),
        (
            "layers that gain",
            f"{len(gaining)} of {len(report['layers'])}"
            + (f": {ranges(gaining)}" if any(gaining) else ""),
        ),
    ]
    if report["speed_up"] is not None:
        rows[:0] = [
            (
                "speed-up of a step",
                f"{report['speed_up']:.2f} x ({_range_of_gain(report['speed_up'])})",
            ),
            ("share of even routing's speed", f"{report['share_of_ideal']:.3f}"),
        ]
        rows += [
            ("break-even", f"{_break_even_text(report)} ({report['tokens_per_expert']:.0f} here)"),
            ("memory of the slots", f"{report['slot_bytes'] / 2**30:.2f} GiB a rank"),
        ]
    return rows


def _gains(layer: Mapping[str, Any]) -> bool:
    if layer["speed_up"] is not None:
        return bool(layer["speed_up"] > 1 + GOOD_ENOUGH)
    return bool(layer["imbalance_before"] > (1 + GOOD_ENOUGH) * layer["imbalance"])


def _break_even_text(report: Mapping[str, Any]) -> str:
    if (tokens := report["break_even"]["tokens"]) is not None:
        return f"{tokens:.0f} tokens an expert"
    never = f"none up to {2**_LARGEST_SCALE} times the tokens"
    return {"always": "none: however few the tokens", "never": never}[report["break_even"]["gains"]]


def tried_cells(report: Mapping[str, Any]) -> Cells:
    """Return a table of the slots that were tried."""
    columns = {
        "slots": "{slots}",
        "imbalance": "{imbalance:.3f}",
        "worst": "{imbalance_worst:.3f}",
        "replicas": "{replicas:.1f}",
    }
    if report["speed_up"] is None:
        return fill(columns, report["tried"])
    columns |= {
        "step ms": "{step_ms:.1f}",
        "speed-up": "{speed_up:.3f}",
        "of ideal": "{share_of_ideal:.3f}",
        "slots GiB": "{slot_gib:.2f}",
    }
    return fill(columns, [one | {"slot_gib": one["slot_bytes"] / 2**30} for one in report["tried"]])


def layer_cells(report: Mapping[str, Any]) -> Cells:
    """Return a table of the layers."""
    columns = {
        "layer": "{layer}",
        "before": "{imbalance_before:.3f}",
        "worst before": "{imbalance_before_worst:.3f}",
        "after": "{imbalance:.3f}",
        "worst after": "{imbalance_worst:.3f}",
    }
    if report["speed_up"] is not None:
        columns |= {
            "layer ms before": f"{{ms[{NONE}]:.3f}}",
            "layer ms after": f"{{ms[{STRATEGY}]:.3f}}",
            "speed-up": "{speed_up:.3f}",
        }
    return fill(columns, [one | {"layer": one["layer"] or "all"} for one in report["layers"]])


def of_what(report: Mapping[str, Any]) -> str:
    """Return what the answer is about, in a line."""
    parts = [
        f"{counted(report['loads'], 'load')}, EP {report['ranks']}, {report['experts']} experts",
        report["model"],
        report["machine"],
    ]
    return "; ".join(part for part in parts if part)


def legend(report: Mapping[str, Any]) -> str:
    """Explain the columns of the tables."""
    said = "Imbalance: busiest rank / mean."
    if report["speed_up"] is None:
        return said
    return (
        f"{said} Of ideal: share of the speed of forced even routing. Slots: memory of a rank's "
        "slots, weights and gradients. Times are modelled, not measured."
    )


def text(report: Mapping[str, Any]) -> list[str]:
    """Return the answer for a terminal, in lines."""
    width = max(len(question) for question, _ in answers(report))
    return [
        report["verdict"],
        "",
        *(f"{question:{width}}  {answer}" for question, answer in answers(report)),
        "",
        markdown_table(*tried_cells(report)),
        "",
        markdown_table(*layer_cells(report)),
        "",
        f"Of {of_what(report)}. {legend(report)}",
    ]


def page(report: Mapping[str, Any]) -> str:
    """Return the answer as a page of HTML that needs no other file."""
    tables = (("Slots", tried_cells(report)), ("Layers", layer_cells(report)))
    below = [f"<h2>{title}</h2>{wide(html_table(*cells))}" for title, cells in tables]
    if report["left_out"]:
        items = "".join(f"<li>{html.escape(each)}</li>" for each in report["left_out"])
        below.append(f"<h2>What the times leave out</h2><ul>{items}</ul>")
    title = "What balancing would bring"
    return page_html(
        Page(
            title=title,
            top=f"<h1>{title}</h1>"
            + sentences([report["verdict"], f"Of {of_what(report)}. {legend(report)}"], [])
            + wide(html_table(("question", "answer"), answers(report))),
            data={key: report[key] for key in ("slots", "layers", "tried")},
            bottom="".join(below),
            script=part(__package__, "whatif_page.js"),
        )
    )
