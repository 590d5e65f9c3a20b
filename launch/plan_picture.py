"""A picture of a pairing in the manner of DHelix figure 10: both strands side by side, segments as columns.

Time runs to the right, as the evaluator plays one iteration of the plan's first body. Strand alpha stands above, strand
beta below; each has a row for what it computes and one for what it sends, so what lies above one another runs at the
same time. Hatched is what a block takes longer than alone, red is communication under which nothing computes.

    plan_picture.save_png(plan_picture.picture(candidate), "plan.png")
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhelix.errors import DhelixError
from dhelix.launch import figures
from dhelix.launch.plan_search import Candidate
from dhelix.launch.timeline_plot import subtract
from dhelix.passes.communication import exchange
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.instruction_costs import Lane
from dhelix.passes.evaluation.timeline import Timeline, evaluate, settled
from dhelix.passes.plans.plan_operators import PlanOperators
from dhelix.runtime.trace import Interval, merge

_ROWS = ("alpha compute", "alpha send", "beta send", "beta compute")
_HEIGHTS = {"alpha compute": 3.0, "alpha send": 2.05, "beta send": 0.95, "beta compute": 0.0}  # of the middle
_HALF = {"compute": 0.48, "send": 0.4}
_COLOURS = {"alpha": "#e08a3c", "beta": "#3f7cac"}
_LIGHT = {"alpha": "#f2c79b", "beta": "#a3c4de"}  # what only moves memory
_HIDDEN, _EXPOSED, _INK, _FAINT = "#79b791", "#cf2e43", "#24292f", "#f4f5f7"
_MOST_SEGMENTS = 12  # more are not readable side by side
_INCHES, _DPI = 13.0, 160
_CHARACTER = 0.0051  # of the width, at the font size of labels
_VISIBLE = 0.0025  # of the width, that a part of a block must have to be drawn
_UPRIGHT = 13  # characters that a row is high
_WORDS = {
    "attention backward": "attention bwd",
    "reduce-scatter": "RS",
    "all-gather": "AG",
    "all-to-all": "A2A",
    "all-reduce": "AR",
}


@dataclass(frozen=True)
class Block:
    """One operator. Times in microseconds; `alone` is what it takes with nothing beside it."""

    strand: str
    label: str
    start: float
    end: float
    alone: float
    sends: bool
    light: bool

    @property
    def row(self) -> str:
        return f"{self.strand} {'send' if self.sends else 'compute'}"


@dataclass(frozen=True)
class PlanPicture:
    """What is drawn; `segments` are the times in microseconds at which they begin, and where the last one ends."""

    title: str
    summary: str
    blocks: tuple[Block, ...]
    segments: tuple[float, ...]


def picture(candidate: Candidate) -> PlanPicture:
    """One iteration of the first body of a plan, or the middle of it if that is long.

    Raises DhelixError if the plan has no body.
    """
    plan = candidate.plan
    if not plan.bodies:
        raise DhelixError("the plan leaves XLA's order everywhere, so there is no pairing to draw; leave out --picture")
    body, module = plan.bodies[0], candidate.module
    costs = settled(module, candidate.costs)
    keys = costs.operator_keys
    computation = next(c for c in module.schedule if PlanOperators(c, keys).fingerprint == body.fingerprint)
    timeline = evaluate(module.schedule[computation], costs)
    begins = [0.0]
    for segment in body.segments:
        begins.append(begins[-1] + segment.predicted_us)
    target = plan.target
    more = f" with {exchange.in_words(target.decomposed)} decomposed" if target.decomposed else ""
    more += f", {target.row_parts} row parts where one strand runs" if target.row_parts else ""
    title = f"{plan.program}: what runs with what"
    summary = (
        f"{target.hardware}, {target.link}, setting {target.setting}{more}  ·  {body.predicted_us:,.0f} µs, of which"
        f" {1e6 * timeline.slow_down:,.0f} slow-down and {1e6 * timeline.exposed:,.0f} exposed  ·  {body.runs:,} runs"
    )
    blocks = _blocks(candidate, timeline, costs)
    if len(body.segments) > _MOST_SEGMENTS:
        first = (len(body.segments) - _MOST_SEGMENTS) // 2
        begins = begins[first : first + _MOST_SEGMENTS + 1]
        blocks = [b for b in blocks if b.end > begins[0] and b.start < begins[-1]]
        summary += f"  ·  segments {first + 1} to {first + _MOST_SEGMENTS} of {len(body.segments)}"
    return PlanPicture(title, summary, tuple(blocks), tuple(begins))


def _blocks(candidate: Candidate, timeline: Timeline, costs: Costs) -> list[Block]:
    blocks = []
    for interval in timeline.intervals:
        place = candidate.places[interval.instruction]
        strand, _, label = place.name.partition(" ")
        if strand not in _COLOURS:
            strand, label = "alpha", place.name
        sends = interval.lane is not Lane.COMPUTE
        alone = interval.end - interval.start if interval.body else costs[place.instruction].seconds
        kind = label.rstrip("0123456789 ")
        light = not sends and kind.split(" ")[-1] not in ("gemm", "dgrad", "wgrad", "attention", "backward", "loop")
        blocks.append(Block(strand, label, 1e6 * interval.start, 1e6 * interval.end, 1e6 * alone, sends, light))
    return blocks


def save_png(drawn: PlanPicture, path: str | Path) -> None:
    """Draws it.

    Raises DhelixError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise DhelixError("pictures need matplotlib: pip install 'dhelix[plot]'") from None
    with matplotlib.rc_context(
        {"font.size": 9.5, "font.family": "DejaVu Sans", "text.color": _INK, "hatch.linewidth": 1.1}
    ):
        figure = Figure(figsize=(_INCHES, 4.6), dpi=_DPI, layout="constrained")
        axis = figure.subplots()
        _draw(axis, drawn)
        axis.set_title(drawn.title, loc="left", fontweight="bold", fontsize=12, pad=36)
        axis.text(0.0, 1.085, drawn.summary, transform=axis.transAxes, fontsize=9.5, va="bottom")
        _legend(figure)
        figures.save(figure, path)


