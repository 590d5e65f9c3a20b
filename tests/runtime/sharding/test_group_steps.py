"""Steps whose groups of parameters are sharded in different ways: the numbers, the collectives and the report."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dhelix.errors import DhelixError
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import Plan, PlanError
from dhelix.passes.sharding.sharding_plan import ShardingPlan
from dhelix.runtime.compiler import lowering
from dhelix.runtime.sharding.placed_states import gather_state, shard_state, state_shardings
from dhelix.runtime.sharding.state_plan import StatePlan, mesh_of, sharding_plan
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.runtime.sharding.training import Case, difference, mesh, trained

CLOSE = 1e-6
MESHES = {"dp 8": {"dp": 8}, "dp 2, tp 4": {"dp": 2, "tp": 4}}
PLANS = {
    "embedding less": sharding_plan("zero3", groups={"embedding": "zero1"}),
    "embedding whole": sharding_plan("zero2", groups={"embedding": "dp"}),
    "layers alone": sharding_plan("dp", groups={"layers": "zero3"}),
    "three ways": sharding_plan("zero1", groups={"layers/bias": "dp", "layers": "zero3", "params/head": "zero2"}),
}

Tree = Any


def case_of(axes: str = "dp 8", microbatches: int = 1, manual: bool = False) -> Case:
    return Case(mesh(**MESHES[axes]), microbatches=microbatches, manual=manual, tokens=True)


@functools.cache
def expected(microbatches: int) -> Tree:
    """The state after five plain steps. The mesh does not matter."""
    case = case_of(microbatches=microbatches)
    return jax.tree.map(np.asarray, trained(jax.jit(case.step), case.state(), case)[0])


ALL = [
    *((name, axes, microbatches, False) for name in PLANS for axes in MESHES for microbatches in (1, 4)),
    *((name, "dp 8", microbatches, True) for name in PLANS for microbatches in (1, 4)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes", "microbatches", "manual"), ALL)
def test_five_steps_give_the_numbers_of_the_plain_step(name: str, axes: str, microbatches: int, manual: bool) -> None:
    case, plan = case_of(axes, microbatches, manual), PLANS[name]
    step = case.sharded(plan, strict=microbatches > 1, verify=True)
    found, _ = trained(step, shard_state(case.state(), plan), case)
    for part in ("params", "optimizer"):
        assert difference(expected(microbatches)[part], found[part]) < CLOSE, part
    right = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b, a.ndim), found, state_shardings(found, plan))
    assert jax.tree.all(right), "each new state is where its state was"


def collectives(plan: StatePlan, manual: bool) -> Counter[tuple[str, tuple[int, ...], bool]]:
    """The collectives of the compiled step: kind, sizes of the result, and whether a loop runs them."""
    case = case_of(microbatches=4, manual=manual)
    step = case.sharded(plan, strict=True)
    module = lowering.compiled_module(step.lower(shard_state(case.state(), plan), case.batch()).compile())
    found = Counter[tuple[str, tuple[int, ...], bool]]()
    for computation in module.computations:
        for i in computation.instructions:
            if i.opcode in ("all-gather", "all-reduce", "reduce-scatter"):
                for shape in i.shape.tuple_shapes or [i.shape]:
                    found[i.opcode, tuple(shape.dimensions), computation is not module.entry] += 1
    return found


def test_an_embedding_under_zero1_is_reduced_once_while_layers_gather_in_their_turn() -> None:
    found = collectives(PLANS["embedding less"], manual=True)
    assert found["all-gather", (64, 16), False] == 1 and not found["all-gather", (64, 16), True]
    assert found["reduce-scatter", (8, 16), False] == 1 and not found["reduce-scatter", (8, 16), True]
    assert found["all-gather", (16, 32), True] and found["all-gather", (32, 16), True], "layers, one at a time"
    assert found["reduce-scatter", (1, 4, 16), True]
    alike = collectives(sharding_plan("zero3"), manual=True)
    assert alike["reduce-scatter", (8, 16), True], "without groups, each micro-batch reduces the embedding"


def test_so_it_is_under_automatic_sharding() -> None:
    """XLA for CPUs writes a reduce-scatter as an all-reduce."""
    found = collectives(PLANS["embedding less"], manual=False)
    assert found["all-gather", (64, 16), False] == 1 and not found["all-gather", (64, 16), True]
    assert found["all-reduce", (64, 16), False] == 1 and not found["all-reduce", (64, 16), True]
    assert found["all-gather", (1, 16, 32), True] and found["all-reduce", (16, 32), True]


def test_the_report_has_a_line_for_each_group() -> None:
    case, plan = case_of(), PLANS["embedding whole"]
    report = case.sharded(plan).preview(shard_state(case.state(), plan), case.batch())["state-sharding"]
    whole, others = (note.message for note in report.notes)
    assert whole == "embedding (dp): between steps, every device holds all 12 KiB of states"
    assert others.startswith("the others (zero2): between steps, a device holds 5.02 KiB of states instead of ")


def test_training_goes_on_under_another_plan_on_another_mesh() -> None:
    case, before = case_of(), PLANS["three ways"]
    state, _ = trained(case.sharded(before), shard_state(case.state(), before), case, 0, 2)
    on, after = mesh_of(sharding_plan("zero1", groups={"embedding": "mics"}), group=4)
    placed = state_shardings(state, after, on)
    restored = jax.device_put(jax.tree.map(np.asarray, state), placed)
    other = Case(on, after.axes, tokens=True)
    found, _ = trained(other.sharded(after), restored, other, 2, 5)
    assert difference(expected(1), gather_state(found, after)) < CLOSE


def test_the_guides_planner_chooses_a_plan_that_runs() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guide" / "sharding.md").read_text()
    found: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[-1], found)
    on, plan = mesh_of(sharding_plan(found["planned"].best.factors, groups={"embedding": "zero1"}))
    case = Case(on, plan.axes, tokens=True)
    state, _ = trained(case.sharded(plan), shard_state(case.state(), plan), case)
    assert difference(expected(1), state) < CLOSE


def section() -> ShardingPlan:
    return PLANS["three ways"].section({"dp": 8})


def test_a_plan_file_keeps_groups_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan_files.save(Plan("a step", sharding=section()), file)
    loaded = sharding_plan(file)
    assert [name for name, _ in loaded.groups] == ["layers/bias", "layers", "params/head"]
    assert loaded.of_groups({"dp": 8}) == PLANS["three ways"].of_groups({"dp": 8})
    same = strand_interleave(lambda x: x, plan=file, sharding=PLANS["three ways"])
    assert same.options.sharding == loaded
    for other in ("zero1", sharding_plan("zero1", groups={"head": "zero2"})):
        with pytest.raises(DhelixError, match="leave one of both out"):
            strand_interleave(lambda x: x, plan=file, sharding=other)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"params/head"', '"params/"', "sharding: group 'params/' has no name"),
        (
            'head": {"parameters": [1, 1]',
            'head": {"parameters": [3, 1]',
            "sharding: group 'params/head': the factor of ",
        ),
        ('head": {"parameters": [1, 1], ', 'head": {', "sharding: group 'params/head': `parameters` is missing"),
        ('"axes": ["dp"]', '"axes": ["dp", "dp"]', "sharding: 'dp' occurs twice"),
    ],
)
def test_corrupted_groups(before: str, after: str, said: str) -> None:
    text = plan_files.dumps(Plan("a step", sharding=section()))
    assert before in text
    with pytest.raises(PlanError, match=re.escape(said)):
        plan_files.loads(text.replace(before, after), "plan.json")


@pytest.mark.parametrize(
    ("placed", "plan", "said"),
    [
        ("zero3", {"head": "dp"}, "the state of head (dp) is split over dp, but this plan keeps it whole"),
        ({"head": "dp"}, {"head": "zero1"}, "no state of head (zero1) is split over dp: place it with"),
    ],
)
def test_a_state_that_is_placed_otherwise_is_refused(placed: Any, plan: Any, said: str) -> None:
    case = case_of()
    before = sharding_plan("zero3", groups=placed) if isinstance(placed, dict) else placed
    state = shard_state(case.state(), before)
    with pytest.raises(DhelixError, match=re.escape(said)):
        case.sharded(sharding_plan("zero3", groups=plan))(state, case.batch())
