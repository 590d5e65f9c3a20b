"""Pictures of timelines: which operators run when, in the whole step and in one iteration of its loops.

A `Picture` is data: bars on lanes, such as compute and communication. `save_png` draws one picture, or several pictures
above one another on the same time axis, for example before and after a change. `save_perfetto` writes the same bars for
https://ui.perfetto.dev.

Communication has two colours. It is *hidden* while compute runs at the same time, and *exposed* otherwise. The step
waits for exposed communication. A panel of the whole step consists of columns, which stand for short periods. In a
column, the height of each colour is its fraction of the period. So ten thousand operators remain readable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dhelix.errors import DhelixError
from dhelix.launch.shown import figures
from dhelix.launch.shown.figures import ALPHA, BETA, EXPOSED, FAINT, HIDDEN, INK
from dhelix.launch.shown.units import size_unit
from dhelix.runtime.profiling.traces.trace import Interval, length, merge

COMPUTE, COMMUNICATION = "compute", "communication"

# Key of a bar -> (colour, text in the legend). This is the order in the legend, and in columns from bottom to top.
COLOURS = {
    "alpha": (ALPHA, "strand α"),
    "backward": (ALPHA, "backward"),
    "beta": (BETA, "strand β"),
    "forward": (BETA, "forward"),
    "copy": ("#7b4fa3", "copies of large buffers"),
    "other": ("#aab2bb", "other compute"),
    "hidden": (HIDDEN, figures.HIDDEN_WORDS),
    "exposed": (EXPOSED, figures.EXPOSED_WORDS),
    "communication": ("#b59f6e", "communication"),
}
MEMORY = {
    "arguments": ("#8a949e", "arguments (parameters, optimizer state)"),
    "residuals": ("#5b7f95", "residuals"),
    "rest": ("#cdd3d9", "other memory"),
}
"""Colours of the memory, from bottom to top, and their texts in the legend."""
_LEGEND = 5  # entries in a line of the legend
_WIDTH, _DPI = 12.0, 200  # inches; dots per inch
_TITLE_CHARACTERS = 130  # title and summary share a line if they have at most about this many characters
_COLUMNS = 240  # number of columns in a panel of the whole step; each column covers many operators


@dataclass(frozen=True)
class Bar:
    """One operator on one lane. Times are in milliseconds.

    Attributes:
      lane: `compute` or `communication`. Further lanes have a suffix, such as `communication with the host`.
      key: the part of the step that decides the colour: alpha, beta, forward, backward, copy or other.
      label: word for the operator, which is written into the bar if there is room.
      name: name of the instruction.
      short: shorter word, which is written into the bar if there is no room for `label`.
    """

    start: float
    end: float
    lane: str
    key: str
    label: str
    name: str
    short: str = ""


@dataclass(frozen=True)
class Window:
    """A period of the timeline that is drawn enlarged. Times are in milliseconds."""

    start: float
    end: float
    title: str


@dataclass(frozen=True)
class Picture:
    """A timeline with a title.

    Attributes:
      summary: one line of text next to the title.
      zoom: periods that are drawn enlarged, side by side.
      overlaps: whether communication can overlap with compute. If not, all communication has the same colour.
      memory: when the needed memory changes, in milliseconds, to how many bytes, and how many of these are residuals,
        which the forward pass keeps for the backward pass.
      arguments: bytes of the program's arguments: parameters, optimizer states and the batch.
    """

    title: str
    summary: str
    bars: tuple[Bar, ...]
    zoom: tuple[Window, ...] = ()
    overlaps: bool = True
    memory: tuple[tuple[float, int, int], ...] = ()
    arguments: int = 0

    @property
    def end(self) -> float:
        return max((bar.end for bar in self.bars), default=0.0)

    @property
    def lanes(self) -> list[str]:
        """The names of the lanes from top to bottom: compute, then communication."""
        return sorted({bar.lane for bar in self.bars}, key=lambda lane: (is_communication(lane), lane))


def is_communication(lane: str) -> bool:
    return lane.startswith(COMMUNICATION)


def save_png(pictures: Sequence[Picture], path: str | Path, headline: str = "", footnote: str = "") -> None:
    """Draws the pictures above one another on a common time axis, and their enlarged periods below.

    Args:
      headline: title of the whole figure.
      footnote: text next to the legend.

    Raises:
      DhelixError: matplotlib is missing, there is nothing to draw, or the file cannot be written.
    """
    if not any(picture.bars for picture in pictures):
        raise DhelixError("the timeline is empty, so there is nothing to draw")
    zoomed = [picture for picture in pictures if picture.zoom]
    remembered = [picture for picture in pictures if picture.memory]
    rows = [*(sum(0.55 for _ in p.lanes) + 0.55 for p in (*pictures, *zoomed)), *(1.1 for _ in remembered)]
    with figures.drawing({"font.size": 9.5}) as Figure:
        figure = Figure(figsize=(_WIDTH, sum(rows) + 1.15 + 0.3 * bool(headline)), dpi=_DPI, layout="constrained")
        axes = figure.subplots(len(rows), 1, height_ratios=rows, squeeze=False)[:, 0]
        span = max(picture.end for picture in pictures)
        for axis, picture in zip(axes, pictures, strict=False):
            _draw_shares(axis, picture, span)
        zoom_span = max((_zoom_length(picture) for picture in zoomed), default=0.0)
        for axis, picture in zip(axes[len(pictures) :], zoomed, strict=False):
            _draw_zoom(axis, picture, zoom_span, named=len(pictures) > 1)
        most = max((needed for picture in remembered for _, needed, _ in picture.memory), default=0)
        for axis, picture in zip(axes[len(pictures) + len(zoomed) :], remembered, strict=True):
            _draw_memory(axis, picture, span, most, named=len(pictures) > 1)
        _legend(figure, pictures, footnote)
        if headline:
            figure.suptitle(headline, fontsize=13, fontweight="bold")
        figures.save(figure, path)


def save_perfetto(pictures: Sequence[Picture], path: str | Path) -> None:
    """Writes the pictures as a Perfetto trace: one process per picture, one thread per lane.

    Raises:
      DhelixError: the perfetto package is missing, or the file cannot be written.
    """
    try:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder
    except ImportError:
        raise DhelixError("Perfetto traces need the perfetto package: pip install 'dhelix[plot]'") from None
    builder = TraceProtoBuilder()
    track = 0
    for process, picture in enumerate(pictures, 1):
        for lane in picture.lanes:
            track += 1
            descriptor = builder.add_packet().track_descriptor
            descriptor.uuid = track
            descriptor.thread.pid, descriptor.thread.tid = process, track
            descriptor.thread.thread_name = lane
            descriptor.process.pid = process
            descriptor.process.process_name = picture.title
            for bar in sorted((b for b in picture.bars if b.lane == lane), key=lambda b: b.start):
                begin, end = builder.add_packet(), builder.add_packet()
                begin.timestamp, end.timestamp = round(bar.start * 1e6), round(bar.end * 1e6)  # ns
                begin.track_event.type = TrackEvent.TYPE_SLICE_BEGIN
                end.track_event.type = TrackEvent.TYPE_SLICE_END
                begin.track_event.name = f"{bar.label} {bar.name}"
                begin.track_event.categories.append(bar.key)
                for packet in (begin, end):
                    packet.trusted_packet_sequence_id = 1
                    packet.track_event.track_uuid = track
    try:
        Path(path).write_bytes(builder.serialize())
    except OSError as error:
        raise DhelixError(f"cannot write {path} ({error.strerror}); give a file in a folder that exists") from None


def pieces(picture: Picture, lane: str) -> dict[str, list[Interval]]:
    """The intervals in which a lane is busy, by key of COLOURS. Each list is disjoint and sorted.

    The keys of a compute lane are the keys of its bars. The keys of a communication lane are `hidden` and `exposed`. If
    communication cannot overlap with compute, the only key is `communication`.
    """
    bars = [bar for bar in picture.bars if bar.lane == lane]
    if not is_communication(lane):
        keys = [key for key in COLOURS if any(bar.key == key for bar in bars)]
        return {key: merge((b.start, b.end) for b in bars if b.key == key) for key in keys}
    compute = merge((b.start, b.end) for b in picture.bars if not is_communication(b.lane))
    busy = merge((bar.start, bar.end) for bar in bars)
    if not picture.overlaps:
        return {"communication": busy}
    exposed = subtract(busy, compute)
    return {"hidden": subtract(busy, exposed), "exposed": exposed}


def subtract(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The parts of the intervals `a` that are not in `b`. Arguments and result are disjoint and sorted."""
    result: list[Interval] = []
    position = 0
    for start, end in a:
        while position < len(b) and b[position][1] <= start:
            position += 1
        at = position
        while at < len(b) and b[at][0] < end:
            if b[at][0] > start:
                result.append((start, b[at][0]))
            start = max(start, b[at][1])
            at += 1
        if start < end:
            result.append((start, end))
    return result


