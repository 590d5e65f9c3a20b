"""Converts times and numbers of bytes to text, each in a suitable unit, and text to numbers of bytes."""

from __future__ import annotations

import math
import re

from dhelix.errors import DhelixError

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_BYTES = re.compile(r"(\d+(?:\.\d*)?) ?(GiB|MiB|KiB)")


def milliseconds(seconds: float) -> str:
    """A time as text in ms, with three decimals below 1 ms, one decimal below 1 s, and no decimals from 1 s on."""
    ms = 1e3 * seconds
    return f"{ms:.{0 if ms >= 1000 else 1 if ms >= 1 else 3}f} ms"


def bytes_text(count: int) -> str:
    """A number of bytes as text with three significant digits, such as 64 MiB or 1.5 GiB."""
    for unit, size in _UNITS.items():
        if count >= size:
            return f"{count / size:{'.3g' if count < 999.5 * size else '.0f'}} {unit}"
    return f"{count:,} B"


def gibibytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def bytes_option(count: int) -> str:
    """A number of bytes as text for `parse_bytes`, such as 14.168GiB.

    The number is rounded up to three decimals, so that a memory limit of this size is not below `count`.
    """
    unit, size = next(((unit, size) for unit, size in _UNITS.items() if count >= size), ("KiB", 2**10))
    return f"{math.ceil(1000 * count / size) / 1000:g}{unit}"


def parse_bytes(name: str, value: object) -> int:
    """Reads a number of bytes from a number or from text with a unit, such as "60GiB".

    Raises DhelixError for other values. The message calls the value `name`.
    """
    found = _BYTES.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is not None:
        return int(float(found[1]) * _UNITS[found[2]])
    if isinstance(value, int) and value >= 0:
        return value
    raise DhelixError(f"{name}={value!r}: give bytes as a number, or with a unit (GiB, MiB, KiB), such as 60GiB")
