"""Generated train steps before and after the LOWERED passes: the same bits in every output.

Every generated program that the passes transform must fulfil:
- Every output leaf (new parameters, gradients, all that the loop carries and returns) is equal to the last bit,
  including NaNs, in float32, bfloat16, float16 and integers. A zero may have the other sign, because the conversion
  from HLO back to StableHLO drops additions of zero. StableHLO's reference interpreter runs both programs and rounds
  after each operation, so only the passes can cause differences. It needs no compiler and is fast.
- No pass fails. A pass may refuse; the program is then the plain one. A minimum share must be transformed.
Other pairings of strands, and strands that are some layers apart, are checked the same way on fewer programs
(`intra_batch` makes no strands).

XLA's CPU compiler cannot be used to compare bits. One loop body gives other last bits in another program, because
- LLVM contracts a multiplication and an addition (it always may; `--xla_cpu_max_isa=AVX` takes FMA away),
- a hyperbolic tangent is in the vectorised or in the scalar part of a fusion (seen without FMA),
- the algebraic simplifier rewrites `a / broadcast(b)` as `a * broadcast(1 / b)`, which depends on a reshape in
  between: a round trip through StableHLO drops that reshape, and softmax differs before any pass has run.
Without fusions (`xla_disable_hlo_passes=fusion,algsimp`) almost all programs are equal, but run much longer. So a few
kinds are compiled, and have to agree to 1e-6 of each leaf's largest magnitude over five optimizer steps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from dhelix.passes.framework import report
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.framework.report import StageReport
from dhelix.passes.strands.strand_duplication import PAIRINGS, StrandDuplication
from dhelix.runtime.compiler.lowering import hlo_bytes, with_hlo
from dhelix.runtime.step.pass_lists import strand_passes
from dhelix.tests.passes import program_losses as losses
from dhelix.tests.passes import programs
from dhelix.tests.passes.interpreter import interpret
from dhelix.tests.passes.programs import Program
from dhelix.tests.quick import slow_after, slow_but

EXAMPLES = 14  # different programs per family, at least
EXAMPLES_OTHER = 8  # of all families, each with every pairing other than forward-backward
EXAMPLES_WRITTEN_OUT = 10  # with unrolled micro-batches, whose carried values are left alone unless they are sums
EXAMPLES_SKEWED = 16  # with strands that are one or two layers apart

# Families that hypothesis draws from: kinds of loops over micro-batches, and kinds of layer stacks.
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "scan": (
        ("scan", "reverse", "indexed", "twice"),
        ("scan", "backwards", "counted", "by_two", "shared", "same_way", "buffered"),
    ),
    "fori": (("fori", "countdown", *programs.OPTAX_LOOPS), losses.STACKS),
    "unrolled": ((*programs.LOOPS, *programs.OPTAX_LOOPS), ("unrolled",)),
    "nested": (programs.LOOPS, ("groups", "frozen", "encoder_decoder", "skipping")),
}

SKEWED = ("1 apart", "2 apart")
OTHER_PAIRINGS = tuple(pairing for pairing in PAIRINGS if pairing != "forward-backward")


def drawn(loops: tuple[str, ...], stacks: tuple[str, ...]) -> st.SearchStrategy[Program]:
    """Programs of a family. Each other feature is absent from about half of them."""

    def maybe(values: Any) -> st.SearchStrategy[Any]:
        return st.just(tuple(values)[0]) | st.sampled_from(tuple(values))

    def some(values: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
        return st.just(()) | st.lists(st.sampled_from(values), max_size=3, unique=True).map(sorted).map(tuple)

    return st.builds(
        Program,
        microbatches=st.sampled_from((2, 3, 4, 5, 6, 7, 2, 3, 4, 5, 7, 1)),
        loop=st.sampled_from(loops),
        stack=st.sampled_from(stacks),
        depth=st.integers(1, 4),
        other_depth=st.integers(1, 3),
        layer=maybe(losses.LAYERS),
        remat=maybe(losses.REMATS),
        dropout=maybe(losses.DROPOUTS),
        auxiliary=maybe(losses.AUXILIARIES),
        gradient=maybe(programs.GRADIENTS),
        accumulation=maybe(programs.ACCUMULATIONS),
        carries=some(programs.CARRIES),
        metrics=some(programs.METRICS),
        dtype=maybe(losses.DTYPES),
        half_parameters=st.booleans(),
        tokens=st.booleans(),
        constants=st.booleans(),
        evaluation=st.booleans(),
        steps=maybe(programs.STEPS),
        infinite=maybe((False, False, False, True)),
    ).map(programs.legal)


class Plain:
    """A program that is lowered and executed once for all of its transformations."""

    def __init__(self, program: Program) -> None:
        step, self.arguments = programs.build(program)
        self.lowered = jax.jit(step, keep_unused=True).lower(*self.arguments)

    @functools.cached_property
    def results(self) -> list[np.ndarray]:
        return interpret(self.lowered, self.arguments)


@dataclasses.dataclass(frozen=True)
class Transformation:
    plain: Plain
    lowered: jax.stages.Lowered | None
    """None if the passes left the program alone."""
    report: StageReport

    @property
    def changed(self) -> set[str]:
        return {entry.name for entry in self.report.passes if entry.outcome == report.CHANGED}


@functools.cache
def manager(pairing: str) -> PassManager:
    if pairing in SKEWED:
        return PassManager(strand_passes(int(pairing[0])))
    return PassManager((StrandDuplication(pairing=pairing), *strand_passes()[1:]))


def transform(plain: Plain, pairing: str = "forward-backward") -> Transformation:
    changed, stage_report = manager(pairing).run(Stage.LOWERED, hlo_bytes(plain.lowered))
    return Transformation(plain, None if changed is None else with_hlo(plain.lowered, changed), stage_report)


def check(plain: Plain, pairing: str = "forward-backward") -> Transformation:
    """Asserts that the transformed program computes the same as the plain one."""
    result = transform(plain, pairing)
    failed = [f"{entry.name}: {entry.notes[-1]}" for entry in result.report.passes if entry.outcome == report.FAILED]
    assert not failed, pairing
    if result.lowered is not None:
        leaves = jax.tree_util.tree_leaves_with_path(plain.lowered.out_info)
        names = [jax.tree_util.keystr(path) for path, _ in leaves]
        each = zip(names, plain.results, interpret(result.lowered, plain.arguments), strict=True)
        assert [name for name, x, y in each if not np.array_equal(x, y, equal_nan=True)] == [], pairing
    return result


def check_many(
    some: st.SearchStrategy[Program],
    pairings: Sequence[str],
    count: int,
    name: str = "strand-duplication",
    share: float = 0.7,
) -> None:
    """Checks `count` different programs under each of `pairings`. Pass `name` must transform `share` of them."""
    changed: dict[Program, list[set[str]]] = {}
    failed: list[Program] = []  # after the first failure hypothesis shrinks, and checks everything that it tries

    @hypothesis.settings(max_examples=count * 4 // 3 + 10, suppress_health_check=(hypothesis.HealthCheck.too_slow,))
    @hypothesis.given(some)
    def run(program: Program) -> None:
        if failed or (program not in changed and len(changed) < count):
            failed.append(program)
            plain = Plain(program)
            changed[program] = [check(plain, pairing).changed for pairing in pairings]
            failed.pop()

    run()
    assert len(changed) == count
    for each in zip(*changed.values(), strict=True):
        assert sum(name in names for names in each) >= share * count


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits(family: str) -> None:
    check_many(drawn(*FAMILIES[family]), ["forward-backward"], EXAMPLES)


def test_same_bits_of_some_programs() -> None:
    check_many(drawn(*FAMILIES["scan"]), ["forward-backward"], EXAMPLES // 3)


@pytest.mark.slow
def test_micro_batches_that_are_written_out_become_strands() -> None:
    some = drawn(programs.WRITTEN_OUT, losses.STACKS)
    check_many(some, ["forward-backward"], EXAMPLES_WRITTEN_OUT, share=0.5)


@pytest.mark.slow
def test_same_bits_of_other_pairings() -> None:
    check_many(st.one_of([drawn(*family) for family in FAMILIES.values()]), OTHER_PAIRINGS, EXAMPLES_OTHER)


@pytest.mark.slow
@pytest.mark.parametrize("skew", [1, 2])
def test_same_bits_of_skewed_strands(skew: int) -> None:
    loops, stacks = FAMILIES["scan"]
    some = drawn(("fori", *loops[:3]), ("groups", *stacks)).map(
        lambda p: dataclasses.replace(
            p, depth=p.depth + 2 * skew - 1, microbatches=max(p.microbatches, 3), steps="once"
        )
    )
    check_many(some.map(programs.legal), [SKEWED[skew - 1]], EXAMPLES_SKEWED // 2, "strand-skew", 0.5)


# Shrunk programs that once failed, or that alone need a certain line of a pass.
FOUND = (
    # a value carried from backward to backward came out one micro-batch late
    Program(microbatches=4, carries=("lagged",)),
    Program(steps="scanned"),  # two instructions had one name after inlining in the loop over steps
    Program(auxiliary="carried", metrics=("activations",)),  # a residual that is also an output came out reversed
    Program(
        microbatches=4, stack="unrolled", remat="named", carries=("history",)
    ),  # forward hands on state that backward reads
    # backward reads residuals in the order in which they were stored
    Program(microbatches=3, stack="same_way", depth=3),
    Program(microbatches=3, stack="buffered", depth=3),  # forward reads the stack of residuals
    Program(microbatches=4, stack="skipping", layer="plain", depth=3),  # two backward loops read one stack
)


@pytest.mark.parametrize("program", slow_after(6, FOUND), ids=repr)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_found_before(pairing: str, program: Program) -> None:
    assert "strand-duplication" in check(Plain(program), pairing).changed


@pytest.mark.parametrize("refused", programs.REFUSED)
@pytest.mark.parametrize("stack", ("scan", "unrolled"))
def test_refused(refused: str, stack: str) -> None:
    result = check(Plain(Program(microbatches=3, stack=stack, refused=refused)))
    assert result.lowered is None
    first = result.report.passes[0]
    assert first.outcome == report.REFUSED
    assert ("dynamic" if refused == "dynamic" else "the forward pass reads") in first.notes[-1].message


# One of each kind for the compiler. Gradients stay moderate, so that differences of the last bit do not grow.
COMPILED = (
    Program(microbatches=3, depth=3),
    Program(microbatches=4, loop="fori", stack="counted", tokens=True),
    Program(microbatches=5, loop="optax_mean", remat="layer"),
    Program(microbatches=3, stack="unrolled", depth=3, layer="norm", carries=("momentum",)),
    Program(microbatches=4, stack="groups", other_depth=2, remat="dots", dropout="carried"),
    Program(microbatches=3, stack="encoder_decoder", depth=3, constants=True),
    Program(microbatches=3, stack="scan", depth=1, layer="attention", gradient="jitted"),
    Program(microbatches=3, stack="frozen", other_depth=2, auxiliary="carried", metrics=("losses",)),
)


@pytest.mark.parametrize("program", slow_but([COMPILED[n] for n in (0, 1, 3, 6, 7)], COMPILED), ids=repr)
def test_compiled(program: Program) -> None:
    result = transform(Plain(program))
    assert result.lowered is not None
    plain, transformed = result.plain.lowered.compile(), result.lowered.compile()
    parameters, *rest = result.plain.arguments
    other = parameters
    for _ in range(5):
        expected, actual = plain(parameters, *rest), transformed(other, *rest)
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(actual), strict=True):
            difference, scale = float(np.max(np.abs(x - y))), float(np.max(np.abs(x)))
            assert difference <= 1e-6 * scale, jax.tree_util.keystr(path)
        parameters, other = expected[0], actual[0]
