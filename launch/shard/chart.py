"""Chart of all factors: memory of a GPU to the right, exposed communication of a step upwards.

A point is one candidate of the planner. Its colour says how parameters are sharded: whole, inside a node, over nodes.
The chosen factors and known strategies have names. Right of the line, nothing fits. Equal results give equal bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dhelix.launch.shard.view import ShardView
from dhelix.launch.shown import figures
from dhelix.launch.shown.figures import EXPOSED, GREY, INK
from dhelix.passes.sharding.planner import Candidate

_GB = 1e9
_WIDTH = 2.5  # the chart ends at this multiple of the memory limit
_LOGARITHMIC = 10.0  # largest over least exposed time from which the axis is logarithmic
_KINDS = {
    "parameters on every GPU": figures.BETA,
    "parameters inside a node": figures.ALPHA,
    "parameters over nodes": figures.HIDDEN,
}


def kind(candidate: Candidate) -> str:
    """How parameters are sharded, in words of the legend."""
    whole, inside, over = _KINDS
    part = candidate.factors.parameters
    return over if part.nodes > 1 else inside if part.gpus > 1 else whole


def labels(view: ShardView) -> list[tuple[str, Candidate]]:
    """The named points: known strategies, and the shown factors last."""
    named = [(name, found) for name, found in view.known.items() if found.factors != view.chosen.factors]
    return [*named, (", ".join(str(factor) for _, factor in view.chosen.factors.states()), view.chosen)]


def save(view: ShardView, path: str | Path, title: str) -> None:
    """Draws the chart to a file.

    Args:
      path: the file; its name ends in .png or .svg.
      title: text above the chart.

    Raises:
      DhelixError: the name has another ending, matplotlib is missing, or the file cannot be written.
    """
    metadata = figures.chart_metadata(path)
    with figures.drawing({"font.size": 9, "svg.hashsalt": "dhelix"}) as Figure:
        figure = Figure(figsize=(9.0, 5.5), dpi=160, layout="constrained")
        axis = figure.subplots()
        _draw(axis, view)
        axis.set_title(title, loc="left", fontweight="bold", fontsize=10)
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        figures.save(figure, path, "a file", metadata)


def _draw(axis: Any, view: ShardView) -> None:
    found = (*view.planned.candidates, *view.planned.rejected)
    for words, colour in _KINDS.items():
        points = [_point(candidate) for candidate in found if kind(candidate) == words]
        if points:
            axis.scatter(*zip(*points, strict=True), s=22, color=colour, alpha=0.75, lw=0, label=words)
    axis.axvline(view.planned.limit / _GB, color=EXPOSED, lw=1.0, ls=(0, (4, 3)), label="memory of a GPU")
    for name, candidate in labels(view):
        chosen = candidate is view.chosen
        axis.annotate(
            name,
            _point(candidate),
            (5, 5),
            textcoords="offset points",
            annotation_clip=True,
            fontweight="bold" if chosen else "normal",
            color=INK if chosen else GREY,
        )
    axis.scatter(*_point(view.chosen), s=70, facecolor="none", edgecolor=INK, lw=1.4)
    exposed = [candidate.times.exposed for candidate in found]
    if min(exposed) > 0.0 and max(exposed) > _LOGARITHMIC * min(exposed):
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0.0)
    right = _WIDTH * view.planned.limit
    beyond = sum(candidate.memory.total > right for candidate in found)
    axis.set_xlim(0.0, min(right, 1.05 * max(candidate.memory.total for candidate in found)) / _GB)
    more = f"; {beyond} factors need more than is shown" if beyond else ""
    axis.set_xlabel(f"memory of a GPU, GB{more}", color=GREY)
    axis.set_ylabel("exposed communication of a step, seconds", color=GREY)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _point(candidate: Candidate) -> tuple[float, float]:
    return candidate.memory.total / _GB, candidate.times.exposed
