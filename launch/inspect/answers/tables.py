"""The answers as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from dhelix.launch.inspect.answers.critical_path import PAUSE, OnPath
from dhelix.launch.inspect.answers.memory import MemoryOverTime
from dhelix.launch.inspect.answers.operations import Operation, Utilization, categories
from dhelix.launch.shown.units import size_unit, time_unit


def _table(title: str, left: Sequence[str], right: Sequence[str], last: str = "") -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    if last:
        table.add_column(last, overflow="fold")
    return table


def time_by_category(
    found: Iterable[Operation], rest: Mapping[str, float], step_ms: float, used: Utilization | None, name: str = ""
) -> Table:
    """What the step's time consists of.

    Args:
      rest: milliseconds of the parts of the step in which nothing computes, or in which compute is slower.
      used: how well the step uses the GPU's arithmetic; None if the GPU is unknown.
    """
    table = _table(f"Where the time goes{name}", [""], ["time", "of the step", "TFLOP/s", "of the roofline"])
    unit = time_unit([step_ms])
    for category, one in categories(found).items():
        speed = f"{one.tflops:,.0f}" if one.flops else ""
        table.add_row(category, unit.text(one.ms), _percent(one.ms / step_ms), speed, _percent(one.roofline))
    for words, ms in rest.items():
        if unit.text(ms) == unit.text(0.0):
            continue
        table.add_row(words, unit.text(ms), _percent(ms / step_ms), "", "")
    if used is not None and used.flops:
        again = f"; {used.hfu:.1%} with what is computed again (HFU)" if used.recomputed else ""
        table.caption = f"MFU {used.mfu:.1%} of {used.peak / 1e12:,.0f} TFLOP/s{again}."
    return table


def operations(found: Sequence[Operation], step_ms: float, top: int, name: str = "") -> Table:
    """Operations with the line that made them, longest first."""
    columns = ["time", "runs", "TFLOP/s", "GB/s", "of the roofline"]
    table = _table(f"Operations{name}, longest first", ["operation", "line"], columns, "for example")
    unit = time_unit([step_ms])
    for one in found[:top]:
        again = " (computed again)" if one.recomputed else ""
        table.add_row(
            one.what + again,
            one.source or "?",
            unit.text(one.ms),
            f"{one.executions:,.0f}",
            f"{one.tflops:,.0f}" if one.flops else "",
            f"{one.bytes / one.ms / 1e6:,.0f}" if one.bytes else "",
            _percent(one.roofline),
            one.example,
        )
    if left := found[top:]:
        table.caption = f"and {len(left)} more, {unit.text(sum(one.ms for one in left))} (--top)"
    return table


def on_critical_path(found: Sequence[OnPath], words: Mapping[str, str], top: int, name: str = "") -> Table:
    """What decides the length of the step.

    Args:
      words: what the instructions do, by name.
    """
    total = sum(one.ms for one in found)
    table = _table(f"Critical path{name}, longest first", ["instruction", "what"], ["time", "of the step", "runs"])
    unit = time_unit([total])
    for one in found[:top]:
        runs = f"{one.executions:,}" if one.instruction != PAUSE else ""
        what = words.get(one.instruction, "pauses between kernels" if one.instruction == PAUSE else "")
        table.add_row(one.instruction, what, unit.text(one.ms), _percent(one.ms / total if total else 0.0), runs)
    if left := found[top:]:
        table.caption = f"and {len(left)} more, {unit.text(sum(one.ms for one in left))} (--top)"
    return table


def memory_at_peak(found: MemoryOverTime, top: int, name: str = "") -> Table:
    """What lives when the step needs most memory."""
    peak = size_unit([found.peak.bytes])
    title = f"Memory{name} at its peak of {peak.text(found.peak.bytes)}, while {found.peak.instruction} runs"
    table = _table(title, ["written by", "what", "shape", "line"], ["size"], "residual")
    table.add_row("arguments", "", "", "", peak.text(found.arguments), "")
    if found.inside:
        table.add_row(found.peak.instruction, "what it needs inside", "", "", peak.text(found.inside), "")
    for one in found.living[:top]:
        size = size_unit([one.bytes]).text(one.bytes)
        table.add_row(one.instruction, one.what, one.shape, one.source, size, "yes" if one.residual else "")
    words = [f"Residuals are {size_unit([found.residuals]).text(found.residuals)} of it."] if found.residuals else []
    if left := found.living[top:]:
        more = sum(one.bytes for one in left)
        words.append(f"{len(left)} more buffers have {size_unit([more]).text(more)} (--top).")
    table.caption = " ".join(words) or None
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
