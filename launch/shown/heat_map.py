"""Heat map of measured pairs: how well compute operators and collectives hide each other.

Each launch order has a panel. Rows are operators, and columns are collectives. A cell shows the overlap effectiveness
of a pair (OEF, DHelix section 3.2, arXiv 2411.15871). The OEF is 1 if the shorter side is completely hidden, and 0 if
overlap gains nothing. It is below 0 if both sides together take longer than one after the other. A frame marks the
better launch order, if the OEFs of both orders are steady and differ by 0.1 or more. `?` marks an OEF whose repeats
scatter (`PairTiming.steady`). `~1` marks an OEF that is above 1 because of noise (`Section.noisy`). `failed` marks a
pair whose measurement failed. The cell of a pair that was not measured is empty.

    heat_map.save_png(heat_map.heat_map(profile, "default"), "pairs.png")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhelix.errors import DhelixError
from dhelix.launch.profile.tables import readable, setup
from dhelix.launch.shown import figures
from dhelix.launch.shown.figures import FAINT, INK
from dhelix.launch.shown.units import time_text
from dhelix.profiles.keys import OPERATOR_KINDS, CollectiveKey, Key, OperatorKey, PairKey
from dhelix.profiles.profile import Profile, Section

ORDERS = ("compute launched first", "collective launched first")

_LOWEST, _HIGHEST = -0.5, 1.0  # ends of the colour scale; numbers in cells may be lower or higher
_ORDER_MATTERS = 0.1
_CELL_WIDTH, _CELL_HEIGHT, _CHARACTER = 0.6, 0.27, 0.066  # inches
_DPI = 120
_UPRIGHT_COLUMNS = 5  # with more columns, the names of columns are vertical
_FAILED = "failed"


@dataclass(frozen=True)
class HeatMap:
    """The data of one picture.

    Attributes:
      panels: the OEFs, by launch order (as in ORDERS), row and column; None for a pair without a time.
      failed: (panel, row, column) of pairs whose measurement failed.
      unsteady: (panel, row, column) of pairs whose repeats scatter.
      noise: (panel, row, column) of pairs whose OEF is above 1 because of noise. `panels` holds 1 for these pairs.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    panels: tuple[tuple[tuple[float | None, ...], ...], ...]
    failed: frozenset[tuple[int, int, int]] = frozenset()
    unsteady: frozenset[tuple[int, int, int]] = frozenset()
    noise: frozenset[tuple[int, int, int]] = frozenset()


def heat_map(profile: Profile, setting: str, wanted: Callable[[Key], bool] = lambda key: True) -> HeatMap:
    """The heat map of all measured and failed pairs of an operator and a collective.

    Args:
      setting: name of the launch setting under which the pairs were measured.
      wanted: says which keys to show; default: all.

    Raises:
      DhelixError: there is no pair to show.
    """
    section = profile.section(setting)
    computes, collectives = _sides(section, wanted)
    if not computes or not collectives:
        raise DhelixError(
            f"no pair of an operator and a collective is measured under {setting!r}, so there is nothing to draw; run "
            "with --pairs, or give other --settings"
        )
    panels, failed, unsteady, noise = [], set(), set(), set()
    for panel in range(len(ORDERS)):
        cells = []
        for row, compute in enumerate(computes):
            keys = [PairKey(compute, c) if panel == 0 else PairKey(c, compute) for c in collectives]
            timings = [section.pairs.get(key) for key in keys]
            noisy = [timing is not None and section.noisy(key) for key, timing in zip(keys, timings, strict=True)]
            cells.append(tuple(t and (1.0 if above else t.oef) for t, above in zip(timings, noisy, strict=True)))
            noise |= {(panel, row, n) for n, above in enumerate(noisy) if above}
            failed |= {(panel, row, n) for n, key in enumerate(keys) if str(key) in section.failures}
            unsteady |= {(panel, row, n) for n, timing in enumerate(timings) if timing and not timing.steady}
        panels.append(tuple(cells))
    gpus = max((p.gpus for p in profile.measured_on), default=0)
    where = setup(profile.hardware, profile.link, gpus)
    return HeatMap(
        f"How well compute and communication overlap: {where}, launch setting {setting}",
        tuple(", ".join(_label(key, section, computes)) for key in computes),
        tuple("\n".join(_label(key, section, collectives)) for key in collectives),
        tuple(panels),
        frozenset(failed),
        frozenset(unsteady),
        frozenset(noise),
    )


