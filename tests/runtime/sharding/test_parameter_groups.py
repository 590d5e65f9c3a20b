"""Names of groups: what they match, and one error for a name that matches nothing."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from dhelix.passes.sharding.factors import Factor, Factors, ShardingError
from dhelix.runtime.sharding.parameter_groups import LeafPath, group_numbers, matches, paths_of
from dhelix.runtime.sharding.placed_states import shard_state
from dhelix.runtime.sharding.state_plan import mesh_of, sharding_plan
from dhelix.tests.quick import slow_after
from dhelix.tests.runtime.sharding.training import Case, mesh


@pytest.mark.parametrize(
    ("name", "path", "expected"),
    [
        ("embedding", "0/embedding", True),
        ("embedding", "1/0/mu/embedding/table", True),
        ("embedding", "0/embeddings", False),
        ("embed*", "0/embeddings", True),
        ("layers/*norm", "0/layers/attention_norm", True),
        ("layers/*norm", "0/layers/attention/norm", False),
        ("layers/[01]/w", "0/layers/1/w", True),
        ("layers/w", "w", False),
    ],
)
def test_a_name_matches_parts_of_a_path_that_are_next_to_each_other(name: str, path: str, expected: bool) -> None:
    assert matches(name, path) is expected


def test_the_first_name_that_matches_counts() -> None:
    paths = paths_of({"a": {"b": 1, "c": [2]}, "d": 3})
    assert [path.text for path in paths] == ["a/b", "a/c/0", "d"] and paths_of(4) == [LeafPath("")]
    assert group_numbers(["b", "a"], paths) == [0, 1, None]


@pytest.mark.parametrize("name", ["lora", "state/lora", "lora/a", "a"])
def test_optimizer_states_follow_their_parameter(name: str) -> None:
    """Also those of an optimizer that knows only a part of the parameters. An array beside them is not one of them."""
    lora = {"a": np.ones((8, 8)), "b": {"a": np.ones(8)}}
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adam)(1e-3))
    state = {"state": {"lora": lora, "base": {"w": np.ones(8)}}, "opt": inner.init(lora)}
    paths = paths_of(state)
    assert [path.text for path in paths] == [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(state)
    ]
    numbers = dict(zip([path.text for path in paths], group_numbers([name], paths), strict=True))
    moments = [text for text in numbers if "/mu/" in text or "/nu/" in text]
    assert len(moments) == 4 and numbers["opt/1/inner_state/0/mu/a"] == 0
    assert all(numbers[text] == numbers[f"state/lora/{text.split('u/')[-1]}"] for text in moments)
    assert numbers["state/base/w"] is None


class TrainState(NamedTuple):
    params: Any
    opt: Any


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_train_state_may_be_a_named_tuple(wrapped: bool) -> None:
    """Its parameters are told from what the named tuples of the optimizer hold."""
    params = {"a": {"w": np.ones(8)}, "b": {"w": np.ones(8)}}
    optimizer = optax.MultiSteps(optax.adam(1e-3), 2)
    state = TrainState(params, optimizer.init(params))
    paths = paths_of(((state, np.ones(8)), {}) if wrapped else state)
    ours = [path.text for path, n in zip(paths, group_numbers(["params/a"], paths), strict=True) if n == 0]
    fields = ("params", "opt/inner_opt_state/0/mu", "opt/inner_opt_state/0/nu", "opt/acc_grads")
    assert ours == [f"{'0/0/' if wrapped else ''}{field}/a/w" for field in fields]
    with pytest.raises(ShardingError, match="group 'opt' matches no path of a parameter"):
        group_numbers(["opt"], paths)


def test_parameters_that_end_alike_are_no_moments_of_each_other() -> None:
    paths = paths_of({"layers": [{"w": 1}, {"w": 2}], "opt": optax.sgd(0.1).init({"w": 1})})
    assert group_numbers(["layers/0"], paths) == [0, None]


def test_arrays_are_placed_by_their_group() -> None:
    on, plan = mesh_of(sharding_plan("zero1", groups={"layers/bias": "dp", "head": "mics"}), group=4)
    assert dict(on.shape) == {"dp_1": 2, "dp_0": 4}
    everywhere = sharding_plan(Factors.named("zero1", Factor(8)), plan.axes, dict(plan.groups))
    state = shard_state(Case(on, plan.axes).state(), everywhere)
    moments = jax.tree.leaves(state["optimizer"], is_leaf=lambda leaf: isinstance(leaf, dict))
    for tree in [state["params"], *(one for one in moments if isinstance(one, dict))]:
        assert tree["layers"]["bias"].sharding.spec == P()
        assert tree["layers"]["up"].sharding.spec == P(None, ("dp_1", "dp_0"))
        assert tree["head"].sharding.spec == P("dp_0")


@pytest.mark.parametrize(
    ("groups", "said"),
    slow_after(
        3,
        [
            (
                {"embeding": "dp"},
                "group 'embeding' matches no path of a parameter: params/gain, params/head, ",
            ),
            ({"layers/*": "dp", "layers/up": "zero2"}, "the group 'layers/*' before it matches the same paths"),
            ({"optimizer": "dp"}, "group 'optimizer' matches no path of a parameter: params/gain, "),
            ({"count": "dp"}, "group 'count' matches no path of a parameter: params/gain, "),
            (
                {"params": "dp"},
                "the groups of the plan keep all parameters whole, and leave none that zero1 could split",
            ),
            ({"*": "dp"}, "the groups of the plan keep all parameters whole, and leave none that zero1 could split"),
            ({"0": "dp"}, "group '0' begins with a number, which arguments of a step have as well"),
            ({"mu": "zero2"}, "group 'mu' matches no path of a parameter: params/gain, "),
            ({"head": "zero9"}, "group 'head': 'zero9' is neither a strategy (dp, zero1, "),
            ({"/head": "dp"}, "group '/head' has no name"),
            (["head"], "groups=['head'] maps no names to strategies"),
            (
                {"odd": "zero1"},
                "no array of group 'odd' has a dimension that divides into 8 shards (the largest is [3])",
            ),
            ({"head": Factors(Factor(4))}, "group 'head': the plan is for 4 data-parallel devices"),
        ],
        several=True,
    ),
)
def test_groups_that_cannot_be_are_one_error(groups: Any, said: str) -> None:
    with pytest.raises(ShardingError, match=re.escape(said)):
        shard_state(Case(mesh(dp=8)).state(), sharding_plan("zero1", groups=groups))


def test_a_group_may_have_a_strategy_of_a_part_where_the_others_have_factors() -> None:
    on, plan = mesh_of(sharding_plan(Factors.named("zero1", Factor(8)), groups={"head": "mics"}), group=4)
    assert dict(on.shape) == {"dp_1": 2, "dp_0": 4}
    assert plan.on(on.shape).optimizer == ("dp_1", "dp_0") and plan.of_groups(on.shape)[0].parameters == ("dp_0",)


def test_no_mesh_has_parts_of_two_and_of_three_devices() -> None:
    twos, threes = (Factors.named("zero1", Factor(6), Factor(size)) for size in (2, 3))
    with pytest.raises(ShardingError, match="no mesh axes have parts of 2 and of 3 devices at once"):
        mesh_of(sharding_plan(twos, groups={"head": threes}), jax.devices()[:6])


def test_arrays_of_another_mesh_may_be_placed() -> None:
    on, plan = mesh_of("zero1", group=4)
    before = Case(mesh(dp=8)).state()
    after = shard_state(shard_state(before, "zero3"), plan, on)
    jax.tree.map(np.testing.assert_array_equal, before, after)