def _draw(axis: Any, drawn: PlanPicture) -> None:
    start, end = drawn.segments[0], max(drawn.segments[-1], *(b.end for b in drawn.blocks), 1.0)
    end = drawn.segments[-1] if start else end
    for row, middle in _HEIGHTS.items():
        half = _HALF[row.partition(" ")[2]]
        axis.axhspan(middle - half, middle + half, color=_FAINT, lw=0, zorder=0)
    busy = merge((b.start, b.end) for b in drawn.blocks if not b.sends)
    for block in drawn.blocks:
        _draw_block(axis, block, busy, end - start)
    for number, begin in enumerate(drawn.segments[:-1], 1):
        if number > 1:
            axis.axvline(begin, color=_INK, lw=0.9, ls=(0, (4, 3)), zorder=4)
        middle = (begin + drawn.segments[number]) / 2
        axis.text(middle, 3.6, str(number), ha="center", va="bottom", fontsize=9, fontweight="bold")
    axis.axhline(1.5, color=_INK, lw=0.9)
    axis.set_xlim(start, end)
    axis.set_ylim(-0.55, 3.55)
    names = {
        "alpha compute": "α computes",
        "alpha send": "α sends",
        "beta send": "β sends",
        "beta compute": "β computes",
    }
    axis.set_yticks([_HEIGHTS[row] for row in _ROWS], [names[row] for row in _ROWS])
    axis.tick_params(axis="y", length=0)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f} µs")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_block(axis: Any, block: Block, busy: list[Interval], span: float) -> None:
    from matplotlib.patches import Rectangle

    middle, half = _HEIGHTS[block.row], _HALF["send" if block.sends else "compute"]
    colour = _HIDDEN if block.sends else (_LIGHT if block.light else _COLOURS)[block.strand]
    length = block.end - block.start
    box = {"edgecolor": "white", "lw": 0.6, "zorder": 2}
    axis.add_patch(Rectangle((block.start, middle - half), length, 2 * half, facecolor=colour, **box))
    if block.sends:
        axis.axvspan(block.start, block.end, color=_HIDDEN, alpha=0.13, lw=0, zorder=1)
        for begin, end in subtract([(block.start, block.end)], busy):
            if end - begin > _VISIBLE * span:  # not the pauses between kernels
                red = {"facecolor": _EXPOSED, "lw": 0.0, "zorder": 2}
                axis.add_patch(Rectangle((begin, middle - half), end - begin, 2 * half, **red))
    longer = length - block.alone
    if longer > _VISIBLE * span:
        hatch = {"facecolor": "none", "edgecolor": "white", "hatch": "////", "lw": 0.0, "zorder": 3}
        axis.add_patch(Rectangle((block.end - longer, middle - half), longer, 2 * half, **hatch))
    _write(axis, block, middle, span)


def _write(axis: Any, block: Block, middle: float, span: float) -> None:
    """The label beside what is hatched, upright where that is narrow, or none where there is no room."""
    words, kind = [block.label], block.label.rstrip("0123456789 ")
    if kind in _WORDS:
        words.append(_WORDS[kind] + block.label[len(kind) :])
    end = min(block.end, block.start + block.alone)
    room = (end - block.start) / span / _CHARACTER
    text = next((w for w in words if len(w) + 1 < room), None)
    colour = _INK if block.light else "white"
    style = {"ha": "center", "va": "center", "fontsize": 8, "color": colour, "zorder": 5, "clip_on": True}
    x = (block.start + end) / 2
    if text is not None:
        axis.text(x, middle, text, **style)
    elif room > 1.6 and len(words[-1]) <= _UPRIGHT:
        axis.text(x, middle, words[-1], rotation=90, **{**style, "fontsize": 7})


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=_COLOURS["alpha"], label="α, backward"),
        Patch(color=_COLOURS["beta"], label="β, forward"),
        Patch(facecolor="#d3d7dc", label="light: moves memory only"),
        Patch(color=_HIDDEN, label="communication under compute"),
        Patch(color=_EXPOSED, label="exposed communication"),
        Patch(facecolor="#8d949c", edgecolor="white", hatch="////", label="longer than alone"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