def _draw_shares(axis: Any, picture: Picture, span: float) -> None:
    edges = np.linspace(0.0, span, _COLUMNS + 1)
    for row, lane in enumerate(picture.lanes):
        bottom = np.full(_COLUMNS, -row - 0.4)
        axis.axhspan(-row - 0.4, -row + 0.4, color=FAINT, lw=0)
        for key, intervals in pieces(picture, lane).items():
            top = bottom + 0.8 * _shares(intervals, edges)
            axis.fill_between(edges[:-1], bottom, top, step="post", color=COLOURS[key][0], lw=0, rasterized=True)
            bottom = top
    _finish(axis, picture, span)
    long = 1.25 * len(picture.title) + len(picture.summary) > _TITLE_CHARACTERS
    axis.set_title(f"{picture.title}{'\n' * long}", loc="left", fontweight="bold", fontsize=11.5)
    axis.set_title(picture.summary, loc="right", fontsize=9.5)
    for window in picture.zoom:
        axis.axvspan(window.start, window.end, facecolor="none", edgecolor=INK, lw=0.9, zorder=5)
    if picture.end < 0.995 * span:
        axis.axvline(picture.end, color=INK, lw=0.8, ls=":")


def _draw_memory(axis: Any, picture: Picture, span: float, most: int, named: bool) -> None:
    """Draws what lives over the time of the step: arguments, residuals and the rest, one upon the other."""
    at, needed, residuals = (np.array([*column, column[-1]], float) for column in zip(*picture.memory, strict=True))
    at[-1] = picture.end
    unit, peak = size_unit([most]), needed.max()
    held = np.full_like(needed, min(picture.arguments, needed.min()))
    tops = np.zeros_like(needed), held, held + residuals, needed
    for key, bottom, top in zip(MEMORY, tops, tops[1:], strict=False):
        axis.fill_between(at, bottom / unit.size, np.maximum(top, bottom) / unit.size, step="post",
                          color=MEMORY[key][0], lw=0, rasterized=True)  # fmt: skip
    axis.set_ylim(0, 1.05 * most / unit.size)
    axis.set_yticks([0, peak / unit.size], ["0", f"memory, estimated\n{unit.text(peak)}"])
    _time_axis(axis, span)
    if named:
        axis.set_title(f"{picture.title}: memory", loc="left", fontsize=10, fontweight="bold")


