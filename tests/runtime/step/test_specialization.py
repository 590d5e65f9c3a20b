"""Compilation of a step whose plan or memory limit does not fit, on GPUs that need not exist."""

from collections.abc import Iterator
from typing import Any

import jax
import optax
import pytest

from dhelix.errors import DhelixError, PassRefusal
from dhelix.models import Training, make_train_step, preset
from dhelix.passes.framework import units
from dhelix.passes.framework.report import CHANGED, REFUSED
from dhelix.passes.plans.plan import CollectivesSection, OrderSection, Plan, PlanBody, PlanTarget
from dhelix.profiles.keys import CollectiveKey
from dhelix.runtime.compiler import deviceless, lowering, memory_need, registration
from dhelix.runtime.compiler.lowering import compiled_module
from dhelix.runtime.step import specialization
from dhelix.runtime.step.interleaved_step import InterleavedStep
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.step.plain_step import PlainStep
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.runtime.step.target import Target
from dhelix.tests.runtime import steps

CONFIG = preset(
    "llama-8b", layers=2, vocab=4096, hidden=1024, heads=8, kv_heads=4, ffn=3072, seq=2048
)  # a reduce-scatter has 4 MiB, which is enough to decompose it
FOREIGN = Plan(
    "another step",
    PlanTarget.of("H200", "nvlink", "default"),
    CollectivesSection(decomposed=(CollectiveKey("reduce-scatter", 4 << 20, 4),)),
    OrderSection((PlanBody("both strands", "0123456789abcdef", 1, (), ()),)),
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    registration.clear()


@pytest.fixture(scope="module")
def training() -> Training:
    return make_train_step(CONFIG, deviceless.mesh({"dp": 1, "tp": 4}), optax.sgd(0.1), 3)


def decorated(training: Training, **options: Any) -> tuple[InterleavedStep, tuple[Any, ...]]:
    """The step for these GPUs, and abstract arguments."""
    compiler_options = dict(deviceless.COMPILER_OPTIONS)
    step = strand_interleave(training.train_step, donate_argnums=0, compiler_options=compiler_options, **options)
    return step, (training.abstract_state(), training.abstract_batch(3 * training.mesh.shape["dp"]))


def compiled(step: InterleavedStep, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
    return step._compiled(arguments, {})[1]


def opcodes(program: jax.stages.Compiled) -> set[str]:
    return {i.opcode for c in compiled_module(program).computations for i in c.instructions}


@pytest.mark.slow
@pytest.mark.deviceless
def test_nothing_is_left_of_a_refused_plan(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    """Its all-to-alls were made before the refusal, so the step is compiled again. The strands stay, in XLA's order."""
    step, arguments = decorated(training, plan=FOREIGN)
    found = compiled(step, arguments)
    assert "reduce-scatter" in opcodes(found) and "all-to-all" not in opcodes(found)
    report = step.report(*arguments)
    assert report["strand-duplication"].outcome == CHANGED
    assert report["planned-order"].outcome == REFUSED
    assert "the plan is for another program" in str(report["planned-order"].notes[-1])
    said = [
        r.getMessage() for r in caplog.records if "compiled again without the plan's replacements" in r.getMessage()
    ]
    assert len(said) == 1


@pytest.mark.deviceless
def test_a_refused_plan_raises_where_that_is_asked_for(training: Training) -> None:
    step, arguments = decorated(training, plan=FOREIGN, strict=True)
    with pytest.raises(PassRefusal, match="the plan is for another program"):
        compiled(step, arguments)


@pytest.mark.deviceless
def test_a_step_that_is_predicted_to_gain_nothing_runs_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(specialization, "_USELESS", 0.0)
    step, arguments = small()
    found = step.report(*arguments)
    assert not is_interleaved(compiled(step, arguments)) and found.gain is not None
    assert found.left_alone.startswith("two strands are not faster: predicted step time")
    assert found["strand-duplication"].outcome == CHANGED  # the report still shows what was tried
    assert [r for r in caplog.records if "runs as it is: two strands are not faster" in r.getMessage()]
    assert StepOptions(strict=True).insists and StepOptions(plan=FOREIGN).insists and not StepOptions().insists


def small(**options: Any) -> tuple[InterleavedStep, tuple[Any, ...]]:
    return steps.of_two_layers(
        deviceless.mesh({"dp": 2}), compiler_options=dict(deviceless.COMPILER_OPTIONS), **options
    )


def greedy(**options: Any) -> tuple[InterleavedStep, tuple[Any, ...]]:
    """A step that needs more memory with two strands, because no pass keeps the gradients of replicas in one place."""
    return small(disable=("replica-sums",), **options)


def is_interleaved(program: jax.stages.Compiled) -> bool:
    return "strand_beta/" in (program.as_text() or "")


@pytest.mark.deviceless
def test_a_step_that_would_need_more_than_plain_and_3_percent_runs_plain(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limit that the message gives, it runs as two strands and stays within the limit."""
    monkeypatch.setattr(memory_need, "room", lambda _: 0)
    step, arguments = greedy(schedule="dp", profile=None)
    plain = compiled(step, arguments)
    assert not is_interleaved(plain)
    (said,) = (r.getMessage() for r in caplog.records if "runs as it is" in r.getMessage())
    assert "the plain step's memory plus 3%" in said
    would_do = said.rpartition("memory_limit=")[2].strip("'")
    allowed = memory_need.of_compiled(plain).allowed()
    kept = float(said.partition("more than ")[2].split()[0]) * 2**20
    assert kept == pytest.approx(allowed, rel=0.01)  # an estimate of the plain step's need
    step, arguments = greedy(schedule="dp", profile=None, memory_limit=would_do)
    interleaved = compiled(step, arguments)
    assert is_interleaved(interleaved)
    assert allowed < memory_need.of_compiled(interleaved).total <= units.parse_bytes("memory_limit", would_do)


@pytest.mark.deviceless
def test_where_the_gpu_has_room_more_memory_does_not_keep_a_step_plain(caplog: pytest.LogCaptureFixture) -> None:
    step, arguments = greedy(schedule="dp", profile=None)
    interleaved = compiled(step, arguments)
    assert is_interleaved(interleaved) and not step.report(*arguments).left_alone
    (said,) = (r.getMessage() for r in caplog.records if "the GPU has room" in r.getMessage())
    assert "(the plain step's memory plus 3%); the GPU has room for them (memory_limit= sets another limit)" in said


@pytest.mark.deviceless
def test_a_limit_that_is_too_small_is_said_or_raised(caplog: pytest.LogCaptureFixture) -> None:
    step, arguments = small(memory_limit=1000)
    assert not is_interleaved(compiled(step, arguments))
    (said,) = (r.getMessage() for r in caplog.records if "runs as it is" in r.getMessage())
    assert "more than 1,000 B, arguments included; the smallest sufficient limit is memory_limit=" in said
    assert "; the plain step, which runs, needs more than the limit, too: " in said
    step, arguments = small(memory_limit=1000, strict=True)
    with pytest.raises(DhelixError, match="the smallest needs"):
        compiled(step, arguments)


@pytest.mark.slow
@pytest.mark.deviceless
def test_what_the_plain_step_needs_is_known_before_it_is_compiled(training: Training) -> None:
    options = dict(deviceless.COMPILER_OPTIONS)  # the plain step is scheduled with the options of the step itself
    lowered = jax.jit(training.train_step, donate_argnums=0, compiler_options=options).lower(
        training.abstract_state(), training.abstract_batch(3)
    )
    program = lowering.hlo_bytes(lowered)
    target = Target.of(lowered, StepOptions())
    assert target is not None
    plain, again = (PlainStep(lowered, program, target.costs) for _ in range(2))
    assert plain.known is not None
    (found, parts), exact = plain.known, memory_need.of_compiled(deviceless.compile(lowered))
    assert found.arguments == exact.arguments and parts.memory > found.arguments
    assert found.beside == pytest.approx(exact.beside, rel=0.01)
    assert plain.known == again.known and parts.seconds > 0 and plain.seconds > 0
    assert found.allowed() == int(1.025 * (found.arguments + found.beside))
