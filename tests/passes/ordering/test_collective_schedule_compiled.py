"""The list schedule inside the compiler: a Llama train step for 4 H200s, compiled without any GPU."""

import pytest

from dhelix.benchmarks.programs.structure import Case, interleave, lower
from dhelix.passes.framework.manager import PassManager
from dhelix.passes.framework.report import CHANGED
from dhelix.passes.ordering.collective_schedule import CollectiveSchedule
from dhelix.profiles.hardware import H200_NO_P2P
from dhelix.runtime.compiler import deviceless, lowering
from dhelix.runtime.compiler.registration import Session
from dhelix.tests.passes.schedules import temporaries

SMALL = {"vocab": 8192, "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 3072, "seq": 2048}


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize("strands", [False, True])
def test_a_train_step_compiles_in_the_order_found(strands: bool) -> None:
    """The compiler accepts the order, and its memory stays within the slack of 3 %."""
    case = Case("small", layers=4, microbatches=4, overrides=SMALL)
    lowered = interleave(lower(case))[0] if strands else lower(case)
    module = lowering.hlo_bytes(lowered)
    session = Session(PassManager([CollectiveSchedule(H200_NO_P2P)], strict=True), module, "jit_step")
    with session.compiling():
        ours = deviceless.compile(lowering.with_hlo(lowered, module, session.module_name))
    report = session.report().stages[-1].passes[0]
    assert report.outcome == CHANGED
    assert report.seconds < 1.0
    assert temporaries(ours) <= 1.04 * temporaries(deviceless.compile(lowered))
