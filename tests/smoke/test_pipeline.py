"""A step whose layers form a pipeline gives the same results as without a pipeline."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dhelix

pytestmark = pytest.mark.smoke
MICROBATCHES = 4


def loss(params: Any, rows: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w) @ w.T, None), rows @ params["embedding"], params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


def test_folded_layers_have_the_gradients_of_layers() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("pp", "dp"))
    draw = np.random.default_rng(0).standard_normal
    shapes = {"embedding": (8, 16), "layers": (4, 16, 32), "head": (16, 8)}
    params = {name: draw(shape, np.float32) / 4 for name, shape in shapes.items()}
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    rows = jax.device_put(draw((4 * MICROBATCHES, 8), np.float32), NamedSharding(mesh, PartitionSpec("dp")))
    fold = dhelix.Fold(stages=2, mesh=mesh)

    @dhelix.strand_interleave(microbatches=MICROBATCHES, pipeline=fold)
    def gradients_of(params: Any, rows: jax.Array) -> Any:
        return dhelix.value_and_grad(loss)(params, rows)

    value, gradients = gradients_of(fold.fold(params), rows)
    assert gradients["layers"].shape == (4, 1, 16, 32)
    expected, expected_gradients = jax.value_and_grad(loss)(params, rows)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6 * np.abs(b).max())  # noqa: E731
    jax.tree.map(close, fold.unfold(gradients), expected_gradients)
