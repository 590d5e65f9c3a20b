"""Strand pairing inside the compiler: an interleaved Llama step for 4 H200s, compiled without any GPU."""

import pytest

from dhelix.benchmarks.programs.structure import Case, interleave, lower
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.evaluation.timeline import simulate_module
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.framework.report import CHANGED
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.verify import verify
from dhelix.passes.ordering.collective_schedule import CollectiveSchedule
from dhelix.passes.ordering.strand_pairing import PAIRED_NOTE, StrandPairing
from dhelix.runtime.compiler import deviceless, lowering
from dhelix.runtime.compiler.registration import Session
from dhelix.tests.passes.schedules import temporaries

# Collectives of 64 MiB. Up to 30 MiB of results, XLA combines collectives of both strands, and nothing is left to pair.
WIDE = {"vocab": 8192, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 7168, "seq": 8192}


@pytest.mark.slow
@pytest.mark.deviceless
def test_an_interleaved_step_is_paired() -> None:
    """Predicted to be faster than XLA's order and the list schedule; legal, deterministic, within the slack of 3 %."""
    lowered = interleave(lower(Case("wide", layers=4, microbatches=4, overrides=WIDE)))[0]
    plain = deviceless.compile(lowered)
    xla = lowering.compiled_module(plain)
    model = CostModel.find("H200", "nvlink")
    seconds, source = [], xla.to_bytes()
    for one in (CollectiveSchedule(model=model), StrandPairing(model=model)):
        after, report = PassManager([one], strict=True).run(Stage.POST_SCHEDULER, source)
        module = HloModule.from_bytes(after or source)
        verify(module)
        seconds.append(simulate_module(module, model.hardware, model.costs()).seconds)
    assert report.passes[0].outcome == CHANGED
    assert PassManager([one], strict=True).run(Stage.POST_SCHEDULER, source)[0] == after
    assert seconds[1] <= seconds[0] <= simulate_module(xla, model.hardware, model.costs()).seconds
    paired = [n.facts for n in report.passes[0].notes if n.message == PAIRED_NOTE]
    assert paired and all(f["seconds_paired"] < min(f["seconds_list"], f["seconds_xla"]) for f in paired)

    given = lowering.hlo_bytes(lowered)
    session = Session(PassManager([StrandPairing(model=model)], strict=True), given, "jit_step")
    with session.compiling():
        ours = deviceless.compile(lowering.with_hlo(lowered, given, session.module_name))
    assert session.report().stages[-1].passes[0].outcome == CHANGED
    assert temporaries(ours) <= 1.04 * temporaries(plain)
