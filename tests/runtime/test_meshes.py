"""Meshes of explicit axes, axes that a `shard_map` leaves to the partitioner, and a `shard_map` inside the loop."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix import strand_interleave

LAYERS, WIDTH, INNER, ROWS, MICROBATCHES = 4, 8, 16, 16, 4
SPECS = {"up": P(None, None, "tp"), "down": P(None, "tp")}

Params = dict[str, jax.Array]
Loss = Callable[[Params, jax.Array], jax.Array]


def make_mesh(kind: AxisType) -> Mesh:
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind,) * 2)


AUTO = make_mesh(AxisType.Auto)


def arguments(mesh: Mesh) -> tuple[Params, jax.Array]:
    """Parameters, and micro-batches of rows."""
    random = np.random.RandomState(0)
    params = {
        "up": random.standard_normal((LAYERS, WIDTH, INNER)),
        "down": random.standard_normal((LAYERS, INNER, WIDTH)),
    }
    rows = random.standard_normal((MICROBATCHES, ROWS // MICROBATCHES, WIDTH))
    put = {name: jax.device_put(0.3 * np.float32(p), NamedSharding(mesh, SPECS[name])) for name, p in params.items()}
    return put, jax.device_put(np.float32(rows), NamedSharding(mesh, P(None, "dp")))


def accumulated(loss: Loss, params: Params, rows: jax.Array) -> tuple[Params, jax.Array]:
    def micro_batch(total: Params, x: jax.Array) -> tuple[Params, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(jnp.add, total, gradients), value

    return lax.scan(micro_batch, jax.tree.map(jnp.zeros_like, params), rows)


def over_layers(ffn: Callable[..., jax.Array], unrolled: bool = False) -> Loss:
    def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        return x + ffn(x, weights["up"], weights["down"]), None

    def loss(params: Params, x: jax.Array) -> jax.Array:
        if unrolled:
            for n in range(LAYERS):
                x, _ = layer(x, jax.tree.map(lambda w, n=n: w[n], params))
        else:
            x, _ = lax.scan(layer, x, params)
        return jnp.mean(x**2)

    return loss


def explicit(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jnp.einsum("bi,id->bd", jnp.tanh(x @ up), down, out_sharding=P("dp", None))


def summed(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return lax.psum(jnp.tanh(x @ up) @ down, "tp")


def mapped(**options: Any) -> Callable[..., jax.Array]:
    """A layer's products as one shard_map, as attention kernels and experts are often written."""
    rows = P() if "axis_names" in options else P("dp")
    return jax.shard_map(summed, mesh=AUTO, in_specs=(rows, P(None, "tp"), P("tp")), out_specs=rows, **options)


def manual_over_dp(params: Params, rows: jax.Array) -> Any:
    """The loop is in a `shard_map` over one axis; the partitioner handles the other."""

    def local(params: Params, rows: jax.Array) -> Any:
        loss = over_layers(lambda x, up, down: jnp.tanh(x @ up) @ down)
        return lax.psum(accumulated(loss, params, rows), "dp")

    specs = {"mesh": AUTO, "in_specs": (P(), P(None, "dp")), "out_specs": P(), "axis_names": {"dp"}}
    return jax.shard_map(local, check_vma=False, **specs)(params, rows)


def steps(loss: Loss) -> Callable[..., Any]:
    return lambda params, rows: accumulated(loss, params, rows)


STEPS: dict[str, tuple[AxisType, Callable[..., Any]]] = {
    "explicit axes": (AxisType.Explicit, steps(over_layers(explicit))),
    "some axes manual around the loop": (AxisType.Auto, manual_over_dp),
    "shard_map in each layer": (AxisType.Auto, steps(over_layers(mapped()))),
    "shard_map over some axes in each layer": (AxisType.Auto, steps(over_layers(mapped(axis_names={"tp"})))),
    "shard_map in each unrolled layer": (AxisType.Auto, steps(over_layers(mapped(), unrolled=True))),
    "shard_map in each checkpointed layer": (AxisType.Auto, steps(over_layers(jax.checkpoint(mapped())))),
}


@pytest.mark.parametrize("name", STEPS)
def test_strands_compute_the_same(name: str) -> None:
    kind, step = STEPS[name]
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh) if kind is AxisType.Explicit else contextlib.nullcontext():
        params, rows = arguments(mesh)
        interleaved = strand_interleave(step, strict=True)
        expected, actual = jax.jit(step)(params, rows), interleaved(params, rows)
        (note,) = [
            n for n in interleaved.preview(params, rows)["strand-duplication"].notes if n.message == "two strands"
        ]
    assert len(note.facts["merged_loops"]) == (0 if "unrolled" in name else 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), expected, actual)
