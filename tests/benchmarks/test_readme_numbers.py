"""Numbers in the README's table of measured steps are those of one file of benchmarks/results each."""

import contextlib
import re
from pathlib import Path

import pytest

from dhelix.benchmarks.strands import run as strands
from dhelix.benchmarks.strands.results import Group, groups, read
from dhelix.benchmarks.strands.variants import BOUND, OURS
from dhelix.errors import DhelixError

ROOT = Path(strands.__file__).parents[2]
ROW = re.compile(
    r"\| (NVLink|peer-to-peer disabled), (\d+) \| (\d+) ms \| (\d+) ms \| ([\d.]+) \| (?:(\d+) %)? ?"
    r"\| (\d+) % \| (-[\d.]+) % \|"
)
ROWS = ROW.findall((ROOT / "README.md").read_text())


def test_the_table_is_found() -> None:
    assert len(ROWS) == 4


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}, {row[1]}")
def test_a_row_is_what_one_file_holds(row: tuple[str, ...]) -> None:
    runs = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("strands_h200x4*.json")):
        with contextlib.suppress(DhelixError):  # of an older script
            runs.append(read(path))
    link, microbatches, *numbers = row
    shown = [said for run in runs for group in groups([run]) for said in figures(group, link, microbatches)]
    wanted = [number for number in numbers if number]
    assert any(all(number in said for number in wanted) for said in shown), shown


def figures(group: Group, link: str, microbatches: str) -> list[list[str]]:
    """Of each of our programs of that step: times, speed-up over the fastest plain one, net hidden, MFU, memory."""
    load = group.run.workload
    right = (load["layers"], load["seq"], str(load["microbatches"])) == (8, 8192, microbatches)
    if not right or (group.link == "nvlink") != (link == "NVLink"):
        return []
    plain = [r for r in group.results if r.variant.startswith("plain") and r.kind != BOUND]
    found = []
    for ours in [r for r in group.results if r.kind == OURS]:
        best = min(plain, key=lambda r: r.median_ms, default=None)
        if best is None:
            continue
        bound = group.bound
        cost = None if bound is None else best.median_ms - bound.median_ms
        hidden = "" if not cost else f"{100 * (best.median_ms - ours.median_ms) / cost:.0f}"
        memory = f"{100 * (ours.peak_gib / best.peak_gib - 1):.1f}"
        ratio = f"{best.median_ms / ours.median_ms:.3f}"
        mfu = f"{100 * (group.mfu(ours) or 0):.0f}"
        found.append([f"{best.median_ms:.0f}", f"{ours.median_ms:.0f}", ratio, hidden, mfu, memory])
    return found
