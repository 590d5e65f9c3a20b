"""Steps that compute gradients of stacked layers in micro-batches: in a shard_map, or under automatic sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from dhelix.passes.hlo import Instruction
from dhelix.tests.passes.sharding.states import programs
from dhelix.tests.passes.sharding.states.programs import LAYERS, WIDTH

BATCHES = 2
STACK = [LAYERS, WIDTH, WIDTH]
ROWS = P(None, "dp")
ZERO3 = {"parameters": ("dp",), "gradients": ("dp",)}
type Loss = Callable[[jax.Array, jax.Array], jax.Array]
type Gradients = Callable[[Loss, jax.Array, jax.Array], jax.Array]


def in_groups(x: jax.Array, w: jax.Array) -> jax.Array:
    """Loops in loops, over a reshaped and transposed stack."""
    groups = w.reshape(2, LAYERS // 2, WIDTH, WIDTH).transpose(0, 1, 3, 2)
    layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
    return jnp.sum(lax.scan(lambda x, group: (lax.scan(layer, x, group)[0], None), x, groups)[0])


def summed(loss: Loss, w: jax.Array, xs: jax.Array) -> jax.Array:
    """The sum of the gradients of all micro-batches."""
    return lax.scan(lambda total, x: (total + jax.grad(loss, argnums=1)(x, w), None), jnp.zeros_like(w), xs)[0]


def at_once(loss: Loss, w: jax.Array, xs: jax.Array) -> jax.Array:
    return jax.grad(loss, argnums=1)(xs.reshape(-1, WIDTH), w)


def program(
    loss: Loss = programs.stack, gradients: Gradients = summed, spec: P = ROWS, manual: bool = True
) -> tuple[jax.stages.Lowered, tuple[jax.Array, ...]]:
    """A lowered step and its arguments. `spec` splits the states."""
    on = programs.mesh(dp=8)

    def local(w: jax.Array, xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.psum(gradients(loss, w, xs), "dp"), lax.psum(jnp.sum(xs), "dp")

    def step(w: jax.Array, m: jax.Array, xs: jax.Array) -> Any:
        mapped = jax.shard_map(local, mesh=on, in_specs=(P(), ROWS), out_specs=P(), check_vma=False)
        gradient, value = mapped(w, xs) if manual else (gradients(loss, w, xs), jnp.sum(xs))
        return *programs.momentum(w, m, gradient), value

    given = [programs.placed(on, spec, *STACK, seed=n) for n in range(2)]
    given.append(programs.placed(on, ROWS, BATCHES, 8, WIDTH, seed=2))
    return jax.jit(step).lower(*given), tuple(given)


def sharded(lowered: jax.stages.Lowered, **axes: Any) -> jax.stages.Lowered:
    """The step under a plan; default: ZeRO-3."""
    return programs.changed(lowered, programs.state_sharding(**(axes or ZERO3)))[0]


def depth(lowered: jax.stages.Lowered, opcode: str) -> list[int]:
    """For each instruction of one kind with an array as result: in how many loops it is. In increasing order."""
    module = programs.module(lowered)
    loops = {loop.called[0]: loop for c in module.computations for loop in c.instructions if loop.opcode == "while"}

    def of(instruction: Instruction) -> int:
        loop = loops.get(instruction.computation)
        return 0 if loop is None else 1 + of(loop)

    found = [i for c in module.computations for i in c.instructions if i.opcode == opcode]
    return sorted(of(i) for i in found if list(i.shape.dimensions))


def whole_stacks(lowered: jax.stages.Lowered, element_type: int | None = None) -> int:
    """The number of values within shard_maps and loops that are as large as the whole stack of layers."""
    module = programs.module(lowered)
    inside = [i for c in module.computations if c is not module.entry for i in c.instructions]
    sizes = [i for i in inside if list(i.shape.dimensions) == STACK]
    return sum(element_type in (None, i.shape.element_type) for i in sizes)
