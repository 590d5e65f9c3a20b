"""Draws which operators of the two strands run together, in the style of DHelix figure 10.

A body is a computation that the plan orders, such as the body of a layer loop. A segment of a body holds collectives
that are launched together, and the operators that run with them.

Time runs to the right. All times are simulated; nothing ran. The upper panel shows the step before planning: one
iteration of each layer loop of the plain step. For a dump, it shows the plan's first body in the dump's order. The
lower panel shows one iteration of the plan's first body in the plan's order, on the same time axis. Each segment is a
column. Strand alpha is above strand beta. Each strand has a row for compute and a row for communication, so blocks
above one another run at the same time. The hatched part of a block is the extra time that the operator takes because of
overlap. Red shows exposed communication, during which nothing computes.

    plan_picture.save_png(plan_picture.picture(candidate, plain), "plan.png")
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhelix.errors import DhelixError
from dhelix.launch.plan.program import Program
from dhelix.launch.plan.search import Candidate
from dhelix.launch.shown import figures
from dhelix.launch.shown.figures import ALPHA, BETA, EXPOSED, FAINT, HIDDEN, INK
from dhelix.launch.shown.instruction_words import parts_of
from dhelix.launch.shown.timeline_plot import subtract
from dhelix.passes.communication import exchange
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.intervals import Timeline
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.evaluation.step_parts import loops_to_look_at
from dhelix.passes.evaluation.timeline import evaluate, settled, simulate_module
from dhelix.passes.framework.gain import Gain
from dhelix.passes.framework.units import bytes_text, milliseconds
from dhelix.passes.hlo import Computation, HloModule
from dhelix.passes.plans.plan_operators import PlanOperators
from dhelix.profiles.keys import CollectiveKey, Key
from dhelix.runtime.profiling.traces.trace import Interval, merge

_STRANDS = ("alpha compute", "alpha send", "beta send", "beta compute")
_PLAIN = ("compute", "send")
_ROW_NAMES = {
    "alpha compute": "α computes", "alpha send": "α sends", "beta send": "β sends", "beta compute": "β computes",
    "compute": "computes", "send": "sends",
}  # fmt: skip
_COLOURS = {"alpha": ALPHA, "beta": BETA}
_LIGHT = {"alpha": figures.ALPHA_LIGHT, "beta": figures.BETA_LIGHT}  # operators that only move memory
_PART_STRAND = {"backward": "alpha", "forward": "beta"}
_MOST_SEGMENTS = 16  # more segments would not be readable side by side
_INCHES, _DPI = 16.0, 140
_ROW_INCHES = {2: 1.15, 4: 2.55}  # height of a panel, by its number of rows
_HALF = {"compute": 0.46, "send": 0.38}  # half of a block's height, in rows
_CHARACTER = 0.0041  # width of a label's character, as a fraction of the panel
_VISIBLE = 0.0025  # narrower parts of a block are not drawn; a fraction of the panel's width
_UPRIGHT = 11  # length of the longest label that is written vertically, in characters
_WORDS = {"attention backward": "attention bwd", **figures.SHORT}


@dataclass(frozen=True)
class Block:
    """A block in the picture: one execution of an operator. Times are in microseconds.

    Attributes:
      shape: the sizes of a product or the bytes of a collective, as text.
      alone: the operator's time while nothing else runs.
      sends: whether the operator communicates.
      light: whether the operator only moves memory.
    """

    strand: str
    label: str
    shape: str
    start: float
    end: float
    alone: float
    sends: bool
    light: bool


@dataclass(frozen=True)
class Panel:
    """A panel of the picture: one iteration, or several side by side. Times are in microseconds.

    Attributes:
      rows: keys of _ROW_NAMES, from top to bottom.
      marks: the time at which each part of the panel begins, and the part's name. The last part ends at `end`.
    """

    heading: str
    rows: tuple[str, ...]
    blocks: tuple[Block, ...]
    marks: tuple[tuple[float, str], ...]
    start: float
    end: float

    def row(self, block: Block) -> str:
        kind = "send" if block.sends else "compute"
        return kind if self.rows == _PLAIN else f"{block.strand} {kind}"


@dataclass(frozen=True)
class PlanPicture:
    """The data of a picture: the panel before planning and the panel after it."""

    title: str
    summary: str
    panels: tuple[Panel, ...]


def picture(candidate: Candidate, plain: Program | None = None, gain: Gain | None = None) -> PlanPicture:
    """The picture of a candidate. If the plan's first body is long, the lower panel shows only its middle.

    Args:
      plain: the plain step for the upper panel; None: the upper panel shows the planned program in its original order.
      gain: gain of the whole step, for the title.

    Raises:
      DhelixError: the plan has no body.
    """
    plan, target, instead = candidate.plan, candidate.plan.target, candidate.plan.collectives
    if not plan.bodies:
        raise DhelixError("the plan leaves XLA's order everywhere, so there is no pairing to draw; leave out --picture")
    more = f" with {exchange.in_words(instead.decomposed)} decomposed" if instead.decomposed else ""
    more += f", {instead.row_parts} row parts where one strand runs" if instead.row_parts else ""
    if gain is not None:
        more += f"  ·  {gain.time()}, {milliseconds(gain.after.exposed)} of it exposed"
        more += f"; assumed: {gain.after.assumed}" if gain.after.assumed else ""
    return PlanPicture(
        f"{plan.program}: predicted, not run",
        f"{target.hardware}, link {target.link}, launch setting {target.setting}{more}",
        (_plain(plain, candidate) if plain else _original(candidate), _planned(candidate)),
    )


def _planned(candidate: Candidate) -> Panel:
    body, module = candidate.plan.bodies[0], candidate.module
    costs, computation = settled(module, candidate.costs), _computation(candidate, module)
    timeline = evaluate(module.schedule[computation], costs)
    begins = [0.0]
    for segment in body.segments:
        begins.append(begins[-1] + segment.predicted_us)
    marks = [(begin, str(number)) for number, begin in enumerate(begins[:-1], 1)]
    start, end = 0.0, max(begins[-1], 1e6 * timeline.seconds)
    heading = _heading("After", body.runs, timeline)
    if len(marks) > _MOST_SEGMENTS:
        first = (len(marks) - _MOST_SEGMENTS) // 2
        start, end = begins[first], begins[first + _MOST_SEGMENTS]
        heading += f"; segments {first + 1} to {first + _MOST_SEGMENTS} of {len(marks)}"
        marks = marks[first : first + _MOST_SEGMENTS]
    names = {name: place.name for name, place in candidate.places.items()}
    blocks = tuple(b for b in _blocks(timeline, computation, names, costs) if b.end > start and b.start < end)
    return Panel(heading, _STRANDS, blocks, tuple(marks), start, end)


def _original(candidate: Candidate) -> Panel:
    """The upper panel for a dump: the plan's first body in the dump's order."""
    module = HloModule.from_bytes(candidate.program.module)
    costs, computation = settled(module, candidate.costs), _computation(candidate, module)
    timeline = evaluate(module.schedule[computation], costs)
    heading = _heading("Before, in the order of the dump", candidate.plan.bodies[0].runs, timeline)
    blocks = tuple(_blocks(timeline, computation, _names(computation, costs), costs))
    return Panel(heading, _STRANDS, blocks, (), 0.0, 1e6 * timeline.seconds)


def _plain(plain: Program, candidate: Candidate) -> Panel:
    """The upper panel for a preset: one iteration of each layer loop of the plain step, in XLA's order."""
    module = HloModule.from_bytes(plain.module)
    costs = settled(module, candidate.costs)
    computations = {i.name: c for c in module.computations for i in c.instructions}
    blocks: list[Block] = []
    marks: list[tuple[float, str]] = []
    end = seconds = exposed = 0.0
    for _, body, runs in loops_to_look_at(simulate_module(module, costs.hardware, costs)):
        computation = computations[body.intervals[0].instruction]
        blocks += _blocks(body, computation, _names(computation, costs), costs, offset=end)
        parts = {part for i, part in parts_of(computation) if i.name in {c.instruction for c in body.collectives}}
        direction = "".join(f"{part}, " for part in _PART_STRAND if parts == {part})
        marks.append((end, f"{direction}one of {runs:,} iterations: {1e6 * body.seconds:,.0f} µs"))
        end += 1e6 * body.seconds
        seconds, exposed = seconds + body.seconds, exposed + body.exposed
    heading = f"Before: the plain step's loops of layers, {1e6 * seconds:,.0f} µs, {1e6 * exposed:,.0f} of them exposed"
    return Panel(heading, _PLAIN, tuple(blocks), tuple(marks), 0.0, end)


