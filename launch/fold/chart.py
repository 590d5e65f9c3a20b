"""Chart of a pipeline schedule in the style of DHelix figure 8: time to the right, one row per stage.

A block is the work of one chunk on one micro-batch, labelled with the micro-batch's number. Light blocks are forward,
dark blocks are backward. If a stage goes forward and backward in one tick, both blocks together are an SI (strand
interleaving) block, and forward is above backward. With P stages, groups of P micro-batches belong to strands alpha and
beta in turn. Under the W and DualPipeV schedules, every SI block then holds one micro-batch of each strand, and a block
has the colour of its strand. Lines follow the first micro-batch of each strand through the stages, forward and then
backward.

    fold_chart.save(fold_chart.chart(schedule, cell_times(schedule, costs)), "fold.svg")
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhelix.launch.fold.times import Times
from dhelix.launch.shown import figures
from dhelix.launch.shown.figures import FAINT, GREY, INK
from dhelix.passes.pipeline_fold.schedule import Layout, Schedule

ALPHA, BETA, NEITHER = "alpha", "beta", "neither"
COLOURS = {  # strand -> colours of forward and backward
    ALPHA: (figures.ALPHA_LIGHT, figures.ALPHA),
    BETA: (figures.BETA_LIGHT, figures.BETA),
    NEITHER: (figures.BETA_LIGHT, figures.ALPHA),
}
TITLES = {
    "w": "W schedule",
    "interleaved_si": "interleaved SI",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "dualpipev": "DualPipeV",
    "zbv": "zero-bubble V",
    "bidirectional": "bidirectional",
}
_ROW = 0.9  # height of a row; the distance between rows is 1
_INCHES, _MARGIN, _BLOCK, _DPI = (11.0, 17.0), 1.6, 0.3, 160  # inches: width limits, margin, median block; DPI
_LARGEST, _SMALLEST = 9.0, 4.2  # font sizes in points; a number that would need a smaller font is left out
_EDGE, _WORD = 0.7, 55.0  # gap between blocks, and least width of a phase whose name is written, in points


@dataclass(frozen=True)
class Block:
    """The work of one chunk on one micro-batch. It fills its stage's row from `bottom` to `top`.

    Both are fractions of the row's height: 0 is the lower edge of the row, and 1 the upper edge.
    """

    stage: int
    start: float
    end: float
    bottom: float
    top: float
    microbatch: int
    chunk: int
    backward: bool
    strand: str

    @property
    def y(self) -> tuple[float, float]:
        """The lower and upper edge in the chart. The row of stage 0 is at the top, with its centre at 0."""
        return tuple(_ROW * (edge - 0.5) - self.stage for edge in (self.bottom, self.top))  # type: ignore[return-value]

    @property
    def colour(self) -> str:
        return COLOURS[self.strand][self.backward]

    @property
    def middle(self) -> tuple[float, float]:
        return (self.start + self.end) / 2, sum(self.y) / 2


@dataclass(frozen=True)
class FoldChart:
    """The data of a chart.

    Attributes:
      axis: text under the time axis.
      rows: text next to the row of each stage.
      phases: name, begin and end of each phase.
      followed: micro-batches whose path through the stages is drawn.
    """

    title: str
    summary: str
    axis: str
    rows: tuple[str, ...]
    blocks: tuple[Block, ...]
    phases: tuple[tuple[str, float, float], ...]
    followed: tuple[int, ...]

    @property
    def end(self) -> float:
        return max(block.end for block in self.blocks)


def chart(schedule: Schedule, times: Times, summary: str = "", axis: str = "time") -> FoldChart:
    """The chart of `schedule`.

    Args:
      times: begin and end of each cell (the work of one stage in one tick).
      summary: text under the title.
      axis: text under the time axis.
    """
    layout, count = schedule.layout, schedule.microbatches
    blocks = _blocks(schedule, times, strands(schedule))
    name = TITLES[schedule.name]
    two = {block.strand for block in blocks} == {ALPHA, BETA}
    return FoldChart(
        f"{name[0].upper()}{name[1:]}: {layout.layers} layers on {layout.stages} stages, {count} micro-batches",
        summary,
        axis,
        tuple(_row(layout, stage) for stage in range(layout.stages)),
        blocks,
        _phases(blocks),
        (0, layout.stages) if two else (0,),
    )


def span_text(layers: range) -> str:
    """A range of layers as text, such as "28-31"."""
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])


def strands(schedule: Schedule) -> tuple[str, ...]:
    """The strand of each micro-batch. With P stages, groups of P micro-batches are ALPHA and BETA in turn.

    If there is no SI block, or if an SI block would hold the same strand twice, all micro-batches are NEITHER.
    """
    stages = schedule.layout.stages
    pairs = [
        (cell.forward.microbatch // stages, cell.backward.microbatch // stages)
        for cells in schedule.ticks
        for cell in cells
        if cell.forward is not None and cell.backward is not None
    ]
    if not pairs or any(a % 2 == b % 2 for a, b in pairs):
        return (NEITHER,) * schedule.microbatches
    return tuple((ALPHA, BETA)[m // stages % 2] for m in range(schedule.microbatches))


def _row(layout: Layout, stage: int) -> str:
    spans = (span_text(layout.layers_of(chunk)) for chunk in layout.chunks_of(stage))
    return f"stage {stage}\nlayers {', '.join(spans)}"


def _blocks(schedule: Schedule, times: Times, strand: Sequence[str]) -> tuple[Block, ...]:
    blocks = []
    for cells, spans in zip(schedule.ticks, times, strict=True):
        # In lockstep, a stage with only one half of an SI block takes as long as a stage with a whole SI block.
        mixed = schedule.lockstep and any(c.forward for c in cells) and any(c.backward for c in cells)
        for stage, (cell, (start, end)) in enumerate(zip(cells, spans, strict=True)):
            halves = mixed or (cell.forward is not None and cell.backward is not None)
            for work, backward in ((cell.forward, False), (cell.backward, True)):
                if work is not None:
                    bottom, top = ((0.0, 0.5) if backward else (0.5, 1.0)) if halves else (0.0, 1.0)
                    m = work.microbatch
                    blocks.append(Block(stage, start, end, bottom, top, m, work.chunk, backward, strand[m]))
    return tuple(blocks)


def _phases(blocks: Sequence[Block]) -> tuple[tuple[str, float, float], ...]:
    """The phases. Warm-up ends when the first backward begins. Cool-down begins when the last forward ends."""
    first = min(block.start for block in blocks if block.backward)
    last = max(block.end for block in blocks if not block.backward)
    end = max(block.end for block in blocks)
    if last <= first:
        return (("forward", 0.0, last), ("backward", first, end))
    return (("warm-up", 0.0, first), ("steady", first, last), ("cool-down", last, end))


def save(drawn: FoldChart, path: str | Path) -> None:
    """Draws a chart and writes it to a file. Equal charts give equal bytes.

    Args:
      path: the file; its name ends in .png or .svg.

    Raises:
      DhelixError: the name has another ending, matplotlib is missing, or the file cannot be written.
    """
    metadata = figures.chart_metadata(path)
    colours = {"axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": INK}
    with figures.drawing({"font.size": 9, "svg.hashsalt": "dhelix", **colours}) as Figure:
        usual = statistics.median(block.end - block.start for block in drawn.blocks)
        width = min(max(_BLOCK * drawn.end / usual + _MARGIN, _INCHES[0]), _INCHES[1])
        row = 0.62 if len(drawn.rows) <= 4 else 0.52
        figure = Figure(figsize=(width, row * len(drawn.rows) + 1.75), dpi=_DPI, layout="constrained")
        axis = figure.subplots()
        _draw(axis, drawn, 72 * (width - _MARGIN) / drawn.end)
        axis.set_title(drawn.title, loc="left", fontweight="bold", fontsize=12, pad=38)
        axis.annotate(drawn.summary, (0, 1), (0, 27), "axes fraction", "offset points", fontsize=9.5, color=GREY)
        _legend(figure, drawn)
        figures.save(figure, path, "a file", metadata)


def _draw(axis: Any, drawn: FoldChart, points: float) -> None:
    """Draws a chart on an axis where one unit of time is `points` points wide."""
    rows, end = len(drawn.rows), drawn.end
    for stage in range(rows):
        axis.axhspan(-stage - _ROW / 2, -stage + _ROW / 2, color=FAINT, lw=0, zorder=0)
    _draw_blocks(axis, drawn, points)
    for block in drawn.blocks:
        _write_number(axis, block, points, block.microbatch in drawn.followed)
    for microbatch in drawn.followed:
        _draw_way(axis, [b for b in drawn.blocks if b.microbatch == microbatch])
    for number, (name, start, stop) in enumerate(drawn.phases):
        if number:
            axis.plot([start] * 2, [0.5 - rows, 0.86], color=INK, lw=0.9, ls=(0, (4, 3)), zorder=3, clip_on=False)
        if points * (stop - start) > _WORD:
            axis.text((start + stop) / 2, 0.6, name, ha="center", va="bottom", fontsize=9.5, fontweight="bold")
    axis.set_xlim(0, end)
    axis.set_ylim(0.5 - rows, 0.5)
    axis.set_yticks([-stage for stage in range(rows)], drawn.rows)
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel(drawn.axis, fontsize=8.5, color=GREY)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_blocks(axis: Any, drawn: FoldChart, points: float) -> None:
    """Draws the blocks. All blocks of a row and colour are drawn by one call, because a call for each would be slow."""
    rows: dict[tuple[tuple[float, float], str], list[tuple[float, float]]] = {}
    for block in drawn.blocks:
        rows.setdefault((block.y, block.colour), []).append((block.start, block.end - block.start))
    for ((lower, upper), colour), spans in rows.items():
        edge = min(_EDGE, 0.1 * points * min(length for _, length in spans))
        axis.broken_barh(spans, (lower, upper - lower), facecolor=colour, edgecolor="white", lw=edge, zorder=2)


def _write_number(axis: Any, block: Block, points: float, followed: bool) -> None:
    """Writes the number of the micro-batch into its block, as large as the block allows."""
    from matplotlib.patheffects import withStroke

    text = str(block.microbatch)
    size = min((points * (block.end - block.start) - 1.0) / (0.64 * len(text)), _LARGEST)
    if size < _SMALLEST:
        return
    # This outline keeps the line that follows the micro-batch away from the digits.
    effects = [withStroke(linewidth=2.5, foreground=block.colour)] if followed else None
    style = {"color": "white" if block.backward else INK, "fontsize": size, "path_effects": effects}
    axis.text(*block.middle, text, ha="center", va="center_baseline", zorder=5, **style)


def _draw_way(axis: Any, blocks: Sequence[Block]) -> None:
    """Draws a line through the centres of `blocks`, all of one micro-batch, in the order of time."""
    from matplotlib.patheffects import withStroke

    middles = sorted(block.middle for block in blocks)
    style = {"color": INK, "zorder": 4, "solid_joinstyle": "round"}
    axis.plot(
        *zip(*middles, strict=True),
        lw=1.1,
        path_effects=[withStroke(linewidth=2.4, foreground="white", alpha=0.7)],
        **style,
    )


def _legend(figure: Any, drawn: FoldChart) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    greek = {ALPHA: "strand α, ", BETA: "strand β, ", NEITHER: ""}
    kinds = sorted({(block.strand, block.backward) for block in drawn.blocks})
    handles: list[Any] = [
        Patch(color=COLOURS[strand][backward], label=f"{greek[strand]}{'backward' if backward else 'forward'}")
        for strand, backward in kinds
    ]
    handles.append(Patch(color=FAINT, label="idle"))
    words = " and ".join(map(str, drawn.followed))
    handles.append(Line2D([], [], color=INK, lw=1.1, label=f"the way of micro-batch {words}"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
