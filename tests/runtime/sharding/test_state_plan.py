"""Plans of sharded states: what users may say, the mesh axes that carry it out, and one error for each mistake."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import dhelix
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import Plan
from dhelix.passes.sharding.factors import ONE, STRATEGIES, Factor, Factors, ShardingError
from dhelix.passes.sharding.sharding_plan import ShardingPlan
from dhelix.passes.sharding.states.state_axes import SplitAxes
from dhelix.runtime.sharding.state_plan import StatePlan, data_axes, mesh_of, sharding_plan

PARTIAL = Factors(Factor(4, 2), ONE, ONE, Factor(4))
TWO = {"node": 2, "gpu": 4}
ALL = ("node", "gpu")


@pytest.mark.parametrize(
    ("strategy", "parameters", "gradients", "optimizer"),
    [
        ("dp", (), (), ()),
        ("zero1", (), (), ("dp",)),
        ("zero2", (), ("dp",), ("dp",)),
        ("zero3", ("dp",), ("dp",), ("dp",)),
        ("fsdp", ("dp",), ("dp",), ("dp",)),
        ("mics", ("dp",), ("dp",), ("dp",)),  # of one axis, which counts as a node
        ("zero++", ("dp",), ("dp",), ("dp",)),
    ],
)
def test_strategies_on_the_axis_dp(strategy: str, parameters: Any, gradients: Any, optimizer: Any) -> None:
    found = sharding_plan(strategy).on({"dp": 4, "tp": 2})
    assert found == SplitAxes(("dp",), parameters, gradients, optimizer)


def test_every_strategy_has_a_test() -> None:
    assert set(STRATEGIES) == {"dp", "zero1", "zero2", "zero3", "fsdp", "mics", "zero++"}


def test_groups_of_mics_are_those_of_the_last_axis() -> None:
    assert sharding_plan("mics", axes=ALL).on(TWO) == SplitAxes(ALL, ("gpu",), ("gpu",), ("gpu",))
    assert sharding_plan("zero++", axes=ALL).on(TWO) == SplitAxes(ALL, ("gpu",), ALL, ALL)
    assert sharding_plan("zero1", axes=ALL).on(TWO) == SplitAxes(ALL, (), (), ALL)


def test_axes_of_one_device_split_nothing() -> None:
    """The step's results would lack them."""
    assert sharding_plan("zero3", axes=ALL).on({"node": 1, "gpu": 8}).optimizer == ("gpu",)
    assert sharding_plan("zero1").on({"dp": 1, "tp": 8}) == SplitAxes(("dp",))


def test_factors_are_carried_out_by_the_last_axes() -> None:
    factors = Factors(Factor(4, 2), ONE, Factor(4), Factor(4, 2))
    assert sharding_plan(factors, axes=ALL).on(TWO) == SplitAxes(ALL, (), ("gpu",), ALL)


def test_shares_lie_within_each_other() -> None:
    """The share that a device updates is a part of the share of the gradient and of the parameter that it holds."""
    assert SplitAxes(("a", "b", "c"), ("c",), ("b", "c"), ("a", "b", "c")).inside_out == ("c", "b", "a")
    assert SplitAxes(("a", "b"), (), (), ("a", "b")).inside_out == ("a", "b")


