"""What launch settings are worth, from the result files of whole steps: the data that `dhelix flags` shows.

    [{"link": "no-p2p", "setting": "small-buffers", "program": "plain", "runs": 2, "least": 1.13, ...}]

For each run in which a link's default setting and another one were measured, the ratio of the best step times counts:
plain steps against plain ones, and interleaved ones against interleaved ones.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from dhelix.benchmarks.strands.variants import SETTINGS


def text(folder: Path) -> str:
    """The data file, as it follows from the result files in a folder."""
    found: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for path in sorted(folder.glob("strands_*.json")):
        run = json.loads(path.read_text())
        best: dict[tuple[str, str, str], float] = {}
        for result in run["results"]:
            setting, program, milliseconds = SETTINGS.get(result["setting"]), _program(result), _milliseconds(result)
            if setting is not None and program and milliseconds:
                key = setting.link, setting.profiled, program
                best[key] = min(milliseconds, best.get(key, milliseconds))
        for (link, setting, program), milliseconds in best.items():
            base = best.get((link, "default", program))
            if base is not None and setting != "default":
                found.setdefault((link, setting, program), []).append((base / milliseconds, run["on"].get("date", "")))
    rows = [_row(*key, found[key]) for key in sorted(found)]
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def _program(result: dict[str, Any]) -> str:
    """The kind of a program; "" for bounds, which do not communicate."""
    name = result["variant"]
    if "without" in name:
        return ""
    return "plain" if name.startswith("plain") else "interleaved" if name.startswith("strands") else ""


def _milliseconds(result: dict[str, Any]) -> float:
    """The median time of a step; 0 if the program failed. Early files have medians alone."""
    steps = result.get("steps_ms") or [result.get("median_ms") or 0.0]
    return statistics.median(steps)


def _row(link: str, setting: str, program: str, found: list[tuple[float, str]]) -> dict[str, Any]:
    ratios = [ratio for ratio, _ in found]
    return {
        "link": link,
        "setting": setting,
        "program": program,
        "runs": len(ratios),
        "least": round(min(ratios), 3),
        "median": round(statistics.median(ratios), 3),
        "most": round(max(ratios), 3),
        "newest": max(date for _, date in found),
    }