def _heading(when: str, runs: int, timeline: Timeline) -> str:
    took, slower, exposed = (f"{1e6 * s:,.0f}" for s in (timeline.seconds, timeline.slow_down, timeline.exposed))
    return f"{when}: one of {runs:,} iterations, {took} µs, {exposed} of them exposed, {slower} slow-down"


def _computation(candidate: Candidate, module: HloModule) -> Computation:
    """The computation in `module` that is the plan's first body."""
    wanted, keys = candidate.plan.bodies[0].fingerprint, candidate.costs.operator_keys
    return next(c for c in module.schedule if PlanOperators(c, keys).fingerprint == wanted)


def _names(computation: Computation, costs: Costs) -> dict[str, str]:
    operators = PlanOperators(computation, costs.operator_keys)
    return {i.name: name for i, name in operators.names(list(operators.identities)).items()}


def _blocks(
    timeline: Timeline, computation: Computation, names: dict[str, str], costs: Costs, offset: float = 0.0
) -> Iterator[Block]:
    """The blocks of one iteration, shifted by `offset` microseconds.

    Args:
      names: readable names of the instructions. If a name does not begin with a strand, its operator counts as beta
        in the forward pass, else as alpha.
    """
    parts = {i.name: (i, part) for i, part in parts_of(computation)}
    for interval in timeline.intervals:
        name, (instruction, part) = names[interval.instruction], parts[interval.instruction]
        strand, _, label = name.partition(" ")
        if strand not in _COLOURS:
            strand, label = _PART_STRAND.get(part, "alpha"), name
        sends = interval.lane is not Lane.COMPUTE
        alone = interval.end - interval.start if interval.body else costs[instruction].seconds
        kind = label.rstrip("0123456789 ")
        light = not sends and kind.split(" ")[-1] not in ("gemm", "dgrad", "wgrad", "attention", "backward", "loop")
        shape = "" if light else _shape(costs.operator_keys[instruction])
        start, end = offset + 1e6 * interval.start, offset + 1e6 * interval.end
        yield Block(strand, label, shape, start, end, 1e6 * alone, sends, light)


