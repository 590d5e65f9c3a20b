"""Why a GPU does nothing."""

import pytest

from dhelix.runtime.profiling.traces.idle import Cause, pauses
from dhelix.runtime.profiling.traces.trace import Kernel


def kernel(start: float, end: float, launch: str = "", event: str = "gemm") -> Kernel:
    return Kernel(start, end, "Stream #1", f"dot.{start:g}", "jit_step", event, launch, False)


def test_each_pause_has_one_cause() -> None:
    kernels = [
        kernel(0, 1),
        kernel(1.01, 2),  # short
        kernel(2.5, 3, launch="7"),  # the host's call ended at 2.4
        kernel(3.5, 4, launch="8"),  # launched long before
        kernel(4.2, 5, event="MemcpyH2D"),
        kernel(5.3, 6),  # after the copy
        kernel(7, 8),  # a new step
        kernel(7.5, 7.6),  # inside the one before it
        kernel(8, 9),
    ]
    found = pauses(kernels, {"7": 2.4, "8": 0.1}, [0.0, 7.0])
    assert {cause: (p.count, pytest.approx(p.ms)) for cause, p in found.items()} == {
        Cause.BETWEEN_STEPS: (1, 1.0),
        Cause.HOST: (1, 0.5),
        Cause.DATA: (2, 0.5),
        Cause.UNKNOWN: (1, 0.5),
        Cause.SHORT: (1, 0.01),
    }
    assert next(iter(found)) == Cause.BETWEEN_STEPS
    assert (found[Cause.DATA].longest_before, found[Cause.DATA].longest_ms) == ("dot.5.3", pytest.approx(0.3))


def test_a_busy_gpu_has_no_pauses() -> None:
    assert pauses([kernel(0, 2), kernel(1, 3)], {}, []) == {}
