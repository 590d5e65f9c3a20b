"""Sharded states of a shard_map: it gathers parameters and reduce-scatters gradients itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dhelix.passes.analysis.collectives import device_groups
from dhelix.passes.communication.gradient_reduction import GradientReduction
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.hlo.edit import inline_calls
from dhelix.passes.hlo.manual_computation import manual_computations
from dhelix.runtime.compiler import lowering
from dhelix.tests.passes.sharding.states import programs
from dhelix.tests.passes.sharding.states.programs import LAYERS, WIDTH

STACK = [LAYERS, WIDTH, WIDTH]
ROWS = P(None, "dp")
type Sum = Callable[[jax.Array], jax.Array]


def mean(gradient: jax.Array) -> jax.Array:
    return lax.pmean(gradient, ("dp",))


def program(
    on: Mesh, spec: P = ROWS, over: Sum = mean, rows: Any = "dp"
) -> tuple[jax.stages.Lowered, tuple[jax.Array, ...]]:
    """A step whose shard_map computes the gradients, and its arguments. `spec` splits the states."""

    def local(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(programs.stack, argnums=1)(x, w)
        return lax.psum(value, rows), over(gradient)

    def step(w: jax.Array, m: jax.Array, x: jax.Array) -> Any:
        mapped = jax.shard_map(local, mesh=on, in_specs=(P(), P(rows)), out_specs=P(), check_vma=False)
        value, gradient = mapped(w, x)
        return *programs.momentum(w, m, gradient), value

    state = programs.placed(on, spec, *STACK), programs.placed(on, spec, *STACK, seed=1)
    given = *state, programs.placed(on, P(rows), 8, WIDTH, seed=2)
    return jax.jit(step).lower(*given), given


def inside(lowered: jax.stages.Lowered, opcode: str) -> list[list[int]]:
    """The sizes of the stacks among the results of collectives."""
    return [size for size in programs.sizes(lowered, opcode) if size]


def groups_of(collective: Instruction) -> list[list[int]]:
    return [list(group) for group in device_groups(collective)]


@pytest.mark.parametrize(
    ("spec", "shard"),
    [(P(None, "dp"), [LAYERS, WIDTH // 8, WIDTH]), (P(None, None, "dp"), [LAYERS, WIDTH, WIDTH // 8])],
    ids=["rows", "columns"],
)
def test_it_gathers_parameters_and_reduce_scatters_gradients(spec: P, shard: list[int]) -> None:
    before, given = program(programs.mesh(dp=8), spec)
    after, report = programs.changed(before, programs.state_sharding())
    assert (inside(before, "all-reduce"), inside(before, "reduce-scatter")) == ([STACK], [])
    assert inside(after, "all-gather") == [STACK] and inside(after, "reduce-scatter") == [shard]
    assert inside(after, "all-reduce") == []
    assert (report.notes[0].facts["states"], report.notes[0].facts["parameters"]) == (2, 1)
    programs.same(before.compile()(*given), after.compile()(*given), 1e-6)


def test_outside_nothing_gathers() -> None:
    """The shard_map's edges say that it takes and returns shards, and no constraint gathers the parameter."""
    after, _ = programs.changed(program(programs.mesh(dp=8))[0], programs.state_sharding())
    module = programs.module(after)
    (manual,) = manual_computations(module.entry)
    for edge, attribute in ((manual.to_local, "in"), (manual.to_global, "out")):
        assert edge is not None
        assert '[{}, {"dp"}, {}]' in edge.proto.frontend_attributes.map[f"xla.sdy.{attribute}_shardings"]
    assert manual.to_local is not None
    assert [o.opcode for o in manual.to_local.operands] == ["parameter", "parameter"]
    compiled = programs.partitioned(after).computations
    assert sum(i.opcode == "all-gather" for c in compiled for i in c.instructions) == 1


