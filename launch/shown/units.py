"""Writes times and bytes as text: in one unit for numbers that are compared, or in the best unit for a single time.

    unit = size_unit([512 * 2**20, 3 * 2**30])     # GiB, chosen by the largest
    unit.text(512 * 2**20)                         # '0.50 GiB'
    time_text(0.0000412)                           # '41.2 µs'

`passes/framework/units.py` does the same for a single number of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """A unit for display. `size` is its value in milliseconds or bytes; `digits` is the number of decimal places."""

    name: str
    size: float
    digits: int

    def number(self, value: float) -> str:
        return f"{round(value / self.size, self.digits) + 0.0:,.{self.digits}f}"  # + 0.0 turns -0.0 into 0.0

    def text(self, value: float) -> str:
        return f"{self.number(value)} {self.name}"


_MICROSECONDS = Unit("µs", 1e-3, 1)
_SIZES = (Unit("GiB", 2.0**30, 2), Unit("MiB", 2.0**20, 1), Unit("KiB", 2.0**10, 1), Unit("B", 1.0, 0))


def time_unit(milliseconds: Iterable[float | None]) -> Unit:
    """The unit that suits the largest of these times, with digits for a thousandth of it. None is ignored."""
    largest = _largest(milliseconds)
    return Unit("ms", 1.0, 1 if largest >= 100 else 2 if largest >= 10 else 3) if largest >= 1 else _MICROSECONDS


def size_unit(sizes: Iterable[float | None]) -> Unit:
    """The unit that suits the largest of these numbers of bytes. None is ignored."""
    largest = _largest(sizes)
    return next((unit for unit in _SIZES if largest >= unit.size), _SIZES[-1])


def time_text(seconds: float) -> str:
    """Text for a time that is given in seconds, with three significant digits, such as 41.2 µs or 1.23 ms."""
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 0.9995e-3 else f"{1e6 * seconds:.3g} µs"


def _largest(values: Iterable[float | None]) -> float:
    return max((value for value in values if value is not None), default=0.0)
