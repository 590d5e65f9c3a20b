"""The sharding section of a plan file: a step honours it, or says in one line why it cannot."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import OrderSection, Plan, PlanError
from dhelix.passes.sharding.factors import ONE, Factor, Factors
from dhelix.passes.sharding.sharding_plan import ShardingPlan
from dhelix.runtime.pipeline.fold import Fold
from dhelix.runtime.sharding.placed_states import shard_state
from dhelix.runtime.sharding.state_plan import StatePlan, mesh_of, sharding_plan
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.runtime.sharding.training import Case, difference, every_size, mesh, trained

ZERO1 = ShardingPlan(Factors.named("zero1", Factor(8)), "inside")
PARTIAL = ShardingPlan(Factors(Factor(4, 2), ONE, ONE, Factor(4)), "inside")


def saved(folder: Path, section: ShardingPlan, **changes: str) -> Path:
    """A plan file with this section, in which `changes` replace texts by name."""
    path = folder / "plan.json"
    text = plan_files.dumps(Plan("a step", sharding=section))
    for name, value in changes.items():
        text, count = re.subn(rf', "{name}": (\[[^]]*\]|"[^"]*")', value and f', "{name}": {value}', text)
        assert count == 1
    path.write_text(text)
    return path


@pytest.mark.slow
def test_a_step_runs_the_plan_file(tmp_path: Path) -> None:
    case = Case(mesh(dp=8), microbatches=2)
    step = strand_interleave(case.step, plan=saved(tmp_path, ZERO1), passes=every_size())
    expected, _ = trained(jax.jit(case.step), case.state(), case, last=2)
    found, _ = trained(step, shard_state(case.state(), "zero1"), case, last=2)
    assert difference(expected, found) < 1e-6
    assert found["params"]["head"].sharding.spec == P("dp")


def test_a_plan_of_states_alone_leaves_the_order_to_other_options(tmp_path: Path) -> None:
    file = saved(tmp_path, ZERO1)
    options = strand_interleave(lambda x: x, plan=file, schedule="list", skew=1).options
    assert options.plan is None and options.sharding == sharding_plan(file) and options.skew == 1
    both = Plan("a step", order=OrderSection(max_in_flight=2), sharding=ZERO1)
    options = strand_interleave(lambda x: x, plan=both).options
    assert options.plan is both and options.sharding == sharding_plan(ZERO1)


@pytest.mark.parametrize("same", ["zero1", ZERO1.factors, StatePlan(ZERO1.factors), ZERO1])
def test_the_same_may_be_said_twice(same: Any) -> None:
    assert strand_interleave(lambda x: x, plan=Plan("a step", sharding=ZERO1), sharding=same).options.plan is None


def test_a_plan_names_its_mesh_axes(tmp_path: Path) -> None:
    assert sharding_plan(saved(tmp_path, PARTIAL)).axes == ("dp_1", "dp_0")
    assert sharding_plan(saved(tmp_path, PARTIAL, axes='["replica", "shard"]')).axes == ("replica", "shard")
    assert sharding_plan(saved(tmp_path, PARTIAL, axes="")).axes == ("dp_1", "dp_0"), "a file of an earlier version"
    on, plan = mesh_of(saved(tmp_path, PARTIAL, axes='["replica", "shard"]'))
    assert dict(on.shape) == {"replica": 2, "shard": 4} and plan.on(on.shape).optimizer == ("shard",)


def test_meshes_have_the_orders_of_the_plan() -> None:
    devices = jax.devices("cpu")
    section = ShardingPlan(PARTIAL.factors, "inside", ("b", "a"), gpu_order=(0, 2, 1, 3))
    on, _ = mesh_of(section, devices, nodes=["a", "b"])
    assert [device.id for device in on.devices.flat] == [4, 6, 5, 7, 0, 2, 1, 3]
    assert [device.id for device in mesh_of(section, devices)[0].devices.flat] == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": "[3, 1]"}, "sharding: the factor of optimizer is 3x1, and does not divide mesh = 4x2"),
        ({"optimizer": "[0, 1]"}, "sharding.optimizer.0: expected `int` >= 1"),
        ({"parameters": ""}, "sharding: `parameters` is missing"),
        ({"split": '"none"'}, "sharding: split 'none' is unknown"),
        ({"axes": '["dp"]'}, "sharding: dp cannot carry out parameters 1x1, gradients 1x1, optimizer 4x1 of 4x2: "),
        ({"axes": '["dp", "dp"]'}, "sharding: 'dp' occurs twice"),
        ({"axes": '"dp"'}, "sharding.axes: expected `array`"),
        ({"gpu_order": "[0, 1, 1, 3]"}, "sharding: the order of GPUs names each of 0 to 3 once"),
        ({"placement": '["a"]'}, "sharding: 1 nodes are placed, of 2"),
    ],
)  # fmt: skip
def test_corrupted_sections(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    section = ShardingPlan(PARTIAL.factors, "inside", ("a", "b"), gpu_order=(0, 1, 2, 3))
    file = saved(tmp_path, section, **changes)
    with pytest.raises(PlanError, match=re.escape(said)):
        strand_interleave(lambda x: x, plan=file)


def test_a_plan_shards_the_states_of_a_pipeline_too() -> None:
    step = strand_interleave(
        lambda x: x, plan=Plan("a step", sharding=ZERO1), microbatches=4, pipeline=Fold(2, layers=4)
    )
    assert step.options.sharding == sharding_plan(ZERO1) and step.options.plan is None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda plan: strand_interleave(lambda x: x, plan=plan, sharding="zero2"),
         "sharding= (--states) says zero2 over dp, but the plan says parameters 1x1, gradients 1x1, optimizer 8x1 of "
         "8x1 over dp: leave one of both out"),
        (lambda plan: strand_interleave(lambda x: x, plan=plan, sharding=sharding_plan("zero1", axes="data")),
         "says zero1 over data, but the plan says"),
        (lambda plan: shard_state(Case(mesh(dp=4)).state(), plan), "the plan is for 8 data-parallel devices (8x1)"),
        (lambda plan: mesh_of(plan, nodes=["a"]), "nodes= needs a plan that places nodes"),
        (lambda plan: mesh_of(ShardingPlan(PARTIAL.factors, "inside", ("a", "b")), nodes=["a", "c"]),
         "the plan places a, b; nodes= must name the same, each once, unlike 'c'"),
        (lambda plan: mesh_of(ShardingPlan(Factors(Factor(4)), gpu_order=(0, 1, 2, 3)), tp=2),
         "the plan orders single GPUs"),
    ],
)  # fmt: skip
def test_what_contradicts_a_plan_is_one_error(make: Callable[[Plan], Any], said: str) -> None:
    with pytest.raises(DhelixError, match=re.escape(said)):
        make(Plan("a step", sharding=ZERO1))


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "mics"])
def test_the_section_of_a_strategy_says_the_same(strategy: str) -> None:
    mesh = {"dp": 2, "inner": 4, "tp": 2}
    plan = sharding_plan(strategy, axes=("dp", "inner"))
    section = plan.section(mesh)
    assert sharding_plan(Plan("a step", sharding=section)).on(mesh) == plan.on(mesh)
