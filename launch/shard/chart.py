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
from dhelix.passes.sharding.factors import Factors
from dhelix.passes.sharding.planner import Candidate

_GB = 1e9
_WIDTH = 2.5  # the chart ends at this multiple of the memory limit
_LOGARITHMIC = 10.0  # largest over least exposed time from which the axis is logarithmic
_PLACES = ((5, 5), (5, -12), (-5, 5), (-5, -12))  # of a name beside its point, the preferred one first
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
    """The named points: known strategies, those of equal factors together, and the shown factors last."""
    points: dict[Factors, tuple[list[str], Candidate]] = {}
    for name, found in view.known.items():
        if found.factors != view.chosen.factors:
            points.setdefault(found.factors, ([], found))[0].append(name)
    named = [(", ".join(names), found) for names, found in points.values()]
    factors = ", ".join(str(factor) for _, factor in view.chosen.factors.states())
    return [*named, ("groups of parameters" if view.groups and not view.groups.equal else factors, view.chosen)]


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
        figure.draw_without_rendering()  # now it is known where labels lie
        write_names(axis, view)
        figures.save(figure, path, "a file", metadata)


def _draw(axis: Any, view: ShardView) -> None:
    found = (*view.planned.candidates, *view.planned.rejected)
    for words, colour in _KINDS.items():
        points = [_point(candidate) for candidate in found if kind(candidate) == words]
        if points:
            axis.scatter(*zip(*points, strict=True), s=22, color=colour, alpha=0.75, lw=0, label=words)
    axis.axvline(view.planned.limit / _GB, color=EXPOSED, lw=1.0, ls=(0, (4, 3)), label="memory of a GPU")
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


def write_names(axis: Any, view: ShardView) -> list[Any]:
    """Writes the names of points into a chart that is laid out, each where no other name is. Returns the texts."""
    written: list[Any] = []
    for name, candidate in reversed(labels(view)):
        chosen = candidate is view.chosen
        style = {"fontweight": "bold" if chosen else "normal", "color": INK if chosen else GREY}
        text = None
        for place in _PLACES:
            if text is not None:
                text.remove()
            side = "left" if place[0] > 0 else "right"
            text = axis.annotate(
                name, _point(candidate), place, textcoords="offset points", ha=side, annotation_clip=True, **style
            )
            box = text.get_window_extent()
            if box.x0 >= axis.bbox.x0 and not any(box.overlaps(one.get_window_extent()) for one in written):
                break
        written.append(text)
    return written


def _point(candidate: Candidate) -> tuple[float, float]:
    return candidate.memory.total / _GB, candidate.times.exposed
