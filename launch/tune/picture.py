"""Maps of computation and communication over channels, one panel for each overlap of a step (Lagom figure 3).

All collectives of the step have the same setting. With several chunk sizes, each is a line of its own, darker for
larger chunks. Equal results give equal bytes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dhelix.launch.shown import figures
from dhelix.launch.shown.figures import ALPHA, BETA, GREY, INK

_MOST = 4  # panels: the longest overlaps of a step
_TITLE = 44  # characters of a line above a panel
_LINES = (("communication", BETA, "-"), ("computation", ALPHA, "-"), ("whole", INK, ":"))
_WORDS = {"communication": "collectives", "computation": "computation", "whole": "both together"}


def save(result: Mapping[str, Any], path: str | Path, title: str) -> None:
    """Draws the maps of a result (`tuned.as_json`) to a file.

    Raises:
      DhelixError: the name ends neither in .png nor in .svg, matplotlib is missing, or the file cannot be written.
    """
    metadata = figures.chart_metadata(path)
    bodies = [body for body in result["bodies"] if body["map"]][:_MOST]
    with figures.drawing({"font.size": 9, "svg.hashsalt": "dhelix"}) as Figure:
        figure = Figure(figsize=(max(4.2 * len(bodies), 7.0), 4.0), dpi=160, layout="constrained")
        figure.suptitle(title, fontweight="bold", fontsize=10, wrap=True)
        axes: Any = figure.subplots(1, max(len(bodies), 1), squeeze=False)
        for axis, body in zip(axes[0], bodies, strict=False):
            _draw(axis, body)
        if bodies:
            figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        else:
            axes[0][0].set_axis_off()
            axes[0][0].text(0.5, 0.5, "nothing was measured", ha="center", color=GREY)
        figures.save(figure, path, "a file", metadata)


def _draw(axis: Any, body: Mapping[str, Any]) -> None:
    rows: Sequence[Mapping[str, Any]] = body["map"]
    chunks = sorted({row["chunk"] for row in rows})
    for n, chunk in enumerate(chunks):
        line = sorted((row for row in rows if row["chunk"] == chunk), key=lambda row: row["channels"])
        channels = [row["channels"] for row in line]
        for name, colour, style in _LINES:
            shown = {"label": _WORDS[name]} if chunk == chunks[-1] else {}
            strength = (n + 1) / len(chunks)
            axis.plot(
                channels,
                [1e3 * row[name] for row in line],
                f"o{style}",
                ms=3,
                lw=1.4,
                color=colour,
                alpha=strength,
                **shown,
            )
    default = body["default"]
    axis.axhline(1e3 * default["whole"], color=GREY, lw=0.9, ls=(0, (4, 3)))
    axis.annotate("NCCL's defaults", (1.0, 1e3 * default["whole"]), xycoords=("axes fraction", "data"), ha="right",
                  va="bottom", color=GREY, fontsize=8)  # fmt: skip
    axis.set_xscale("log", base=2)
    ticks = sorted({row["channels"] for row in rows})
    axis.set_xticks(ticks, [str(n) for n in ticks])
    axis.minorticks_off()
    axis.set_ylim(bottom=0.0)
    title = textwrap.fill(f"{body['name']}, {body['runs']} x a step", _TITLE)
    axis.set_title(title, loc="left", fontsize=9)
    axis.set_xlabel("channels of each collective", color=GREY)
    axis.set_ylabel("milliseconds", color=GREY)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
