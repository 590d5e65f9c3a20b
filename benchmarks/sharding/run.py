"""Computes AMSP's published numbers with the planner, and writes them beside the paper's.

    python benchmarks/sharding/run.py --out benchmarks/results/sharding_amsp.json

No GPU is needed. The file holds the fitted cluster, the rows of `reproduction.py`, and the ranges of `table_iv.py`.
`python -m dhelix.benchmarks.pages.write` turns it into a page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dhelix.benchmarks.pages.markdown import table
from dhelix.benchmarks.sharding import reproduction, table_iv
from dhelix.benchmarks.sharding.fitted import Fitted, fit
from dhelix.benchmarks.sharding.reproduction import Row

_HEADS = ("model", "overlapped, or system", "GPUs", "M", "unit", "paper", "ours", "error")


def results() -> dict[str, Any]:
    """All results as JSON values."""
    cluster = fit()
    return {
        "fitted": _fitted(cluster),
        "rows": [row.to_json() for row in reproduction.rows(cluster)],
        "table_iv": table_iv.table(cluster),
        "apart": table_iv.apart(cluster),
    }


def _fitted(cluster: Fitted) -> dict[str, float]:
    """The five numbers, as the page shows them."""
    links = cluster.links
    return {
        "share of the peak, %": round(100 * cluster.share, 2),
        "bandwidth in a node, GB/s of a GPU": round(links.within / 1e9, 1),
        "bandwidth between nodes, GB/s of a node": round(links.between / 1e9, 1),
        "latency between nodes, us": round(1e6 * links.between_latency, 1),
        "bucket, MB": round(cluster.bucket / 1e6, 1),
    }


def markdown(found: dict[str, Any]) -> str:
    """The tables of a result file."""
    rows = [Row(**row) for row in found["rows"]]
    parts = ["**Fitted.**", table(("", "value"), [(name, f"{value:g}") for name, value in found["fitted"].items()])]
    for name in dict.fromkeys(row.table for row in rows):
        parts += [
            f"**{name[0].upper()}{name[1:]}.**",
            table(_HEADS, [_cells(row) for row in rows if row.table == name]),
        ]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.why:
            reasons.setdefault(row.why, []).append(f"{row.model}, {row.what}")
    parts += ["**What misses by more than 10 %, and why.**"]
    parts += ["\n".join(f"- {'; '.join(dict.fromkeys(names))}: {why}." for why, names in reasons.items())]
    parts += ["**Table IV: sizes A of activations and temporary buffers, in GB, for which its plan is the cheapest.**"]
    parts += [_ranges(found["table_iv"])]
    parts += [f"**Planned for each number of GPUs apart, A {table_iv.APART / 1e9:.0f} GB, fitted cluster.**"]
    parts += [_apart(found["apart"])]
    return "\n\n".join(parts)


def _cells(row: Row) -> tuple[str, ...]:
    near = f"{row.error:+.1%}" if row.near else f"**{row.error:+.1%}**"
    digits = 3 if row.unit == "s" else 1
    numbers = (f"{value:.{digits}f}" for value in (row.paper, row.ours))
    return row.model, row.what, str(row.gpus), str(row.microbatches), row.unit, *numbers, near


def _ranges(rows: list[dict[str, Any]]) -> str:
    heads = ("model", "from", "to", "below it", "above it", "links")
    total = sum(len(row["variants"]) for row in rows if row["model"] == rows[0]["model"])
    cells = []
    for row in rows:
        names = row["variants"]
        links = f"all {total} variants" if len(names) == total else "; ".join(names)
        ends = ["never" if row[end] is None else f"{row[end]:.1f}" for end in ("from", "to")]
        cells.append((row["model"], *ends, row["below it"], row["above it"], links))
    return table(heads, cells)


def _apart(rows: list[dict[str, Any]]) -> str:
    sizes = sorted({row["gpus"] for row in rows})
    names = dict.fromkeys(row["model"] for row in rows)
    plans = {(row["model"], row["gpus"]): row["plan"] for row in rows}
    return table(
        ("model", *map(str, sizes)), [(name, *(plans.get((name, size), "") for size in sizes)) for name in names]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    options = parser.parse_args(arguments)
    options.out.write_text(json.dumps(results(), indent=1) + "\n")


if __name__ == "__main__":
    main()