@pytest.mark.parametrize("inner", [2, 4])
def test_over_copies_the_shards_are_all_reduced(inner: int) -> None:
    """MiCS: a reduce-scatter within a group that holds one copy, and an all-reduce of shards over the copies."""
    both = ("copy", "shard")
    before, given = program(
        programs.mesh(copy=8 // inner, shard=inner), P(None, "shard"), lambda g: lax.pmean(g, both), both
    )
    after, _ = programs.changed(before, programs.state_sharding(both, optimizer=("shard",)))
    shard = [LAYERS, WIDTH // inner, WIDTH]
    assert inside(after, "reduce-scatter") == inside(after, "all-reduce") == [shard]
    (scatter,), (gather,) = (programs.instructions(after, o) for o in ("reduce-scatter", "all-gather"))
    groups = [groups_of(i) for i in (scatter, gather)]
    assert groups[0] == groups[1] == [[n + k for k in range(inner)] for n in range(0, 8, inner)]
    (total,) = [i for i in programs.instructions(after, "all-reduce") if list(i.shape.dimensions) == shard]
    assert groups_of(total) == [list(range(n, 8, inner)) for n in range(inner)]
    assert len({i.proto.channel_id for i in (scatter, gather, total)}) == 3
    programs.same(before.compile()(*given), after.compile()(*given), 1e-6)


def test_devices_of_a_group_are_in_the_order_of_the_axes_that_split() -> None:
    """The state is split over the minor axis first, so neighbouring parts are on devices far apart."""
    both = ("a", "b")
    before, given = program(programs.mesh(a=2, b=4), P(None, ("b", "a")), lambda g: lax.pmean(g, both), both)
    after, _ = programs.changed(before, programs.state_sharding(both))
    (gather,) = programs.instructions(after, "all-gather")
    assert groups_of(gather) == [[0, 4, 1, 5, 2, 6, 3, 7]]
    programs.same(before.compile()(*given), after.compile()(*given), 1e-6)


def test_scaling_by_a_number_happens_on_shards() -> None:
    before, given = program(programs.mesh(dp=8), over=lambda g: lax.psum(g, "dp") * 0.25 / 3.0)
    after, _ = programs.changed(before, programs.state_sharding())
    assert inside(after, "reduce-scatter") == [[LAYERS, WIDTH // 8, WIDTH]]
    programs.same(before.compile()(*given), after.compile()(*given), 1e-6)


@pytest.mark.parametrize(
    "over",
    [
        lambda g: g + mean(g) - g,
        lambda g: mean(g) * jnp.arange(WIDTH, dtype=g.dtype),
        lambda g: lax.all_gather(g, "dp").sum(0),
    ],
    ids=["added to another", "scaled by element", "no all-reduce"],
)
def test_what_is_no_scaled_sum_leaves_whole(over: Sum) -> None:
    before, given = program(programs.mesh(dp=8), over=over)
    after, _ = programs.changed(before, programs.state_sharding())
    assert inside(after, "reduce-scatter") == [] and STACK in inside(after, "all-gather")
    programs.same(before.compile()(*given), after.compile()(*given), 1e-5)


def test_a_sum_over_fewer_devices_than_the_shards_leaves_whole() -> None:
    both = ("a", "b")
    before, given = program(programs.mesh(a=2, b=4), P(None, both), lambda g: lax.pmean(g, "a"), "a")
    after, _ = programs.changed(before, programs.state_sharding(both))
    assert inside(after, "reduce-scatter") == [] and inside(after, "all-reduce") == [STACK]
    programs.same(before.compile()(*given), after.compile()(*given), 1e-6)


def test_over_the_axes_of_parameters_layers_are_gathered_and_over_the_others_the_stack() -> None:
    """Three factors: each group of 2 devices holds a copy of the parameters, and each group of 4 one of gradients."""
    every = ("copy", "half", "pair")
    on, spec = programs.mesh(copy=2, half=2, pair=2), P(None, ("pair", "half", "copy"))
    before, given = program(on, spec, lambda g: lax.pmean(g, every), every)
    one = programs.state_sharding(every, parameters=("pair",), gradients=("half", "pair"))
    after, _ = programs.changed(before, one)
    gathers, scatters = (programs.instructions(after, o) for o in ("all-gather", "reduce-scatter"))
    at = {len(groups_of(i)[0]): list(i.shape.dimensions) for i in gathers}
    assert at == {2: [WIDTH, WIDTH], 4: [LAYERS, WIDTH // 2, WIDTH]} and len(gathers) == 3
    at = {len(groups_of(i)[0]): list(i.shape.dimensions) for i in scatters}
    assert at == {4: [1, WIDTH // 4, WIDTH], 2: [LAYERS, WIDTH // 8, WIDTH]} and len(scatters) == 2
    channels = [i.proto.channel_id for i in (*gathers, *scatters)]
    assert len(set(channels)) == len(channels)
    programs.same(before.compile()(*given), after.compile()(*given), 1e-6)


def without_calls(lowered: jax.stages.Lowered) -> jax.stages.Lowered:
    """The program as strand duplication leaves it: no calls within loops."""
    module = HloModule.from_bytes(lowering.hlo_bytes(lowered))
    for loop in [i for c in module.computations for i in c.instructions if i.opcode == "while"]:
        inline_calls(loop.called[0])
    return lowering.with_hlo(lowered, module.to_bytes())


@pytest.mark.parametrize("mics", [False, True], ids=["all", "copies"])
def test_gradients_are_reduce_scattered_layer_by_layer(mics: bool) -> None:
    """All bits are those of one reduce-scatter of the stack."""
    both = ("copy", "shard")
    on, spec = programs.mesh(copy=2, shard=4), P(None, "shard") if mics else P(None, both)
    lowered, given = program(on, spec, lambda g: lax.pmean(g, both), both)
    one = programs.state_sharding(both, optimizer=("shard",) if mics else both)
    sharded = without_calls(programs.changed(lowered, one)[0])
    after, report = programs.changed(sharded, GradientReduction(least=0))
    assert [note.message for note in report.notes] == ["gradients reduced layer by layer"]
    slot = [1, WIDTH // (4 if mics else 8), WIDTH]
    assert inside(after, "reduce-scatter") == [slot] * 2, "in the loop, and the last one behind it"
    programs.same(sharded.compile()(*given), after.compile()(*given))


def test_small_gradients_are_reduce_scattered_at_once() -> None:
    size = 4 * WIDTH * WIDTH
    sharded = without_calls(programs.changed(program(programs.mesh(dp=8))[0], programs.state_sharding())[0])
    assert programs.changed(sharded, GradientReduction(least=size + 1))[1].outcome == "unchanged"
    assert programs.changed(sharded, GradientReduction(least=size))[1].outcome == "changed"


def test_stacks_that_are_split_along_layers_are_reduce_scattered_at_once() -> None:
    lowered, _ = program(programs.mesh(shard=4, copy=2), P("shard"), lambda g: lax.pmean(g, "shard"), "shard")
    sharded = without_calls(programs.changed(lowered, programs.state_sharding(("shard",)))[0])
    assert inside(sharded, "reduce-scatter") == [[1, WIDTH, WIDTH]]
    assert programs.changed(sharded, GradientReduction(least=0))[1].outcome == "unchanged"
