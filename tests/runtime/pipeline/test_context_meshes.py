"""Pipelines where the mesh is set for the whole program (`jax.set_mesh`), as JAX's own examples do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dhelix
from dhelix import Fold
from dhelix.tests.runtime.pipeline.models import (
    Params,
    assert_close,
    folded,
    in_microbatches,
    init_params,
    layer,
    nll,
    tokens,
    unfolded,
)

STAGES, MICROBATCHES, LAYERS, ROWS = 2, 3, 4, 12


def constrained(p: Params, rows: jax.Array) -> jax.Array:
    """Says by names of axes alone where rows lie, in a layer and in front of the head."""

    def one(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        return lax.with_sharding_constraint(layer(x, w), P("dp")), None

    x, _ = lax.scan(one, p["embedding"][rows[:, :-1]], p["layers"])
    return jnp.mean(nll(p, lax.with_sharding_constraint(x, P("dp")), rows[:, 1:]))


@pytest.mark.parametrize("schedule", ["w", "1f1b"])
def test_a_mesh_of_the_whole_program(schedule: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(STAGES, 2), ("pp", "dp"), axis_types=(AxisType.Auto,) * 2)
    fold = Fold(STAGES, layers=LAYERS, mesh=mesh, schedule=schedule)
    batch, params = jax.device_put(tokens(ROWS), NamedSharding(mesh, P("dp"))), init_params(LAYERS)
    with jax.set_mesh(mesh):
        expected = in_microbatches(dhelix.value_and_grad(constrained), MICROBATCHES)(params, batch)
        function = in_microbatches(dhelix.value_and_grad(constrained), MICROBATCHES, fold=fold)
        value, gradients = function(folded(params, fold.layout()), batch)
    assert_close((value, unfolded(gradients, fold.layout())), expected)
