"""Draws measured overlaps over channels, a line for each chunk (as Lagom's figures 3 and 5).

    python benchmarks/collectives/channel_picture.py RESULTS.json docs/images/channel-grid.png

A row of panels for each overlap: its collectives, its computation, and the whole. All collectives have the same
setting. Equal result files give equal bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dhelix.launch.shown import figures
from dhelix.launch.shown.figures import ALPHA, BETA, GREY, INK

OVERLAPS = {"ffn": "an all-reduce beside an FFN", "h plot": "2 all-reduces beside 7 products"}
_PANELS = (("collectives", BETA), ("computation", ALPHA), ("both together", INK))


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draws the overlaps of a result file of `channel_grid.py` that `OVERLAPS` names.

    Raises:
      DhelixError: the name ends neither in .png nor in .svg, matplotlib is missing, or the file cannot be written.
    """
    metadata = figures.chart_metadata(path)
    with figures.drawing({"font.size": 8, "svg.hashsalt": "dhelix"}) as Figure:
        figure = Figure(figsize=(8.0, 4.6), dpi=105, layout="constrained")
        axes: Any = figure.subplots(len(OVERLAPS), len(_PANELS), squeeze=False, sharex=True)
        for row, (name, words) in zip(axes, OVERLAPS.items(), strict=True):
            for axis, (panel, colour) in zip(row, _PANELS, strict=True):
                _panel(axis, found["parts"][name], panel, colour)
            row[0].set_ylabel(f"{words}\nmilliseconds", color=GREY)
        for axis, (panel, _) in zip(axes[0], _PANELS, strict=True):
            axis.set_title(panel, loc="left", fontsize=9)
        for axis in axes[-1]:
            axis.set_xlabel("channels of each collective", color=GREY)
        axes[0][0].legend(frameon=False, title="chunk")
        figures.save(figure, path, "a file", metadata)


def _panel(axis: Any, parts: Sequence[Mapping[str, Any]], panel: str, colour: str) -> None:
    for n, part in enumerate(parts):
        rows = [row for row in part["rows"] if len(set(row["channels"])) == 1]
        times = {
            "collectives": [sum(row["collectives"]) for row in rows],
            "computation": [sum(row["computations"]) for row in rows],
            "both together": [row["whole"] for row in rows],
        }[panel]
        channels = [row["channels"][0] for row in rows]
        label, strength = f"{rows[0]['chunk'] // 1024} KiB", 0.3 + 0.7 * (n + 1) / len(parts)
        axis.plot(channels, [1e3 * t for t in times], "o-", ms=3, lw=1.3, color=colour, alpha=strength, label=label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(channels, [str(number) for number in channels])
    axis.minorticks_off()
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="file of channel_grid.py")
    parser.add_argument("picture", type=Path, help="file to write, .png or .svg")
    options = parser.parse_args(arguments)
    draw(json.loads(options.results.read_text()), options.picture)


if __name__ == "__main__":
    main()
