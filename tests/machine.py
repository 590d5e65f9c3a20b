"""What a test may expect of the machine it runs on: one is ten times slower than another, or stops now and then."""

from __future__ import annotations

import time

PATIENCE = 1200.0
"""Seconds after which a test gives up on another process. Only a process that hangs takes so long."""

_USUAL = 0.2  # seconds that `_work` takes on the machine for which tests name their limits


def slowness() -> float:
    """How many times longer Python takes here and now than on the machine for which tests name their limits.

    A test multiplies its limit with this number. It is at least 1, so a fast machine changes no limit.
    """
    return max(1.0, _work() / _USUAL)


def _work() -> float:
    """Seconds of a piece of Python that does what passes do: it makes small objects and looks them up."""
    begun = time.perf_counter()
    for _ in range(16):
        made = {f"x.{n}": [n, (n, n + 1)] for n in range(20_000)}
        assert sum(made[f"x.{n}"][0] for n in range(0, 20_000, 2)) > 0
    return time.perf_counter() - begun
