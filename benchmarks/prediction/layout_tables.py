"""Tables of `layouts.py`: predicted and measured steps of two GPUs, and whether both put them into the same order.

tables([Path("layouts_predicted_h200x2.json")])      # columns of measured times stay empty
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dhelix.benchmarks.pages.markdown import table

HEADS = (
    "layout", "system", "predicted ms", "measured ms (fastest-slowest)", "error", "rank predicted", "rank measured",
    "predicted GiB", "compiled GiB", "guessed", "of overlap",
)  # fmt: skip
LINKS = {"nvlink": "NVLink", "no-p2p": "no peer-to-peer"}


def tables(paths: Sequence[Path]) -> str:
    """A table for each link and model of a file of `predict`, and of `measure` if there is one."""
    found = [json.loads(path.read_text()) for path in paths]
    (predicted,) = [one for one in found if "clusters" in one]
    rows = {_key(row): row for row in predicted["rows"] if "predicted_ms" in row}
    measured = {_key(row): row for one in found if one is not predicted for row in one["rows"]}
    parts = []
    for link, model in dict.fromkeys((row["link"], row["model"]) for row in rows.values()):
        shapes = predicted["models"][model]
        on = next((one["on"][link] for one in found if link in one["on"]), None)
        where = f" ({on['gpus']} x {on['gpu']}, driver {on['driver']}, jax {on['jax']}, {on['date']})" if on else ""
        words = f"{model} shapes, {shapes['layers']} layers, S {shapes['seq']}, {shapes['batch']} sequences a step"
        of_both = [row for row in rows.values() if (row["link"], row["model"]) == (link, model)]
        parts.append(f"**{LINKS[link]}, {predicted['on']['settings'][link]}: {words}**{where}")
        parts += _of_link(of_both, {_key(row): measured.get(_key(row), {}) for row in of_both})
    return "\n\n".join(parts)


def _key(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return row["link"], row["model"], row["layout"], row["system"]


def _of_link(rows: Sequence[Mapping[str, Any]], measured: Mapping[Any, Mapping[str, Any]]) -> list[str]:
    """The table of one link and model, the shortest predicted step first, and what follows from it."""
    ordered = sorted(rows, key=lambda row: row["predicted_ms"])
    timed = [row for row in ordered if "median_ms" in measured[_key(row)]]
    by_time = sorted(timed, key=lambda row: measured[_key(row)]["median_ms"])
    parts = [table(HEADS, [_cells(row, measured[_key(row)], timed or ordered, by_time) for row in ordered])]
    parts += [_verdict(timed, by_time, measured)] if len(timed) > 1 else []
    words = {"failed": "Failed", "skipped": "Skipped"}
    for kind, word in words.items():
        said = [f"{_name(row)} ({why})" for row in ordered if (why := measured[_key(row)].get(kind))]
        parts += [f"{word}: {'; '.join(said)}."] if said else []
    return parts


def _cells(
    row: Mapping[str, Any], found: Mapping[str, Any], ranked: Sequence[Any], by_time: Sequence[Any]
) -> tuple[str, ...]:
    cells = ["", ""]
    if row in by_time:
        cells = [
            f"{found['median_ms']:.1f} ({found['min_ms']:.1f}-{found['max_ms']:.1f})",
            f"{row['predicted_ms'] / found['median_ms'] - 1:+.1%}",
        ]
    ranks = [str(order.index(row) + 1) if row in order else "" for order in (ranked, by_time)]
    compiled = f"{found['memory_gib']:.1f}" if "memory_gib" in found else ""
    guesses = f"{row['guessed']:.0%}", f"{row['guessed_overlap']:.0%}"
    said = row["layout"], row["system"], f"{row['predicted_ms']:.1f}"
    return *said, *cells, *ranks, f"{row['memory_gib']:.1f}", compiled, *guesses


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['layout']}, {row['system']}"


def _verdict(timed: Sequence[Any], by_time: Sequence[Any], measured: Mapping[Any, Mapping[str, Any]]) -> str:
    """Errors, the predicted fastest beside the measured fastest, and the rank correlation."""
    times = {_key(row): measured[_key(row)]["median_ms"] for row in timed}
    off = [abs(row["predicted_ms"] / times[_key(row)] - 1.0) for row in timed]
    first, best = timed[0], by_time[0]
    longer = times[_key(first)] / times[_key(best)] - 1.0
    same = "is the measured fastest" if first is best else f"takes {longer:.1%} longer than {_name(best)}, the fastest"
    mean, close = sum(off) / len(off), sum(error <= 0.05 for error in off)
    return (
        f"The mean error is {mean:.1%}, and {close} of {len(off)} are within 5 %. The predicted fastest, "
        f"{_name(first)}, {same}. Spearman's rank correlation is {correlation(timed, by_time):.2f}."
    )


def correlation(one: Sequence[Any], other: Sequence[Any]) -> float:
    """Spearman's rank correlation of two orders of the same rows, without ties."""
    count = len(one)
    squares = sum((number - other.index(row)) ** 2 for number, row in enumerate(one))
    return 1.0 - 6.0 * squares / (count * (count**2 - 1))
