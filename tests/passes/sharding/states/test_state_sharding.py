"""Sharded states under automatic sharding: which values get constraints, and which steps are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError
from dhelix.passes.hlo.constraints import is_sharding_constraint, stated
from dhelix.passes.sharding.states.state_axes import SplitAxes, StateGroup
from dhelix.tests.passes.sharding.states import programs
from dhelix.tests.passes.sharding.states.programs import LAYERS, WIDTH

ROWS = P(None, "dp")
WHOLE, SPLIT = ((), (), ()), ((), ("dp",), ())
EXPECTED = {
    WHOLE: 1,  # the parameter that the model reads
    SPLIT: 3,  # the gradient that the update reads, and the new states
}


def step(w: jax.Array, m: jax.Array, x: jax.Array) -> Any:
    gradient = jax.grad(programs.stack, argnums=1)(x, w)
    return *programs.momentum(w, m, gradient), jnp.sum(gradient * gradient)


def arguments(spec: P = ROWS, **axes: int) -> tuple[jax.Array, ...]:
    on = programs.mesh(**(axes or {"dp": 8}))
    size = LAYERS, WIDTH, WIDTH
    state = programs.placed(on, spec, *size), programs.placed(on, spec, *size, seed=1)
    return *state, programs.placed(on, P("dp"), 8, WIDTH, seed=2)


def test_gradients_new_states_and_gathered_parameters_are_constrained() -> None:
    lowered = jax.jit(step).lower(*arguments())
    after, report = programs.changed(lowered, programs.state_sharding())
    assert not programs.constraints(lowered)
    assert programs.constraints(after) == EXPECTED
    (note,) = report.notes
    assert {k: note.facts[k] for k in ("states", "parameters", "gradients")} == {
        "states": 2, "parameters": 1, "gradients": 1,
    }  # fmt: skip


def test_a_constraint_changes_no_value_and_states_stay_where_they_are() -> None:
    given: Any = arguments()
    lowered = jax.jit(step).lower(*given)
    after, _ = programs.changed(lowered, programs.state_sharding())
    found = after.compile()(*given)
    whole = [jax.device_put(a, NamedSharding(a.sharding.mesh, P())) for a in given[:2]]
    programs.same(jax.jit(step)(*whole, given[2]), found, 1e-5)  # sums over devices associate differently
    assert all(new.sharding.is_equivalent_to(old.sharding, 3) for new, old in zip(found[:2], given[:2], strict=True))


def test_only_the_parameter_is_gathered() -> None:
    after, _ = programs.changed(jax.jit(step).lower(*arguments()), programs.state_sharding())
    compiled = programs.partitioned(after)
    gathers = [i for c in compiled.computations for i in c.instructions if i.opcode == "all-gather"]
    assert [i.shape.dimensions[:] for i in gathers] == [[LAYERS, WIDTH, WIDTH]]


def test_a_value_that_also_something_else_reads_is_split_for_all() -> None:
    """The norm of the gradient is then a sum over shards, and no device holds the whole gradient."""
    after, _ = programs.changed(jax.jit(step).lower(*arguments()), programs.state_sharding())
    entry = programs.module(after).entry
    users = entry.users()
    split = next(i for i in entry.instructions if is_sharding_constraint(i) and i.operands[0].opcode != "parameter")
    assert split.operands[0].opcode == "get-tuple-element" and users[split.operands[0]] == [split]
    assert [user.opcode for user in users[split]] == ["multiply"] * 2, "the update, and the square"


def test_parameters_that_stay_split_are_not_gathered_by_a_constraint() -> None:
    every = {"parameters": ("dp",), "gradients": ("dp",)}
    after, _ = programs.changed(jax.jit(step).lower(*arguments()), programs.state_sharding(**every))
    assert WHOLE not in programs.constraints(after)


def test_other_axes_stay() -> None:
    """A gathered parameter is still split over "tp"."""
    lowered = jax.jit(step).lower(*arguments(P(None, "dp", "tp"), dp=4, tp=2))
    after, _ = programs.changed(lowered, programs.state_sharding())
    found = programs.constraints(after)
    assert found == {((), (), ("tp",)): 1, ((), ("dp",), ("tp",)): 3}


def test_a_parameter_stays_split_over_the_axes_of_its_factor() -> None:
    given = arguments(P(None, ("inner", "dp")), dp=4, inner=2)
    one = programs.state_sharding(("dp", "inner"), parameters=("inner",), gradients=("inner",))
    after, _ = programs.changed(jax.jit(step).lower(*given), one)
    found = programs.constraints(after)
    assert found[(), ("inner",), ()] == 1 and found[(), ("inner", "dp"), ()] == 3


def test_a_batch_is_no_state() -> None:
    """Neither a batch, nor a result that is computed from a batch alone, gets a constraint."""

    def with_residuals(w: jax.Array, m: jax.Array, x: jax.Array) -> Any:
        return step(w, m, x), x @ jnp.ones((WIDTH, WIDTH))

    after, report = programs.changed(jax.jit(with_residuals).lower(*arguments()), programs.state_sharding())
    assert programs.constraints(after) == EXPECTED
    assert report.notes[0].facts["states"] == 2


def test_accumulators_of_micro_batches_are_split_as_gradients_are() -> None:
    def accumulated(w: jax.Array, m: jax.Array, xs: jax.Array) -> Any:
        def add(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.grad(programs.stack, argnums=1)(x, w), None

        return programs.momentum(w, m, lax.scan(add, jnp.zeros_like(w), xs)[0])

    w, m, _ = arguments()
    xs = programs.placed(programs.mesh(dp=8), P(None, "dp"), 2, 8, WIDTH)

    def splits_inside(**axes: Any) -> list[Any]:
        after, _ = programs.changed(jax.jit(accumulated).lower(w, m, xs), programs.state_sharding(**axes))
        module = programs.module(after)
        inside = [i for c in module.computations if c is not module.entry for i in c.instructions]
        return [found.over for i in inside if is_sharding_constraint(i) and (found := stated(i))]

    assert splits_inside() == []
    assert splits_inside(gradients=("dp",)) == [[(), ("dp",), ()]]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (P(), "no state is split over dp: place it with dhelix.shard_state(state, plan)"),
        (P(None, ("dp", "other")), "the state is split over dp, other, but this plan splits it over dp; place it"),
    ],
    ids=["not placed", "another plan"],
)  # fmt: skip
def test_a_state_that_is_placed_otherwise_is_refused(spec: P, said: str) -> None:
    lowered = jax.jit(step).lower(*arguments(spec, other=2, dp=4))
    with pytest.raises(DhelixError, match=re.escape(said)):
        programs.changed(lowered, programs.state_sharding(("other", "dp"), optimizer=("dp",)))


def test_groups_that_tear_a_parameter_and_its_moment_apart_are_refused() -> None:
    whole = StateGroup("the parameter", SplitAxes(("dp",)), frozenset([0]))
    said = "w is in group the parameter, but m, which is updated together with it, in the others"
    with pytest.raises(DhelixError, match=said):
        programs.changed(jax.jit(step).lower(*arguments()), replace(programs.state_sharding(), groups=(whole,)))


def test_each_state_has_the_axes_of_its_group() -> None:
    """With two parameters, of which one stays split while the model reads it."""

    def both(w: jax.Array, v: jax.Array, x: jax.Array) -> Any:
        gw, gv = jax.grad(lambda w, v: programs.stack(x, w) + programs.stack(x, v), argnums=(0, 1))(w, v)
        return w - gw, v - gv

    group = StateGroup("v", SplitAxes(("dp",), ("dp",), ("dp",), ("dp",)), frozenset([1]))
    lowered = jax.jit(both).lower(*arguments())
    after, report = programs.changed(lowered, replace(programs.state_sharding(), groups=(group,)))
    gathered = [i for i in programs.module(after).entry.instructions if is_sharding_constraint(i)]
    gathered = [i for i in gathered if i.operands[0].opcode == "parameter"]
    assert sorted(i.operands[0].proto.parameter_number for i in gathered if not any(stated(i).axes)) == [0]
    assert [note.message.split(":")[0] for note in report.notes] == ["v", "the others"]
