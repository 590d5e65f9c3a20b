"""Collectives of different strands stay separate, in small modules and through the compiler."""

import jax
import pytest

from dhelix.benchmarks.programs.structure import Case, lower
from dhelix.passes.analysis.names import ALPHA, BETA
from dhelix.passes.communication.strand_separation import StrandSeparation
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.framework.report import CHANGED, UNCHANGED
from dhelix.passes.hlo import HloModule, graph
from dhelix.passes.strands.activation_sharing import ActivationSharing
from dhelix.passes.strands.gradients.gradient_accumulation import GradientAccumulation
from dhelix.passes.strands.strand_duplication import StrandDuplication
from dhelix.runtime.compiler import deviceless, lowering
from dhelix.runtime.compiler.registration import Session

GATHERS = """
HloModule step
ENTRY main {
  x = f32[4] parameter(0)
  y = f32[4] parameter(1)
  a = f32[16] all-gather(x), dimensions={0}, metadata={op_name="jit(step)/strand_alpha/all_gather"}
  b = f32[16] all-gather(y), dimensions={0}, frontend_attributes={combiner_key="mine"}, metadata={op_name="jit(step)/strand_beta/all_gather"}
  c = f32[16] all-gather(y), dimensions={0}, metadata={op_name="jit(step)/all_gather"}
  d = f32[4] add(x, y), metadata={op_name="jit(step)/strand_beta/add"}
  ROOT r = (f32[16], f32[16], f32[16], f32[4]) tuple(a, b, c, d)
}
"""  # noqa: E501
SMALL = {"vocab": 8192, "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 3072, "seq": 2048}


def run(text: str) -> tuple[HloModule, str]:
    given = HloModule.from_text(text).to_bytes()
    changed, report = PassManager([StrandSeparation()], strict=True).run(Stage.PRE_SCHEDULER, given)
    return HloModule.from_bytes(changed or given), report.passes[0].outcome


def test_each_strand_has_a_key_of_its_own() -> None:
    module, outcome = run(GATHERS)
    keys = {i.name: dict(i.proto.frontend_attributes.map) for i in module.entry.instructions}
    assert outcome == CHANGED
    assert keys["a"] == {"combiner_key": "strand_alpha"}
    assert keys["b"] == {"combiner_key": "strand_beta mine"}
    assert keys["c"] == keys["d"] == {}


LOOPS = """
HloModule step
body {
  s = (s32[], f32[4]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  x = f32[4] get-tuple-element(s), index=1
  g = f32[16] all-gather(x), dimensions={0}, metadata={op_name="jit(step)/strand_alpha/all_gather"}
  y = f32[4] slice(g), slice={[0:4]}
  one = s32[] constant(1)
  n = s32[] add(i, one)
  ROOT r = (s32[], f32[4]) tuple(n, y)
}
condition {
  s = (s32[], f32[4]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  four = s32[] constant(4)
  ROOT less = pred[] compare(i, four), direction=LT
}
ENTRY main {
  p = (s32[], f32[4]) parameter(0)
  first = (s32[], f32[4]) while(p), condition=condition, body=body
  ROOT second = (s32[], f32[4]) while(first), condition=condition, body=body
}
"""


def test_loops_may_share_a_body() -> None:
    """XLA's partitioner gives equal loops one body, for example two loops of one direction."""
    module, outcome = run(LOOPS)
    assert outcome == CHANGED
    assert len({loop.called[0] for loop in module.entry.instructions if loop.opcode == "while"}) == 1


def test_a_program_without_strands_is_left_alone() -> None:
    text = GATHERS.replace("strand_alpha/", "").replace("strand_beta/", "")
    assert run(text)[1] == UNCHANGED


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize("sharding", ["shard_map", "auto"])
def test_xla_combines_them_otherwise(sharding: str) -> None:
    """XLA combines small collectives of both strands without the pass, and keeps them separate with it."""
    case = Case("small", layers=4, microbatches=4, sharding=sharding, overrides=SMALL)
    lowered = _interleave(case)
    assert _combined(deviceless.compile(lowered))
    assert not _combined(_compile(lowered))


def _interleave(case: Case) -> jax.stages.Lowered:
    lowered = lower(case)
    manager = PassManager([StrandDuplication(), GradientAccumulation(), ActivationSharing()], strict=True)
    changed, _ = manager.run(Stage.LOWERED, lowering.hlo_bytes(lowered))
    assert changed is not None
    return lowering.with_hlo(lowered, changed)


def _compile(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    given = lowering.hlo_bytes(lowered)
    session = Session(PassManager([StrandSeparation()], strict=True), given, "jit_step")
    with session.compiling():
        compiled = deviceless.compile(lowering.with_hlo(lowered, given, session.module_name))
    assert session.report()[StrandSeparation.name].outcome == CHANGED
    return compiled


def _combined(compiled: jax.stages.Compiled) -> list[str]:
    """Names of collectives that were combined from both strands; XLA joins the op_names of the parts."""
    module = lowering.compiled_module(compiled)
    assert module is not None
    return [i.name for i in graph.walk(module.entry) if f"{ALPHA}/" in i.op_name and f"{BETA}/" in i.op_name]
