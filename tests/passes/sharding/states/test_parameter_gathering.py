"""Parameters gathered layer by layer: the same numbers, and only where the first reader is a loop over layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from dhelix.passes.framework.report import CHANGED, UNCHANGED, PassReport
from dhelix.passes.hlo import Instruction
from dhelix.passes.hlo.constraints import is_sharding_constraint, stated
from dhelix.passes.sharding.states.parameter_gathering import ParameterGathering
from dhelix.tests.passes.sharding.states import programs
from dhelix.tests.passes.sharding.states.programs import LAYERS, WIDTH

ANY = ParameterGathering(least=0)
SLOT = [1, WIDTH, WIDTH]
ROWS = P(None, "dp")
type Loss = Callable[[jax.Array, jax.Array], jax.Array]


def program(
    loss: Loss = programs.stack, manual: bool = False, batches: int = 0, spec: P = ROWS, layers: int = LAYERS
) -> tuple[jax.stages.Lowered, tuple[jax.Array, ...]]:
    """A step with sharded states. With `batches`, a scan over micro-batches computes gradients."""
    on = programs.mesh(dp=4, tp=2)

    def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
        if not batches:
            return jax.grad(loss, argnums=1)(x, w)
        add = lambda total, x: (total + jax.grad(loss, argnums=1)(x, w), None)  # noqa: E731
        return lax.scan(add, jnp.zeros_like(w), x)[0]

    def local(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.psum(gradient(w, x), "dp")

    rows = P(None, "dp") if batches else P("dp")

    def step(w: jax.Array, m: jax.Array, x: jax.Array) -> Any:
        mapped = jax.shard_map(local, mesh=on, in_specs=(P(), rows), out_specs=P(), check_vma=False)
        return programs.momentum(w, m, (mapped if manual else gradient)(w, x))

    state = [programs.placed(on, spec, layers, WIDTH, WIDTH, seed=n) for n in range(2)]
    given = *state, programs.placed(on, rows, *[batches] * bool(batches), 8, WIDTH, seed=2)
    sharded, _ = programs.changed(jax.jit(step).lower(*given), programs.state_sharding())
    return sharded, given


def gathered(lowered: jax.stages.Lowered, one: ParameterGathering = ANY) -> tuple[jax.stages.Lowered, PassReport]:
    return programs.changed(lowered, one)


def gathers(lowered: jax.stages.Lowered, manual: bool) -> list[Instruction]:
    """All instructions that gather a layer's parameter."""
    if manual:
        return [i for i in programs.instructions(lowered, "all-gather") if list(i.shape.dimensions) == SLOT]
    found = [i for i in programs.instructions(lowered, "custom-call") if is_sharding_constraint(i)]
    return [i for i in found if list(i.shape.dimensions) == SLOT and (split := stated(i)) and not any(split.axes)]


def loops(lowered: jax.stages.Lowered) -> int:
    return len(programs.instructions(lowered, "while"))


def backwards(x: jax.Array, w: jax.Array) -> jax.Array:
    """A loop that reads the last layer first."""
    return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w, reverse=True)[0])


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "shard_map"])
@pytest.mark.parametrize("loss", [programs.stack, backwards], ids=["forwards", "backwards"])
@pytest.mark.parametrize("layers", [2, LAYERS])
def test_each_layer_is_gathered_before_the_one_ahead_of_it_runs(loss: Loss, layers: int, manual: bool) -> None:
    lowered, given = program(loss, manual, layers=layers)
    after, report = gathered(lowered)
    assert [note.message for note in report.notes] == ["parameters gathered layer by layer"]
    found = gathers(after, manual)
    assert len(found) == min(layers, 3), "the first two before the loop, and the others in it"
    bodies = {loop.called[0] for loop in programs.instructions(after, "while")}
    assert [i.computation.name in {b.name for b in bodies} for i in found].count(True) == 1
    assert loops(after) == loops(lowered) + 1, "the last iteration is a loop of its own, and the first one none"
    # XLA puts a loop of one iteration into its surroundings, where products round differently.
    programs.same(lowered.compile()(*given), after.compile()(*given), 1e-6)


def test_the_whole_stack_is_gathered_nowhere() -> None:
    after, _ = gathered(program(manual=True)[0])
    assert programs.sizes(after, "all-gather") == [SLOT] * 3
    automatic = programs.partitioned(gathered(program()[0])[0])
    sizes = [
        list(i.shape.dimensions) for c in automatic.computations for i in c.instructions if i.opcode == "all-gather"
    ]
    assert [LAYERS, WIDTH, WIDTH] not in sizes and sizes.count(SLOT) == 3


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "shard_map"])
def test_a_loop_over_one_micro_batch_is_replaced_by_its_body(manual: bool) -> None:
    lowered, given = program(manual=manual, batches=1)
    after, report = gathered(lowered)
    assert report.outcome == CHANGED and len(gathers(after, manual)) == 3
    assert loops(after) == loops(lowered) - 1 + 1, "without the loop over micro-batches; the last layer's is added"
    programs.same(lowered.compile()(*given), after.compile()(*given), 1e-6)


def test_a_loop_over_several_micro_batches_reads_the_gathered_stack() -> None:
    """Each micro-batch would gather again, so the stack is gathered once, before the loop."""
    after, report = gathered(program(manual=True, batches=2)[0])
    assert report.outcome == UNCHANGED and programs.sizes(after, "all-gather") == [[LAYERS, WIDTH, WIDTH]]


def read_before(x: jax.Array, w: jax.Array) -> jax.Array:
    return programs.stack(x @ w[1], w)


def first_layer_twice(x: jax.Array, w: jax.Array) -> jax.Array:
    """A loop that reads the first layer in each iteration, too."""
    return jnp.sum(lax.scan(lambda x, one: (jnp.tanh(x @ one @ w[0]), None), x, w)[0])


def every_second(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(lax.fori_loop(0, LAYERS // 2, lambda n, x: jnp.tanh(x @ w[2 * n]), x))


def two_in_each(x: jax.Array, w: jax.Array) -> jax.Array:
    pairs = w.reshape(LAYERS // 2, 2, WIDTH, WIDTH)
    return jnp.sum(lax.scan(lambda x, two: (jnp.tanh(x @ two[0] @ two[1]), None), x, pairs)[0])


@pytest.mark.parametrize(
    "loss", [read_before, first_layer_twice, every_second, two_in_each], ids=lambda loss: loss.__name__
)
def test_what_another_reader_needs_first_is_gathered_at_once(loss: Loss) -> None:
    after, report = gathered(program(loss, manual=True)[0])
    assert report.outcome == UNCHANGED and programs.sizes(after, "all-gather") == [[LAYERS, WIDTH, WIDTH]]


def test_small_layers_stay() -> None:
    lowered, _ = program(manual=True)
    size = 4 * WIDTH * WIDTH
    assert gathered(lowered, ParameterGathering(least=size + 1))[1].outcome == UNCHANGED
    assert gathered(lowered, ParameterGathering(least=size))[1].outcome == CHANGED


def test_layers_that_are_split_among_devices_stay() -> None:
    """A stack that is split along its layers has no layer that all devices hold a share of."""
    lowered, _ = program(manual=True, spec=P("dp"))
    assert gathered(lowered)[1].outcome == UNCHANGED