def test_what_a_plan_may_be(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    whole = Plan("llama-7b", sharding=ShardingPlan(PARTIAL))
    file.write_text(plan_files.dumps(whole))
    expected = StatePlan(PARTIAL, ALL)
    for one in (PARTIAL, expected, file, str(file), whole, whole.sharding):
        assert sharding_plan(one, axes=ALL) == expected
    assert sharding_plan(expected) == expected, "keeps its axes"
    assert sharding_plan(expected, axes="dp").axes == ("dp",)
    assert sharding_plan("zero1") == StatePlan("zero1", ("dp",)) == dhelix.sharding_plan("zero1")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: sharding_plan("zero3,embedding=zero1"),
            "in Python, write sharding=dhelix.sharding_plan('zero3', groups={'embedding': 'zero1'})",
        ),
        (lambda: sharding_plan("zero4"), "sharding='zero4' is neither a strategy (dp, zero1, zero2, zero3, fsdp, mics, "
                                         "zero++) nor a plan's file"),
        (lambda: sharding_plan(3), "3 says nothing about sharding; `dhelix shard --out plan.json` writes a plan"),
        (lambda: sharding_plan(Plan("llama-7b")), "says nothing about sharding"),
        (lambda: sharding_plan("zero1").on({"data": 4, "tp": 2}), "the mesh has no axis 'dp', only data, tp; say which "
         "axes are data-parallel: sharding_plan(..., axes=('data',))"),
        (lambda: sharding_plan(PARTIAL).on({"dp": 4}), "the plan is for 8 data-parallel devices (4x2), but the mesh "
         "axes dp have 4"),
        (lambda: sharding_plan(PARTIAL).on({"dp": 8}), "optimizer are sharded over 4 devices, which the last of the "
         "axes dp=8 do not have; split the axis: mesh_of(plan, tp=...) makes a mesh that fits"),
        (lambda: sharding_plan(PARTIAL, axes=("a", "b")).on({"dp": 4}), "the plan is for 8 data-parallel devices "
         "(4x2), but the mesh has 4; make a plan for these devices"),
        (lambda: sharding_plan(PARTIAL, axes=("a", "b")).on({"dp": 8}), "the plan is for the mesh axes a, b, but the "
         "mesh has dp: mesh_of(plan, tp=...) makes a mesh that fits"),
        (lambda: sharding_plan(PARTIAL, axes=("gpu", "node")).on(TWO), "the last of the axes gpu=4 x node=2"),
        (lambda: mesh_of("zero1", tp=3), "8 devices are not divisible by {'tp': 3}"),
        (lambda: mesh_of(Factors(Factor(16))), "the plan is for 16 data-parallel devices (16x1), but there are 8"),
        (lambda: mesh_of(PARTIAL, group=4), "a group is for a strategy, such as zero1; the plan's factors say"),
        (lambda: mesh_of("zero++"), '"zero++" needs the number of devices that hold one copy'),
        (lambda: mesh_of("mics"), '"mics" needs the number of devices that hold one copy: mesh_of("mics", group=4)'),
        (lambda: mesh_of(PARTIAL, tp=2), "the plan is for 8 data-parallel devices (4x2), but there are 4"),
    ],
)  # fmt: skip
def test_mistakes_are_explained(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ShardingError, match=re.escape(said)):
        make()


@pytest.mark.parametrize(
    ("plan", "others", "axes", "split"),
    [
        ("zero1", {}, {"dp": 8}, SplitAxes(("dp",), (), (), ("dp",))),
        ("zero2", {"tp": 2}, {"dp": 4, "tp": 2}, SplitAxes(("dp",), (), ("dp",), ("dp",))),
        ("dp", {"tp": 4}, {"dp": 2, "tp": 4}, SplitAxes(("dp",))),
        (PARTIAL, {}, {"dp_1": 2, "dp_0": 4}, SplitAxes(("dp_1", "dp_0"), (), (), ("dp_0",))),
        (
            Factors(Factor(4), ONE, Factor(2), Factor(2)), {"tp": 2}, {"dp_1": 2, "dp_0": 2, "tp": 2},
            SplitAxes(("dp_1", "dp_0"), (), ("dp_0",), ("dp_0",)),
        ),
        (
            Factors(Factor(8), Factor(2), Factor(4), Factor(4)), {}, {"dp_2": 2, "dp_1": 2, "dp_0": 2},
            SplitAxes(("dp_2", "dp_1", "dp_0"), ("dp_0",), ("dp_1", "dp_0"), ("dp_1", "dp_0")),
        ),
        (Factors(ONE), {"tp": 8}, {"dp": 1, "tp": 8}, SplitAxes(("dp",))),
    ],
)  # fmt: skip
def test_meshes_fit_their_plans(plan: Any, others: dict[str, Any], axes: dict[str, int], split: SplitAxes) -> None:
    mesh, made = mesh_of(plan, **others)
    assert dict(mesh.shape) == axes
    found = made.on(mesh.shape)
    assert (found.parameters, found.gradients) == (split.parameters, split.gradients)
    assert set(found.optimizer) == set(split.optimizer) and found.data == split.data


def test_neighbours_share_the_last_data_parallel_axis() -> None:
    devices = jax.devices("cpu")[::-1]
    mesh, _ = mesh_of(PARTIAL, devices)
    assert list(mesh.devices[0]) == devices[:4]


def test_a_strategy_may_be_for_a_part_of_the_devices() -> None:
    mesh, plan = mesh_of("zero1", group=2, tp=2)
    assert dict(mesh.shape) == {"dp_1": 2, "dp_0": 2, "tp": 2}
    assert plan == StatePlan(Factors(Factor(4), ONE, ONE, Factor(2)), ("dp_1", "dp_0"))


def test_a_plan_splits_the_devices_that_a_model_has_for_data_parallelism() -> None:
    assert data_axes("zero1", 8) == ({"dp": 8}, StatePlan(Factors.named("zero1", Factor(8)), ("dp",)))
    assert data_axes(PARTIAL, 8) == ({"dp_1": 2, "dp_0": 4}, StatePlan(PARTIAL, ("dp_1", "dp_0")))
