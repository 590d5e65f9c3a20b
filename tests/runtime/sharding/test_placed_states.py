"""States in shards: the dimension that is split, round trips, other plans, and errors."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dhelix
from dhelix.passes.sharding.factors import ONE, Factor, Factors, ShardingError
from dhelix.runtime.sharding.placed_states import gather_state, shard_state, state_shardings
from dhelix.runtime.sharding.state_plan import mesh_of, sharding_plan
from dhelix.tests.runtime.sharding.training import Case, mesh

Tree = Any


def abstract(on: Mesh, spec: P, *size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(size, jnp.float32, sharding=NamedSharding(on, spec))


def specs(state: Tree, plan: Any = "zero1", on: Mesh | None = None) -> Tree:
    return jax.tree.map(lambda sharding: sharding.spec, state_shardings(state, plan, on))


@pytest.mark.parametrize(
    ("size", "spec", "expected"),
    [
        ((16, 8), P(), P("dp")),
        ((6, 8), P(), P(None, "dp")),  # 4 devices do not divide 6
        ((8, 8), P("tp"), P("tp", "dp")),  # prefers a dimension that "tp" does not split
        ((8, 3), P("tp"), P(("tp", "dp"))),
        ((4, 3), P("tp"), P("tp")),  # 2 rows on each device are too few
        ((3, 5), P(), P()),
        ((), P(), P()),
        ((4,), P(), P("dp")),
        ((8, 8), P("dp"), P("dp")),  # placed already
        ((8, 8), P(None, ("dp", "tp")), P("dp", "tp")),
    ],
)
def test_the_first_dimension_that_allows_it_is_split(size: tuple[int, ...], spec: P, expected: P) -> None:
    assert specs({"a": {"x": abstract(mesh(dp=4, tp=2), spec, *size)}})["a"]["x"] == expected


def test_stacks_are_not_split_along_their_layers() -> None:
    """Neither are the moments of stacked parameters. Arrays beside the stack are not part of it."""
    on = mesh(dp=4, tp=2)
    layers = {"w": abstract(on, P(None, None, "tp"), 8, 16, 16), "scale": abstract(on, P(), 8, 16)}
    params = {"layers": layers, "embedding": abstract(on, P(), 32, 16)}
    state = {"params": params, "optimizer": jax.eval_shape(optax.adam(1e-3).init, params)}
    found = specs(state, on=on)
    expected = {"layers": {"w": P(None, "dp", "tp"), "scale": P(None, "dp")}, "embedding": P("dp")}
    assert found["params"] == expected
    adam = found["optimizer"][0]
    assert adam.mu["layers"]["scale"] == P(None, "dp") and adam.mu["embedding"] == P("dp") and adam.count == P()


def test_layers_of_unrolled_models_are_no_stacks() -> None:
    on = mesh(dp=8)
    layer = {"w": abstract(on, P(), 8, 16), "scale": abstract(on, P(), 16)}
    found = specs({"layers": [layer, layer], "head": abstract(on, P(), 8, 16)})
    assert found == {"layers": [{"w": P("dp"), "scale": P("dp")}] * 2, "head": P("dp")}


def test_a_lone_matrix_pair_is_no_stack() -> None:
    on = mesh(dp=8)
    assert specs({"a": abstract(on, P(), 8, 16), "b": abstract(on, P(), 8, 8)}) == {"a": P("dp"), "b": P("dp")}


def test_what_all_axes_cannot_split_fewer_axes_do() -> None:
    """Eight devices do not divide 4 rows, but the axis of the parameters does."""
    factors = Factors(Factor(8), Factor(2), Factor(2), Factor(8))
    on, plan = mesh_of(factors)
    inner, outer = plan.axes[-1], plan.axes[:-1]
    found = specs({"x": abstract(on, P(), 4, 3), "y": abstract(on, P(), 16, 3)}, plan)
    assert found["x"] == P(inner)
    assert found["y"] == P((inner, *outer)), "the parameter's axis comes first"


@pytest.mark.parametrize("plan", ["dp", "zero1", "zero2", "zero3", "mics"])
@pytest.mark.parametrize("axes", [{"dp": 8}, {"dp": 4, "tp": 2}, {"dp": 1, "tp": 8}], ids=str)
def test_sharded_and_gathered_states_are_equal_in_all_bits(plan: str, axes: dict[str, int]) -> None:
    state = Case(mesh(**axes)).state()
    shards = shard_state(state, plan)
    again = gather_state(shards, plan)
    assert jax.tree.structure(again) == jax.tree.structure(state)

    def check(a: jax.Array, b: jax.Array, c: jax.Array) -> None:
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
        assert a.ndim == 0 or c.sharding.is_equivalent_to(a.sharding, a.ndim)

    jax.tree.map(check, state, shards, again)
    share = shards["params"]["layers"]["up"].addressable_shards[0].data.size
    parts = 1 if plan == "dp" else axes["dp"]
    assert share * parts == state["params"]["layers"]["up"].addressable_shards[0].data.size


def test_states_go_from_one_plan_to_another() -> None:
    state = Case(mesh(a=2, b=4), ("a", "b")).state()
    wide, narrow = sharding_plan("zero1", axes=("a", "b")), sharding_plan("mics", axes=("a", "b"))
    direct = shard_state(state, narrow)
    restored = jax.device_put(jax.tree.map(np.asarray, state), state_shardings(state, narrow))
    for found in (shard_state(shard_state(state, wide), narrow), restored):
        for a, b in zip(jax.tree.leaves(direct), jax.tree.leaves(found), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
            np.testing.assert_array_equal(a, b)


def test_abstract_states_and_arrays_on_no_mesh() -> None:
    on = mesh(dp=8)
    state: Any = {"w": np.ones((16, 4), np.float32)}
    assert specs(jax.eval_shape(lambda: state), "zero1", on) == {"w": P("dp")}
    assert shard_state(state, "zero1", on)["w"].sharding.spec == P("dp")


@pytest.mark.parametrize("function", [shard_state, gather_state, state_shardings, dhelix.shard_state])
def test_without_a_mesh_the_error_says_what_to_give(function: Any) -> None:
    said = "the state's arrays are on no mesh; give one after the plan: shard_state(state, plan, mesh)"
    with pytest.raises(ShardingError, match=re.escape(said)):
        function({"w": np.ones((8, 8))}, "zero1")


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    state = Case(mesh(dp=8)).state()
    with pytest.raises(ShardingError, match="the plan is for 4 data-parallel devices"):
        shard_state(state, Factors(Factor(4), ONE, ONE, Factor(4)))
    with pytest.raises(ShardingError, match="the plan is for the mesh axes replica, dp, but the mesh has dp"):
        gather_state(state, sharding_plan("mics", axes=("replica", "dp")))


def test_optimizer_states_of_the_model_are_placed_like_its_parameters() -> None:
    shards = shard_state(Case(mesh(dp=4, tp=2)).state(), "zero1")
    moments = [leaf for leaf in jax.tree.leaves(shards["optimizer"]) if leaf.ndim == 3]
    params = [leaf for leaf in jax.tree.leaves(shards["params"]) if leaf.ndim == 3]
    assert [m.sharding.spec for m in moments] == [p.sharding.spec for p in params] * 2
