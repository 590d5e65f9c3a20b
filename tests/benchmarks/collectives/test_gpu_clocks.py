"""Samples of clock and power, from a command with the output of `nvidia-smi`."""

import sys
import time

from dhelix.benchmarks.collectives.gpu_clocks import Clocks, State

WRITES = """
import sys, time
for line in ("[N/A], [N/A]", "1980, 300.5", "1700, 690.0", "1710, 695.0"):
    print(line, flush=True)
time.sleep(60)
"""


def test_medians_of_what_was_sampled_meanwhile() -> None:
    begun = time.perf_counter()
    with Clocks((sys.executable, "-c", WRITES)) as clocks:
        while len(clocks._samples) < 3 and time.perf_counter() < begun + 30:
            time.sleep(0.01)
        now = time.perf_counter()
        assert clocks.between(begun, now) == State(1710.0, 690.0)
        assert clocks.between(begun - 2, begun - 1) is None


def test_nothing_is_recorded_without_the_tool() -> None:
    with Clocks(("no such tool",)) as clocks:
        assert clocks.between(0.0, time.perf_counter()) is None
