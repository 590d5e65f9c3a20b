"""Tunes simulated overlaps, whose optimum is known, by dhelix's search and by others.

    python benchmarks/collectives/simulated_tuning.py --cases 300 --out benchmarks/results/tuning_simulated.json

No GPU is needed. Half of the cases has 2 collectives and half has 3; in half of each, contention is strong.
The searches:

    dhelix             `passes/tuning/guided_search.py`
    the paper's        algorithms 1 and 2, corrected
    descent            coordinate descent from NCCL's defaults, until nothing is faster
    descent, as many   the same, with no more measurements than dhelix took
    each alone         each collective's own time is minimised, as AutoCCL does
    NCCL's defaults    nothing is tuned

Measurements are also counted for overlaps of up to 32 collectives, where there is no brute force.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dhelix.benchmarks.collectives.simulated_overlaps import NCCL, SPACE, Simulated
from dhelix.benchmarks.pages.markdown import table
from dhelix.passes.tuning.descent import alone, descend
from dhelix.passes.tuning.greedy import greedy
from dhelix.passes.tuning.guided_search import tune
from dhelix.passes.tuning.measurements import Measurements
from dhelix.profiles.channels.model_fit import MeasuredTimes

DHELIX, EQUAL = "dhelix", "descent, as many"
NOISE = 0.01
MANY = {2: 3, 4: 3, 8: 3, 16: 1, 32: 1}
"""Numbers of collectives for which measurements are counted, each with the number of cases."""


def searched(case: Simulated, noise: float, seed: int) -> dict[str, tuple[float, int]]:
    """The true seconds of the settings that each search finds, and how many measurements it took."""
    n = len(case.volumes)
    start = (NCCL,) * n

    def run(search: Callable[[Measurements], MeasuredTimes], limit: int | None = None) -> tuple[float, int]:
        measurements = Measurements(case.run(noise, seed), noise, limit)
        return case.seconds(search(measurements).settings), measurements.count

    found = {DHELIX: run(lambda m: tune(m, case.overlap, SPACE))}
    found["the paper's"] = run(lambda m: greedy(m, SPACE, n))
    found["descent"] = run(lambda m: descend(m, SPACE, start))
    found[EQUAL] = run(lambda m: descend(m, SPACE, start), found[DHELIX][1])
    found["each alone"] = run(lambda m: alone(m, SPACE, start))
    found["NCCL's defaults"] = case.seconds(start), 0
    return found


def compared(collectives: int, strong: bool, noise: float, cases: int) -> list[dict[str, Any]]:
    """A row for each search: its time over the optimum, and its measurements."""
    ratios: dict[str, list[float]] = {}
    counts: dict[str, list[int]] = {}
    for seed in range(cases):
        case = Simulated.drawn(seed, collectives, strong)
        for name, (seconds, count) in searched(case, noise, seed).items():
            ratios.setdefault(name, []).append(seconds / case.optimum)
            counts.setdefault(name, []).append(count)
    return [
        {
            "collectives": collectives,
            "contention": "strong" if strong else "weak",
            "noise": noise,
            "search": name,
            "cases": cases,
            "median": round(float(np.median(each)), 4),
            "worst": round(max(each), 4),
            "within 2 %": sum(ratio <= 1.02 for ratio in each),
            "within 5 %": sum(ratio <= 1.05 for ratio in each),
            "measurements": float(np.median(counts[name])),
        }
        for name, each in ratios.items()
    ]


def counted(collectives: int, cases: int) -> dict[str, Any]:
    """Measurements that dhelix takes for an overlap of many collectives, and its time over that of the defaults."""
    counts, ratios = [], []
    for seed in range(cases):
        case = Simulated.drawn(seed, collectives, strong=True)
        measurements = Measurements(case.run())
        found = tune(measurements, case.overlap, SPACE)
        counts.append(measurements.count)
        ratios.append(case.seconds((NCCL,) * collectives) / found.seconds)
    return {
        "collectives": collectives,
        "cases": cases,
        "measurements": float(np.median(counts)),
        "most": max(counts),
        "faster than NCCL's defaults": round(float(np.median(ratios)), 3),
    }


def results(cases: int) -> dict[str, Any]:
    """All results as JSON values. `cases` are shared among 2 and 3 collectives, weak and strong contention."""
    every = [(n, strong, noise) for noise in (0.0, NOISE) for n in (2, 3) for strong in (False, True)]
    return {
        "rows": [row for one in every for row in compared(*one, cases // 4)],
        "many": [counted(n, cases) for n, cases in MANY.items()],
    }


def markdown(found: dict[str, Any]) -> str:
    """The tables of a result file."""
    parts = []
    for noise in dict.fromkeys(row["noise"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["noise"] == noise]
        names = dict.fromkeys(row["search"] for row in rows)
        title = f"{noise:.0%} noise on each time" if noise else "no noise"
        parts += [f"**All cases, {title}.**", table(_HEADS, [_cells(name, rows) for name in names])]
        heads = ("collectives", "contention", *names)
        parts += ["**Median of the time over the optimum.**", table(heads, _medians(rows, list(names)))]
    heads = list(found["many"][0])
    parts += ["**Measurements by the number of collectives, strong contention, no noise.**"]
    parts += [table(heads, [[f"{row[head]:g}" for head in heads] for row in found["many"]])]
    return "\n\n".join(parts)


_HEADS = ("search", "within 2 %", "within 5 %", "worst", "measurements (median)")


def _cells(name: str, rows: list[dict[str, Any]]) -> list[str]:
    mine = [row for row in rows if row["search"] == name]
    cases = sum(row["cases"] for row in mine)
    shares = [f"{sum(row[head] for row in mine) / cases:.1%}" for head in ("within 2 %", "within 5 %")]
    measured = [row["measurements"] for row in mine]
    count = f"{min(measured):g} to {max(measured):g}" if max(measured) else "0"
    return [name, *shares, f"{max(row['worst'] for row in mine):.3f}", count]


def _medians(rows: list[dict[str, Any]], names: list[str]) -> list[list[str]]:
    kinds = dict.fromkeys((row["collectives"], row["contention"]) for row in rows)
    medians = {(row["collectives"], row["contention"], row["search"]): row["median"] for row in rows}
    return [[str(n), kind, *(f"{medians[n, kind, name]:.4f}" for name in names)] for n, kind in kinds]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    options = parser.parse_args(arguments)
    options.out.write_text(json.dumps(results(options.cases), indent=1) + "\n")


if __name__ == "__main__":
    main()