def _shares(intervals: Sequence[Interval], edges: np.ndarray) -> np.ndarray:
    """For each pair of neighbouring edges, the fraction of the time between them that `intervals` cover."""
    if not intervals:
        return np.zeros(len(edges) - 1)
    times = np.array(intervals).ravel()
    covered = np.concatenate([[0.0], np.cumsum(np.diff(times) * (np.arange(len(times) - 1) % 2 == 0))])
    return np.diff(np.interp(edges, times, covered)) / np.diff(edges)


def _draw_zoom(axis: Any, picture: Picture, span: float, named: bool) -> None:
    offset = 0.0
    for number, window in enumerate(picture.zoom):
        shift = offset - window.start
        for row, lane in enumerate(picture.lanes):
            _draw_bars(axis, picture, lane, -row, window, shift, span)
        if number:
            axis.axvline(offset, color=INK, lw=1.0)
        middle = offset + (window.end - window.start) / 2
        axis.text(middle, 0.5, window.title, ha="center", va="bottom", fontsize=9)
        offset += window.end - window.start
    _finish(axis, picture, span)
    axis.set_ylim(-len(picture.lanes) + 0.5, 0.72)
    if named:
        axis.set_title(f"{picture.title}: a closer look", loc="left", fontsize=10, fontweight="bold")
    axis.axvspan(offset, span, color="white", lw=0)


