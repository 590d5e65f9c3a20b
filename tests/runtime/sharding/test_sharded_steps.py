"""Steps on sharded states: the numbers of the plain step, and states that stay in their shards.

Gradients are sums over devices and micro-batches, and a sharded step may add them up in another order. In float32 this
changes results by about 1e-7 on the scale of a tree.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

from dhelix.errors import DhelixError
from dhelix.passes.framework.report import CHANGED, UNCHANGED
from dhelix.passes.sharding.factors import ONE, Factor, Factors
from dhelix.runtime.sharding.placed_states import gather_state, shard_state, state_shardings
from dhelix.runtime.sharding.sharded_program import sharded_program
from dhelix.runtime.sharding.state_plan import StatePlan, mesh_of, sharding_plan
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.runtime.sharding.training import Case, difference, mesh, trained

CLOSE = 1e-6
MESHES = {"dp 8": {"dp": 8}, "dp 4, tp 2": {"dp": 4, "tp": 2}, "dp 2, tp 4": {"dp": 2, "tp": 4}}
PARTIAL = {
    "partial": Factors(Factor(4, 2), ONE, ONE, Factor(4)),
    "partial gradients": Factors(Factor(4, 2), ONE, Factor(4), Factor(4, 2)),
    "three axes": Factors(Factor(8), Factor(2), Factor(4), Factor(8)),
    "mics": Factors.named("mics", Factor(4, 2)),
}

Tree = Any


def case_of(axes: str, microbatches: int = 1, manual: bool = False) -> Case:
    return Case(mesh(**MESHES[axes]), microbatches=microbatches, manual=manual)


def partial_case(name: str, microbatches: int, manual: bool = False) -> tuple[Case, StatePlan]:
    on, plan = mesh_of(PARTIAL[name])
    return Case(on, plan.axes, microbatches, manual), plan


@functools.cache
def expected(microbatches: int) -> tuple[Tree, Tree]:
    """State and metrics after five plain steps. The mesh does not matter."""
    case = case_of("dp 8", microbatches)
    state, metrics = trained(jax.jit(case.step), case.state(), case)
    return jax.tree.map(np.asarray, state), metrics


def check(case: Case, plan: Any, close: float = CLOSE) -> set[str]:
    """Trains on sharded states, and compares. Returns the names of the passes that changed something."""
    state = shard_state(case.state(), plan)
    step = case.sharded(plan, strict=case.microbatches > 1)
    found, metrics = trained(step, state, case)
    state, plain = expected(case.microbatches)
    for part in ("params", "optimizer"):
        assert difference(state[part], found[part]) < close, part
    assert difference(plain, metrics) < close
    right = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b, a.ndim), found, state_shardings(found, plan))
    assert jax.tree.all(right)
    stages = step.report(found, case.batch()).stages
    return {one.name for stage in stages for one in stage.passes if one.outcome == CHANGED}


QUICK = [
    ("zero1", "dp 8", 4, False),
    ("zero1", "dp 8", 1, True),
    ("zero3", "dp 4, tp 2", 1, False),
    ("zero3", "dp 8", 4, True),
]
ALL = [
    ("dp", "dp 4, tp 2", 4, False),
    *(("zero1", axes, 4, False) for axes in MESHES),
    ("zero1", "dp 2, tp 4", 1, False),
    ("zero2", "dp 4, tp 2", 4, False),
    ("zero2", "dp 8", 1, False),
    *(("zero3", axes, 4, False) for axes in MESHES),
    ("zero1", "dp 8", 1, True),
    ("zero1", "dp 8", 4, True),
    ("zero2", "dp 8", 4, True),
    ("zero3", "dp 8", 1, True),
    ("zero3", "dp 8", 4, True),
]


@pytest.mark.parametrize(
    ("plan", "axes", "microbatches", "manual"),
    [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in ALL if one not in QUICK)],
)
def test_five_steps_give_the_numbers_of_the_plain_step(plan: str, axes: str, microbatches: int, manual: bool) -> None:
    changed = check(case_of(axes, microbatches, manual), plan)
    assert ("state-sharding" in changed) == (plan != "dp")
    assert ("strand-duplication" in changed) == (microbatches > 1)
    assert ("parameter-gathering" in changed) == (plan in ("zero1", "zero2"))
    if manual or microbatches == 1:  # docs/design/sharding.md, "What is missing", says what else there is
        assert ("parameter-prefetch" in changed) == (plan == "zero3")


COPIES = [("mics", 1, False)] + [(name, 4, False) for name in PARTIAL]
COPIES += [("partial", 1, True)] + [(name, 4, True) for name in PARTIAL if name != "partial"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "microbatches", "manual"),
    [pytest.param(*one, marks=[pytest.mark.slow] * (one != ("mics", 1, False))) for one in COPIES],
)
def test_so_do_plans_with_copies(name: str, microbatches: int, manual: bool) -> None:
    case, plan = partial_case(name, microbatches, manual)
    assert "state-sharding" in check(case, plan)


def test_nothing_is_sharded_over_a_single_data_parallel_device() -> None:
    case = Case(mesh(dp=1, tp=8))
    lowered = jax.jit(case.step).lower(shard_state(case.state(), "zero1"), case.batch())
    assert sharded_program(lowered, "zero1") == (lowered, None)


def test_a_program_on_no_mesh_is_refused() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(np.ones((8, 8)))
    with pytest.raises(DhelixError, match=re.escape("place the state with dhelix.shard_state(state, plan, mesh)")):
        sharded_program(lowered, "zero1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [("zero1", "zero3"), pytest.param("zero3", "dp", marks=pytest.mark.slow)],
)
def test_training_goes_on_under_another_plan(before: str, after: str) -> None:
    """From a checkpoint of whole arrays, which is read into the shardings of the other plan."""
    case = case_of("dp 4, tp 2")
    state, _ = trained(case.sharded(before), shard_state(case.state(), before), case, 0, 2)
    checkpoint = jax.tree.map(np.asarray, gather_state(state, before))
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), case.state())
    restored = jax.device_put(checkpoint, state_shardings(shapes, after))
    found, metrics = trained(case.sharded(after), restored, case, 2, 5)
    plain, plain_metrics = expected(1)
    assert difference(plain, found) < CLOSE and difference(plain_metrics, metrics) < CLOSE


@pytest.mark.slow
def test_training_goes_on_from_the_same_plan_bit_for_bit() -> None:
    case, plan = case_of("dp 8"), "zero1"
    step = case.sharded(plan)
    whole, _ = trained(step, shard_state(case.state(), plan), case)
    half, _ = trained(step, shard_state(case.state(), plan), case, 0, 2)
    again = jax.device_put(jax.tree.map(np.asarray, half), state_shardings(half, plan))
    found, _ = trained(step, again, case, 2, 5)
    jax.tree.map(np.testing.assert_array_equal, whole, found)


def test_a_state_that_is_not_placed_is_refused() -> None:
    case = case_of("dp 8")
    with pytest.raises(DhelixError, match=re.escape("place it with dhelix.shard_state(state, plan)")):
        case.sharded("zero1", strict=True)(case.state(), case.batch())


def test_a_state_under_another_plan_is_refused() -> None:
    case, plan = partial_case("partial", 1)
    everywhere = sharding_plan("zero1", axes=plan.axes)
    with pytest.raises(DhelixError, match=r"the state is split over dp_0, dp_1, but this plan splits it over dp_0"):
        case.sharded(plan)(shard_state(case.state(), everywhere), case.batch())


def test_a_step_without_strands_is_ordered_also_if_no_earlier_pass_changes_it() -> None:
    """Its layers are too small for a prefetch."""
    case = case_of("dp 8")
    step = strand_interleave(sharding="zero3", schedule="intra_batch")(case.step)
    found = step.preview(shard_state(case.state(), "zero3"), case.batch())
    assert found["parameter-prefetch"].outcome == UNCHANGED and found.left_alone == ""


def test_inside_another_transformation_the_step_is_the_plain_one() -> None:
    case = case_of("dp 8")
    state, batch = case.state(), case.batch()
    found, _ = jax.jit(case.sharded("zero1"))(state, batch)
    assert difference(jax.jit(case.step)(state, batch)[0], found) == 0.0