def _shape(key: Key | None) -> str:
    if isinstance(key, CollectiveKey):
        return bytes_text(key.bytes)
    return "×".join(map(str, key.sizes)) if key else ""


def save_png(drawn: PlanPicture, path: str | Path) -> None:
    """Draws the picture. Raises DhelixError if matplotlib is missing or the file cannot be written."""
    with figures.drawing({"font.size": 9.5, "hatch.linewidth": 1.1}) as Figure:
        heights = [_ROW_INCHES[len(panel.rows)] for panel in drawn.panels]
        size = _INCHES, sum(heights) + 0.75 * len(heights) + 1.0
        figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
        axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        span = max(panel.end - panel.start for panel in drawn.panels)
        for axis, panel in zip(axes, drawn.panels, strict=True):
            _draw(axis, panel, span)
        figure.suptitle(f"{drawn.title}\n", x=0.01, ha="left", fontweight="bold", fontsize=12)
        figure.text(0.01, 1.0 - 0.3 / size[1], drawn.summary, fontsize=9.5, va="top")
        _legend(figure)
        figures.save(figure, path)


def _draw(axis: Any, panel: Panel, span: float) -> None:
    count = len(panel.rows)
    middles = {row: float(count - 1 - number) for number, row in enumerate(panel.rows)}
    for row, middle in middles.items():
        half = _HALF[row.split(" ")[-1]]
        axis.axhspan(middle - half, middle + half, color=FAINT, lw=0, zorder=0)
    busy = merge((b.start, b.end) for b in panel.blocks if not b.sends)
    for block in panel.blocks:
        _draw_block(axis, block, middles[panel.row(block)], busy, span)
    ends = [*(begin for begin, _ in panel.marks[1:]), panel.end][: len(panel.marks)]
    for number, ((begin, name), end) in enumerate(zip(panel.marks, ends, strict=True)):
        if number:
            axis.axvline(begin, color=INK, lw=0.9, ls=(0, (4, 3)), zorder=4)
        axis.text((begin + end) / 2, count - 0.45, name, ha="center", va="bottom", fontsize=8.5)
    if panel.rows == _STRANDS:
        axis.axhline(1.5, color=INK, lw=0.9)
    axis.set_xlim(panel.start, panel.start + span)
    axis.set_ylim(-0.52, count - 0.48)
    axis.set_yticks([middles[row] for row in panel.rows], [_ROW_NAMES[row] for row in panel.rows])
    axis.tick_params(axis="y", length=0)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f} µs")
    axis.set_title(panel.heading, loc="left", fontsize=10, fontweight="bold", pad=16)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_block(axis: Any, block: Block, middle: float, busy: list[Interval], span: float) -> None:
    from matplotlib.patches import Rectangle

    half = _HALF["send" if block.sends else "compute"]
    colour = HIDDEN if block.sends else (_LIGHT if block.light else _COLOURS)[block.strand]
    length = block.end - block.start
    box = {"edgecolor": "white", "lw": 0.6, "zorder": 2}
    axis.add_patch(Rectangle((block.start, middle - half), length, 2 * half, facecolor=colour, **box))
    if block.sends:
        axis.axvspan(block.start, block.end, color=HIDDEN, alpha=0.13, lw=0, zorder=1)
        for begin, end in subtract([(block.start, block.end)], busy):
            if end - begin > _VISIBLE * span:  # the pauses between kernels are not drawn
                red = {"facecolor": EXPOSED, "lw": 0.0, "zorder": 2}
                axis.add_patch(Rectangle((begin, middle - half), end - begin, 2 * half, **red))
    longer = length - block.alone
    if longer > _VISIBLE * span:
        hatch = {"facecolor": "none", "edgecolor": "white", "hatch": "////", "lw": 0.0, "zorder": 3}
        axis.add_patch(Rectangle((block.end - longer, middle - half), longer, 2 * half, **hatch))
    _write(axis, block, middle, span)


