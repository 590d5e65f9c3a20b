"""Steps with experts on sharded states, over 4 data-parallel devices x 2 devices that hold different experts.

Each device sends rows to the experts by all-to-all. So the gradient of an expert is a sum over data-parallel devices
only, and those of other parameters are sums over both axes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.passes.framework.report import CHANGED
from dhelix.passes.sharding.factors import ONE, Factor, Factors
from dhelix.runtime.sharding.placed_states import gather_state, shard_state, state_shardings
from dhelix.runtime.sharding.state_plan import mesh_of
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.runtime.sharding.training import difference, every_size

DATA, OVER, EXPERTS, LAYERS, WIDTH, ROWS, STEPS = 4, 2, 4, 3, 16, 4, 5
CLOSE = 1e-6
PLANS = {"zero1": "zero1", "zero2": "zero2", "partial": Factors(Factor(DATA), ONE, ONE, Factor(2))}
# With a smaller eps, Adam would turn the rounding errors of small gradients into steps of the learning rate.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-4))
SPECS = {"layers": {"router": P(), "experts": P(None, "ep")}, "head": P()}

Tree = Any


def parameters() -> Tree:
    draw = np.random.default_rng(0)

    def normal(*size: int) -> np.ndarray:
        return (draw.standard_normal(size) / 4).astype(np.float32)

    layers = {"router": normal(LAYERS, WIDTH, EXPERTS), "experts": normal(LAYERS, EXPERTS, WIDTH, WIDTH)}
    return {"layers": layers, "head": normal(WIDTH, WIDTH)}


def loss(params: Tree, x: jax.Array, experts: str | None = None) -> jax.Array:
    """The mean loss of rows `[rows, WIDTH]`. Rows n, n + EXPERTS, ... go to expert n, each with its router's weight.

    Args:
      experts: the mesh axis whose devices hold different experts; None if each device holds all.
    """

    own = jnp.tile(jnp.eye(EXPERTS), (len(x) // EXPERTS, 1))

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        sent = x.reshape(-1, EXPERTS, WIDTH).swapaxes(0, 1)
        if experts is not None:
            sent = lax.all_to_all(sent, experts, 0, 1, tiled=True)
        made = jnp.tanh(jnp.einsum("erw,ewv->erv", sent, w["experts"]))
        if experts is not None:
            made = lax.all_to_all(made, experts, 1, 0, tiled=True)
        weight = jnp.sum(jax.nn.softmax(x @ w["router"]) * own, axis=1, keepdims=True)
        return x + weight * made.swapaxes(0, 1).reshape(x.shape), None

    return jnp.mean((lax.scan(layer, x, params["layers"])[0] @ params["head"] - jnp.sin(x)) ** 2)


def mean(params: Tree, batch: jax.Array, experts: str | None = None) -> tuple[jax.Array, Tree]:
    """The mean loss and the mean gradients of micro-batches `[microbatches, rows, WIDTH]`."""

    def add(total: Tree, x: jax.Array) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, x, experts)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    return jax.tree.map(lambda total: total / len(batch), lax.scan(add, zeros, batch)[0])


def over(mesh: Mesh) -> Any:
    """`mean` over a mesh: a shard_map that sums gradients."""
    axes = mesh.axis_names

    def local(params: Tree, batch: jax.Array) -> tuple[jax.Array, Tree]:
        value, gradients = mean(params, batch, "ep")
        data = tuple(axis for axis in axes if axis != "ep")

        def summed(gradient: jax.Array, spec: P) -> jax.Array:
            return lax.psum(gradient, data if "ep" in spec else axes) / mesh.size

        return lax.pmean(value, axes), jax.tree.map(summed, gradients, SPECS)

    return jax.shard_map(local, mesh=mesh, in_specs=(SPECS, P(None, axes)), out_specs=(P(), SPECS), check_vma=False)


def step(gradients: Any, state: Tree, batch: jax.Array) -> tuple[Tree, jax.Array]:
    value, found = gradients(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(found, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, value


def batch(number: int, microbatches: int) -> np.ndarray:
    size = (microbatches, DATA * OVER * ROWS, WIDTH)
    return np.random.default_rng(1 + number).standard_normal(size).astype(np.float32)


def first(params: Tree) -> Tree:
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


@functools.cache
def expected(microbatches: int) -> tuple[Tree, jax.Array]:
    """State and loss after five plain steps on one device."""
    plain, state, value = jax.jit(functools.partial(step, mean)), first(parameters()), jnp.zeros(())
    for number in range(STEPS):
        state, value = plain(state, batch(number, microbatches))
    return jax.tree.map(np.asarray, state), value


QUICK = [("zero1", 4)]
ALL = [("zero1", 1), ("zero1", 4), ("zero2", 4), ("partial", 4)]


@pytest.mark.parametrize(
    ("name", "microbatches"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in ALL if one not in QUICK)]
)
def test_five_steps_give_the_numbers_of_the_plain_step(name: str, microbatches: int) -> None:
    mesh, plan = mesh_of(PLANS[name], ep=OVER)
    placed = jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), parameters(), SPECS)
    state = shard_state(first(placed), plan)
    share = state["params"]["layers"]["experts"].addressable_shards[0].data.size
    parts = plan.on(mesh.shape).optimizer
    assert share * OVER * np.prod([mesh.shape[axis] for axis in parts]) == LAYERS * EXPERTS * WIDTH * WIDTH
    sharded = strand_interleave(
        functools.partial(step, over(mesh)), sharding=plan, passes=every_size(), strict=microbatches > 1
    )
    rows, value = NamedSharding(mesh, P(None, mesh.axis_names)), jnp.zeros(())
    for number in range(STEPS):
        state, value = sharded(state, jax.device_put(batch(number, microbatches), rows))
    whole, plain = expected(microbatches)
    for part in ("params", "optimizer"):
        assert difference(whole[part], gather_state(state, plan)[part]) < CLOSE, part
    assert abs(value - plain) < CLOSE * abs(plain)
    right = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b, a.ndim), state, state_shardings(state, plan))
    assert jax.tree.all(right), "states stay in their shards"
    stages = sharded.report(state, jax.device_put(batch(0, microbatches), rows)).stages
    changed = {one.name for stage in stages for one in stage.passes if one.outcome == CHANGED}
    assert changed >= {"state-sharding", "parameter-gathering"} | (
        {"strand-duplication"} if microbatches > 1 else set()
    )
