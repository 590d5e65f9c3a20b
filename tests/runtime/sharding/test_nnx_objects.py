"""Groups of parameters in objects of Flax NNX: which names a step finds, and that it trains as under `nnx.jit`."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.passes.sharding.factors import ShardingError
from dhelix.runtime.sharding.nnx_objects import argument_paths
from dhelix.runtime.sharding.parameter_groups import group_numbers
from dhelix.runtime.sharding.placed_states import shard_state
from dhelix.runtime.sharding.state_plan import sharding_plan
from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.quick import slow_after
from dhelix.tests.runtime.sharding.training import mesh

TOKENS, WIDTH, ROWS = 64, 16, 128
PLAN = sharding_plan("zero3", groups={"embedding": "zero1", "layers/*/bias": "dp"})


class Network(nnx.Module):
    """Layers, an embedding, and random numbers that are no states of the optimizer."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 2):
        self.table = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(layers)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.dropout(self.table(tokens))
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.table.attend(x)


class NoPytree(Network, pytree=False):
    pass


class Tied(Network):
    """The output has the table of the embedding."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 2):
        super().__init__(rngs, layers)
        self.output = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.output.embedding = self.table.embedding


def objects(kind: type[Network] = Network, layers: int = 2) -> tuple[Any, nnx.Optimizer]:
    """A model and its optimizer, whole on all devices."""
    model = kind(nnx.Rngs(0, dropout=1), layers)
    made = model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    nnx.update(made, jax.device_put(nnx.state(made), NamedSharding(mesh(dp=8), P())))
    return made


def sharded(kind: type[Network] = Network) -> tuple[Any, nnx.Optimizer]:
    """The same objects, with their states in shards."""
    made = objects(kind)
    nnx.update(made, shard_state(nnx.state(made), PLAN))
    return made


def tokens() -> jax.Array:
    values = np.random.RandomState(0).randint(0, TOKENS, ROWS)
    return jax.device_put(values, NamedSharding(mesh(dp=8), P("dp")))


def train_step(model: Any, optimizer: nnx.Optimizer, rows: jax.Array) -> jax.Array:
    value, gradients = value_and_grad(lambda model, rows: jnp.mean((model(rows) - 1) ** 2))(model, rows)
    optimizer.update(model, gradients)
    return value


BY_STATES = nnx.StateSharding({nnx.Param: None, ...: None})
MODES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "trees": {"graph": False},
    "no updates": {"graph_updates": False},
    "shardings": {"in_shardings": (BY_STATES, None, None)},
}


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_of_nnx_jit_has_the_names_of_attributes(mode: str) -> None:
    made = objects(layers=11)  # numbers have no alphabetical order
    lowered: Any = nnx.jit(train_step, **MODES[mode]).lower(*made, tokens())
    arguments = getattr(lowered, "lowered", lowered).args_info
    paths, leaves = argument_paths(arguments), jax.tree.leaves(arguments)
    numbers = group_numbers(["embedding", "layers/10/bias"], paths)
    assert [leaves[n].shape for n, number in enumerate(numbers) if number == 0] == [(TOKENS, WIDTH)] * 3
    ours = [path.text for path, number in zip(paths, numbers, strict=True) if number == 1]
    assert [re.findall("opt_state/0/.u", path) for path in ours] == [[], ["opt_state/0/mu"], ["opt_state/0/nu"]]
    assert all(path.split("/")[-4:-1] == ["layers", "10", "bias"] for path in ours)


@pytest.mark.parametrize("kind", slow_after(1, [Network, NoPytree, Tied]))
def test_a_step_with_groups_trains_as_without_them(kind: type[Network]) -> None:
    expected, found = objects(kind), sharded(kind)
    step = strand_interleave(train_step, sharding=PLAN, donate_argnums=(0, 1))
    plain = nnx.jit(train_step)
    for _ in range(3):
        np.testing.assert_allclose(plain(*expected, tokens()), step(*found, tokens()), rtol=1e-5)
    table, layer = found[0].table.embedding, found[0].layers[1]
    placed = [variable.get_raw_value().sharding.spec for variable in (table, layer.bias, layer.kernel)]
    assert placed == [P("dp"), P(), P("dp")]
    notes = [note.message for note in step.preview(*found, tokens())["state-sharding"].notes]
    assert [note.partition(":")[0] for note in notes] == [
        "embedding (zero1)",
        "layers/*/bias (dp)",
        "the others (zero3)",
    ]
    assert notes[0].endswith("holds 1.5 KiB of states instead of 12 KiB"), "the table and its two moments"


def test_objects_may_be_placed_as_trees() -> None:
    model, optimizer = shard_state(objects(), PLAN)
    expected = nnx.state(sharded())
    for one, other in zip(jax.tree.leaves((model, optimizer)), jax.tree.leaves(expected), strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


def test_a_name_that_objects_do_not_have_is_one_error() -> None:
    step = strand_interleave(train_step, sharding=sharding_plan("zero3", groups={"embeding": "dp"}))
    with pytest.raises(ShardingError, match=re.escape("group 'embeding' matches no path of a parameter: 0/0/drop")):
        step.preview(*sharded(), tokens())


def test_objects_that_share_a_variable_are_not_placed_as_trees() -> None:
    said = (
        "0/output/embedding and 0/table/embedding are one variable, and would become two; place the objects in shards"
    )
    with pytest.raises(ShardingError, match=re.escape(said)):
        shard_state(objects(Tied), PLAN)
