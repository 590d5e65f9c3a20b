"""Limits that no real step reaches. A damaged module beyond them would take endless time, or give senseless numbers.

A nest of loops or calls is not unfolded anywhere, so its size costs nothing. But a nest that is hundreds deep, or a
step that runs a kernel 10^15 times, comes from damage.
"""

from __future__ import annotations

from dhelix.errors import DhelixError
from dhelix.passes.analysis.execution import executions
from dhelix.passes.hlo import Computation, HloModule, shapes

DEPTH = 100
EXECUTIONS = 10**12
BYTES = 2**50


def check(module: HloModule) -> None:
    """Raises DhelixError if the module is beyond the limits. The message says where."""
    depths: dict[Computation, int] = {}
    for computation in module.computations:  # callees first
        for instruction in computation.instructions:
            size = shapes.byte_size(instruction.shape)
            if size > BYTES:
                raise DhelixError(
                    f"{instruction.name} has {size:.1e} bytes, more than any machine holds: its shape is damaged"
                )
        called = (depths[c] for instruction in computation.instructions for c in instruction.called)
        depths[computation] = 1 + max(called, default=0)
        if depths[computation] > DEPTH:
            raise DhelixError(f"{computation.name} calls computations that call others, more than {DEPTH} deep")
    for computation, count in executions(module).items():
        if count > EXECUTIONS:
            raise DhelixError(f"{computation.name} would run {count:.1e} times in a step, more than any step does")