def _write(axis: Any, block: Block, middle: float, span: float) -> None:
    """Writes the label and the shape of a block left of its hatching, or as much of them as fits."""
    words, kind = [block.label], block.label.rstrip("0123456789 ")
    if kind in _WORDS:
        words.append(_WORDS[kind] + block.label[len(kind) :])
    end = min(block.end, block.start + block.alone)
    room = (end - block.start) / span / _CHARACTER
    text = next((w for w in words if len(w) + 1 < room), None)
    colour = INK if block.light else "white"
    style = {"ha": "center", "va": "center", "fontsize": 8, "color": colour, "zorder": 5, "clip_on": True}
    x = (block.start + end) / 2
    lines = _folded(block.shape, int((1.1 if "×" in block.shape else 1.2) * room - 1))
    if text is not None and lines:
        axis.text(x, middle + 0.08 + 0.05 * len(lines), text, **style)
        axis.text(x, middle - 0.12, "\n".join(lines), **{**style, "fontsize": 6, "linespacing": 1.1})
    elif text is not None:
        axis.text(x, middle, text, **style)
    elif room > 1.6 and len(words[-1]) <= _UPRIGHT:
        axis.text(x, middle, words[-1], rotation=90, **{**style, "fontsize": 6.5})


def _folded(shape: str, width: int) -> list[str]:
    """A shape as lines of at most `width` characters, broken before ×; [] if it needs more than three lines."""
    lines: list[str] = []
    for part in shape.replace("×", " ×").split(" ") if "×" in shape else filter(None, [shape]):
        if lines and len(lines[-1] + part) <= width:
            lines[-1] += part
        else:
            lines.append(part)
    return lines if len(lines) <= 3 and all(len(line) <= width for line in lines) else []


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=ALPHA, label="strand α, backward"),
        Patch(color=BETA, label="strand β, forward"),
        Patch(facecolor="#d3d7dc", label="light: moves memory only"),
        Patch(color=HIDDEN, label=figures.HIDDEN_WORDS),
        Patch(color=EXPOSED, label=figures.EXPOSED_WORDS),
        Patch(facecolor="#8d949c", edgecolor="white", hatch="////", label=figures.SLOW_DOWN_WORDS),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