def _draw_bars(axis: Any, picture: Picture, lane: str, y: float, window: Window, shift: float, span: float) -> None:
    axis.axhspan(y - 0.4, y + 0.4, color=FAINT, lw=0, zorder=0)
    for key, intervals in pieces(picture, lane).items():
        shown = list(_clip(intervals, window))
        axis.broken_barh([(s + shift, e - s) for s, e in shown], (y - 0.4, 0.8), color=COLOURS[key][0], lw=0)
    room = span / 165  # width of a character in milliseconds
    for bar in picture.bars:
        clipped = list(_clip([(bar.start, bar.end)], window)) if bar.lane == lane else []
        for start, end in clipped:
            if end - start > 0.003 * span:
                axis.plot([start + shift] * 2, [y - 0.4, y + 0.4], color="white", lw=0.5)
            label = next((w for w in (bar.label, bar.short) if end - start > room * (len(w) + 1)), "")
            x = (start + end) / 2 + shift
            axis.text(x, y, label, ha="center", va="center", fontsize=8, color="white", clip_on=True)


def _clip(intervals: Iterable[Interval], window: Window) -> Iterable[Interval]:
    for start, end in intervals:
        if start < window.end and end > window.start:
            yield max(start, window.start), min(end, window.end)


def _zoom_length(picture: Picture) -> float:
    return sum(window.end - window.start for window in picture.zoom)


def _finish(axis: Any, picture: Picture, span: float) -> None:
    lanes = picture.lanes
    axis.set_ylim(-len(lanes) + 0.5, 0.5)
    axis.set_yticks([-row for row in range(len(lanes))], lanes)
    _time_axis(axis, span)


def _time_axis(axis: Any, span: float) -> None:
    """Lets the panel begin at 0 ms and end at `span`, with a line and marks below only."""
    axis.set_xlim(0, span)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g} ms")
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _legend(figure: Any, pictures: Sequence[Picture], footnote: str) -> None:
    from matplotlib.patches import Patch

    shown = {
        key
        for picture in pictures
        for lane in picture.lanes
        for key, intervals in pieces(picture, lane).items()
        if length(intervals) > 0.001 * picture.end
    }
    words: dict[str, list[str]] = {}  # keys with the same colour share an entry of the legend
    for key, (colour, word) in COLOURS.items():
        if key in shown:
            words.setdefault(colour, []).append(word)
    handles = [Patch(color=colour, label=", ".join(named)) for colour, named in words.items()]
    remembered = [picture for picture in pictures if picture.memory]
    drawn = {"arguments": any(p.arguments for p in remembered), "rest": bool(remembered)}
    drawn["residuals"] = any(residuals for p in remembered for *_, residuals in p.memory)
    handles += [Patch(color=colour, label=word) for key, (colour, word) in MEMORY.items() if drawn[key]]
    legend = figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), _LEGEND),
        frameon=False,
        fontsize=9,
        columnspacing=1.6,
    )
    legend.set_title(footnote, {"size": 8.5})