def save_png(drawn: HeatMap, path: str | Path) -> None:
    """Draws a heat map. The size of the picture depends on the numbers of rows and columns.

    Raises:
      DhelixError: matplotlib is missing, or the file cannot be written.
    """
    rows, columns = len(drawn.rows), len(drawn.columns)
    name_lines = [line for name in drawn.columns for line in name.split("\n")]
    name_length = (max(map(len, name_lines)) + 1) * _CHARACTER
    turned = columns > _UPRIGHT_COLUMNS
    side = max(columns * (_CELL_WIDTH if turned else name_length), 2.2)  # room for a panel's heading
    width = max(map(len, drawn.rows)) * _CHARACTER + 2 * side + 1.8
    least = max(len(drawn.title) * 0.105, len(_FOOTNOTE) * _CHARACTER)
    height = rows * _CELL_HEIGHT + (name_length if turned else 0.6) + 1.3
    with figures.drawing({"font.size": 8.5}) as Figure:
        from matplotlib.colors import TwoSlopeNorm

        figure = Figure(figsize=(max(width, least), height), dpi=_DPI, layout="constrained")
        axes = figure.subplots(1, len(ORDERS), sharey=True)
        norm = TwoSlopeNorm(0.0, _LOWEST, _HIGHEST)
        images = [_draw(axis, drawn, panel, norm) for panel, axis in enumerate(axes)]
        axes[0].set_yticks(range(rows), drawn.rows)
        for axis in axes:
            axis.set_xticks(range(columns), drawn.columns, rotation=90 if turned else 0)
        bar = figure.colorbar(images[0], ax=list(axes), shrink=min(1.0, 2.6 / (rows * _CELL_HEIGHT)), pad=0.01)
        bar.set_ticks([-0.5, 0, 0.5, 1], labels=["≤ −0.5  loss", "0  no gain", "0.5", "1  hidden whole"])
        bar.outline.set_visible(False)  # type: ignore[operator]
        figure.suptitle(drawn.title, fontsize=12, fontweight="bold")
        figure.supxlabel(_FOOTNOTE, fontsize=8.5)
        figures.save(figure, path)


_FOOTNOTE = (
    "OEF = (T compute + T collective − P) / the smaller T; T alone, P both together, measured."
    " Framed: the better launch order, by 0.1 or more. ?: repeats scatter. ~1: above 1, unconfirmed, so noise."
)


def _sides(section: Section, wanted: Callable[[Key], bool]) -> tuple[list[OperatorKey], list[CollectiveKey]]:
    """The operators and collectives of all measured and failed pairs.

    Operators are sorted by kind, then by time, longest first. Collectives are sorted by nodes, GPUs and kind.
    """
    tried = set(section.pairs)
    keys = [*section.operators, *section.collectives]
    by_text = {str(key): key for key in keys}
    for text in section.failures:
        first, plus, second = text.partition(" + ")
        if plus and first in by_text and second in by_text:
            tried.add(PairKey(by_text[first], by_text[second]))
    computes, collectives = set(), set()
    for pair in tried:
        sides = {type(key): key for key in (pair.first, pair.second)}
        if len(sides) == 2 and all(map(wanted, sides.values())):
            computes.add(sides[OperatorKey])
            collectives.add(sides[CollectiveKey])

    def seconds(key: Key) -> float:
        timing = section.solo(key)
        return timing.seconds if timing else 0.0

    return (
        sorted(computes, key=lambda k: (OPERATOR_KINDS.index(k.kind), -seconds(k), k)),
        sorted(collectives, key=lambda k: (k.nodes, k.gpus_per_node, k.kind, k)),
    )


def _label(key: Key, section: Section, among: Iterable[Key]) -> list[str]:
    """The parts of a label: the key in words, and the time of the key alone if it is known."""
    timing = section.solo(key)
    words = readable(key, among)
    parts = words.split(", ") if isinstance(key, CollectiveKey) else [words]
    return [*parts, *([time_text(timing.seconds)] if timing else [])]


def _draw(axis: Any, drawn: HeatMap, panel: int, norm: Any) -> Any:
    from matplotlib.patches import Rectangle

    cells = drawn.panels[panel]
    colours = [[math.nan if value is None else value for value in row] for row in cells]
    axis.set_facecolor(FAINT)
    image = axis.imshow(colours, cmap="RdBu", norm=norm, aspect="auto", interpolation="nearest")
    for row, values in enumerate(cells):
        for column, value in enumerate(values):
            text = _FAILED if (panel, row, column) in drawn.failed else ""
            text = text if value is None else f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")
            steady = drawn.unsteady.isdisjoint(((panel, row, column), (1 - panel, row, column)))
            text = "~1" if (panel, row, column) in drawn.noise else text
            text = f"{text} ?" if (panel, row, column) in drawn.unsteady else text
            other = drawn.panels[1 - panel][row][column]
            better = steady and value is not None and other is not None and value - other >= _ORDER_MATTERS
            dark = value is not None and abs(float(norm(value)) - 0.5) > 0.32
            style = {"color": "white" if dark else INK, "weight": "bold" if better else "normal"}
            axis.text(column, row, text, ha="center", va="center", fontsize=8, **style)
            if better:
                box = Rectangle((column - 0.46, row - 0.44), 0.92, 0.88, fill=False, edgecolor=INK, lw=1.3)
                axis.add_patch(box)
    axis.set_title(ORDERS[panel], fontsize=10, fontweight="bold", loc="left")
    axis.tick_params(length=0)
    for n in range(1, len(drawn.columns)):
        axis.axvline(n - 0.5, color="white", lw=1.2)
    for n in range(1, len(drawn.rows)):
        axis.axhline(n - 0.5, color="white", lw=1.2)
    for spine in axis.spines.values():
        spine.set_visible(False)
    return image
