"""Loads of a step as heat maps and as numbers for histograms.

Loads are shown as multiples of their layer's mean: 1 is even.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
"""[height, width, 3], red, green and blue."""

RANKS_BEFORE, RANKS_AFTER = "balance/rank_loads_before", "balance/rank_loads_after"
EXPERTS = "balance/expert_loads"
"""Names of the histograms."""

RANKS_MAP, EXPERTS_MAP = "balance/rank_loads_map", "balance/expert_loads_map"
"""Names of the pictures."""

_COLOURS, _TOP = "cividis", 3.0
"""Matplotlib's name of the colours, and the load over the mean at which they end."""

_MOST_LABELS = 12
"""Layers, ranks or experts with a number beside them; of more, every second, third and so on."""


def relative_loads(layers: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
    """Return loads over their layer's mean, by what they are of: [layers, ranks or experts].

    Of a line of `layers.jsonl` without the loads of experts, whose step is not drawn, it is empty.
    """
    if "expert_loads" not in layers:
        return {}
    loads = {
        name: np.array(layers[name.removeprefix("balance/")], dtype=np.float64)
        for name in (RANKS_BEFORE, RANKS_AFTER, EXPERTS)
    }
    # A layer without a token is even.
    return {
        name: of_layers / np.maximum(of_layers.mean(1, keepdims=True), 1e-9)
        for name, of_layers in loads.items()
    }


def heat_maps(layers: Mapping[str, Any]) -> dict[str, Image]:
    """Return pictures by name: layers x ranks, before and after, and layers x experts.

    Empty where `relative_loads` is.
    """
    if not (loads := relative_loads(layers)):
        return {}
    shown = {RANKS_MAP: (RANKS_BEFORE, RANKS_AFTER), EXPERTS_MAP: (EXPERTS,)}
    return {
        name: _heat_map({each: loads[each] for each in of_picture}, layers["layer"])
        for name, of_picture in shown.items()
    }


def _heat_map(loads: Mapping[str, NDArray[np.float64]], numbers: Sequence[int]) -> Image:
    """Draw loads side by side, in colours that mean the same in all pictures of all runs.

    A training waits for it: all but the cells is drawn once, as that takes matplotlib long.
    """
    import matplotlib as mpl

    num_columns = next(iter(loads.values())).shape[1]
    empty, boxes = _frame(tuple(loads), tuple(numbers), num_columns)
    picture = empty.copy()
    for box, each in zip(boxes, loads.values(), strict=True):
        cells = mpl.colormaps[_COLOURS](np.minimum(each / _TOP, 1.0), bytes=True)[..., :3]
        area = picture[box]
        rows, columns = (
            np.arange(pixels) * count // pixels
            for pixels, count in zip(area.shape, each.shape, strict=False)
        )
        area[:] = cells[rows][:, columns]
    return picture


@cache
def _frame(
    names: tuple[str, ...], numbers: tuple[int, ...], num_columns: int
) -> tuple[Image, list[tuple[slice, slice]]]:
    """Draw a picture without cells; return it with the places of the cells, a box a name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(1.5 + 4.5 * len(names), 4.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    plots = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    labelled = range(0, len(numbers), -(-len(numbers) // _MOST_LABELS))
    for plot, name in zip(plots, names, strict=True):
        plot.set_title(name.partition("/")[2].replace("_", " "))
        plot.set_xlabel("expert" if name == EXPERTS else "rank")
        plot.set_xlim(-0.5, num_columns - 0.5)
        plot.xaxis.set_major_locator(MaxNLocator(_MOST_LABELS, integer=True))
        plot.set_ylim(len(numbers) - 0.5, -0.5)
        plot.set_yticks(labelled, [str(numbers[place]) for place in labelled])
    plots[0].set_ylabel("layer")
    scale = ScalarMappable(Normalize(0.0, _TOP), _COLOURS)
    figure.colorbar(scale, ax=list(plots), label="load / mean", extend="max")
    canvas.draw()
    picture = np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])
    height = picture.shape[0]
    extents = [plot.get_window_extent() for plot in plots]
    # Matplotlib counts from below; the border of a plot stays.
    return picture, [
        (
            slice(height - int(one.y1) + 1, height - int(one.y0) - 1),
            slice(int(one.x0) + 1, int(one.x1) - 1),
        )
        for one in extents
    ]
