"""Times and bytes as text: one unit for all numbers that are compared, or the best unit for a single time.

    unit = size_unit([512 * 2**20, 3 * 2**30])     # GiB, chosen by the largest
    unit.text(512 * 2**20)                         # '0.50 GiB'
    time_text(0.0000412)                           # '41.2 µs'

For a single number of bytes see `passes/framework/units.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """A unit for display. `size`: how many base units (milliseconds, bytes) it holds; `digits`: decimal places."""

    name: str
    size: float
    digits: int

    def number(self, value: float) -> str:
        return f"{round(value / self.size, self.digits) + 0.0:,.{self.digits}f}"  # never -0.0

    def text(self, value: float) -> str:
        return f"{self.number(value)} {self.name}"


_TIMES = (Unit("ms", 1.0, 1), Unit("µs", 1e-3, 1))
_SIZES = (Unit("GiB", 2.0**30, 2), Unit("MiB", 2.0**20, 1), Unit("KiB", 2.0**10, 1), Unit("B", 1.0, 0))


def time_unit(milliseconds: Iterable[float | None]) -> Unit:
    """The unit that suits the largest of these times; ignores None."""
    return _unit(_TIMES, milliseconds)


def size_unit(sizes: Iterable[float | None]) -> Unit:
    """The unit that suits the largest of these byte counts; ignores None."""
    return _unit(_SIZES, sizes)


def time_text(seconds: float) -> str:
    """A time in seconds, with three significant digits: 41.2 µs, 1.23 ms."""
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 0.9995e-3 else f"{1e6 * seconds:.3g} µs"


def _unit(units: tuple[Unit, ...], values: Iterable[float | None]) -> Unit:
    largest = max((value for value in values if value is not None), default=0.0)
    return next((unit for unit in units if largest >= unit.size), units[-1])
