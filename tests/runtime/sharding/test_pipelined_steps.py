"""Steps of a pipeline on sharded states, over 2 stages and 4 data-parallel devices: the numbers of the plain step.

"manual": a shard_map covers all axes, and sums gradients over data-parallel devices itself. "automatic": the pipeline
makes a shard_map over its stages alone, and XLA's partitioner inserts the other collectives.
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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dhelix
from dhelix.passes.framework.report import CHANGED
from dhelix.runtime.pipeline.fold import Fold
from dhelix.runtime.sharding.placed_states import gather_state, shard_state, state_shardings
from dhelix.runtime.sharding.state_plan import data_axes
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.runtime.pipeline.models import SEQ, VOCAB, gradients_of, init_params, layer, loss, nll
from dhelix.tests.runtime.sharding.training import OPTIMIZER, difference, every_size, mesh

STAGES, DATA, LAYERS, MICROBATCHES, STEPS = 2, 4, 4, 2, 5
CLOSE = 1e-6
SPECS = {"embedding": P(), "layers": {name: P("pp") for name in ("norm", "w_in", "w_out")}, "scale": P(), "head": P()}

Tree = Any


def rows(number: int, data: Any = None) -> Any:
    shape = 2 * DATA * MICROBATCHES, SEQ + 1
    drawn = np.random.default_rng(number).integers(0, VOCAB, shape).astype(np.int32)
    return drawn if data is None else jax.device_put(drawn, NamedSharding(data, P("dp")))


def step(gradients: Any, state: Tree, batch: jax.Array) -> tuple[Tree, jax.Array]:
    value, found = gradients(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(found, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, value


def first(params: Tree) -> Tree:
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


@functools.cache
def expected() -> tuple[Tree, jax.Array]:
    """State and loss after five plain steps on one device."""
    plain = jax.jit(functools.partial(step, jax.value_and_grad(loss)))
    state, value = first(init_params(LAYERS)), jnp.zeros(())
    for number in range(STEPS):
        state, value = plain(state, rows(number))
    return jax.tree.map(np.asarray, state), value


def automatic(params: Tree, batch: jax.Array) -> jax.Array:
    """The loss of the model; activations stay split by rows, so that XLA gathers weights."""

    def block(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        return layer(lax.with_sharding_constraint(x, P("dp")), w), None

    x, _ = lax.scan(block, params["embedding"][batch[:, :-1]], params["layers"])
    return jnp.mean(nll(params, lax.with_sharding_constraint(x, P("dp")), batch[:, 1:]))


def trained(plan: Any, schedule: str, manual: bool) -> tuple[Tree, jax.Array, set[str]]:
    """The state in the model's order and the loss after five steps; and the passes that changed something."""
    on = mesh(pp=STAGES, dp=DATA)
    fold = Fold(STAGES, layers=LAYERS, schedule=schedule, mesh=on)
    gradients = gradients_of(loss, on, SPECS) if manual else dhelix.value_and_grad(automatic)
    sharded = strand_interleave(
        functools.partial(step, gradients), microbatches=MICROBATCHES, pipeline=fold, sharding=plan,
        passes=every_size() if schedule == "w" else (),
    )  # fmt: skip
    state = shard_state(fold.fold(first(jax.device_put(init_params(LAYERS), NamedSharding(on, P())))), plan)
    value = jnp.zeros(())
    with jax.set_mesh(on):
        for number in range(STEPS):
            state, value = sharded(state, rows(number, on))
        report = sharded.report(state, rows(0, on))
    right = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b, a.ndim), state, state_shardings(state, plan))
    assert jax.tree.all(right), "states stay in their shards"
    changed = {one.name for stage in report.stages for one in stage.passes if one.outcome == CHANGED}
    return fold.unfold(gather_state(state, plan)), value, changed


QUICK = [("zero1", "1f1b", True)]
ALL = [
    ("zero1", "w", True),
    ("zero2", "w", True),
    ("zero3", "1f1b", True),
    ("zero1", "1f1b", False),
    ("zero3", "1f1b", False),
]


@pytest.mark.parametrize(
    ("plan", "schedule", "manual"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in ALL)]
)
def test_five_steps_give_the_numbers_of_the_plain_step(plan: str, schedule: str, manual: bool) -> None:
    found, value, changed = trained(plan, schedule, manual)
    state, plain = expected()
    for part in ("params", "optimizer"):
        assert difference(state[part], found[part]) < CLOSE, part
    assert abs(value - plain) < CLOSE * abs(plain)
    assert "state-sharding" in changed


@pytest.mark.parametrize("group", [None, 2])
def test_layers_of_a_stage_stay_whole(group: int | None) -> None:
    """The first two dimensions of folded layers are chunks and the layers of a chunk. Neither is split over data."""
    data, plan = data_axes("zero1", DATA, group)
    on = mesh(pp=STAGES, **data)
    fold = Fold(STAGES, layers=8 * STAGES, schedule="1f1b", mesh=on)
    state = first(jax.device_put(init_params(8 * STAGES), NamedSharding(on, P())))
    whole, folded = fold.fold(state), shard_state(fold.fold(state), plan)
    over = data_axes("zero1", DATA, group)[1].on(on.shape).optimizer
    entry = over[0] if len(over) == 1 else over
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(folded["params"]["layers"])} == {P("pp", None, entry)}
    assert folded["params"]["embedding"].sharding.spec == P(entry)
    for back in (fold.unfold(folded), gather_state(fold.unfold(folded), plan), fold.unfold(gather_state(folded, plan))):
        jax.tree.map(np.testing.assert_array_equal, state, back)
    again = fold.fold(fold.unfold(folded))
    jax.tree.map(np.testing.assert_array_equal, whole, again)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), folded, again))
