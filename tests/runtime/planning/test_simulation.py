"""`dhelix.simulate`: a user's own step on a described cluster."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dhelix
from dhelix.errors import DhelixError
from dhelix.profiles.clusters import known
from dhelix.runtime.compiler import deviceless


def loss(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2)


def train_step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    value, grads = dhelix.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - (0.01 * g).astype(p.dtype), params, grads), value


def arguments(mesh: Mesh) -> tuple[Any, Any]:
    def array(spec: P, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    params = {"up": array(P(None, None, "tp"), 4, 4096, 8192), "down": array(P(None, "tp"), 4, 8192, 4096)}
    return params, array(P("dp"), 32, 1024, 4096)


@pytest.mark.deviceless
def test_two_strands_hide_what_the_plain_step_waits_for() -> None:
    step = dhelix.strand_interleave(train_step, microbatches=4, donate_argnums=0)
    args = arguments(deviceless.mesh({"dp": 2, "tp": 8}, "h100"))
    found = dhelix.simulate(step, *args, cluster="h100-roce", tokens=32 * 1024)
    blocking, xla, strands = found.steps
    assert found.cluster.nodes == 2 and found.cluster.name == "h100-roce"
    assert found.fastest is strands and strands.parts.exposed < xla.parts.exposed
    assert blocking.parts.exposed > blocking.parts.sent  # each collective also waits for its last GPU
    assert 0.0 < strands.mfu < 1.0 and strands.tokens_per_second > 0.0
    assert "strands takes" in str(found) and "are guesses" in str(found)
    slower = dhelix.simulate(step, *args, cluster="h100-roce", systems=["xla"], slowest_gpu=1.5)
    assert slower.steps[0].parts.compute == pytest.approx(1.5 * xla.parts.compute, rel=0.01)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": "a100-infiniband"}, "the arguments are on H100s, but a100-infiniband has A100s; .*'a100'"),
        ({"cluster": known.find("h100-roce").with_nodes(1)}, "the mesh has 16 GPUs, but h100-roce has 8"),
        ({"systems": []}, "systems is empty"),
        ({"systems": ["magic"]}, "'magic' is unknown"),
        ({"constants": {"speed": 1.0}}, "there is no constant 'speed'"),
        ({"cluster": {"gpu": "H100", "nodes": 0}}, "nodes"),
        ({"cluster": {"gpu": "H100"}}, "cluster="),
    ],
)
def test_what_does_not_fit_is_said_at_once(options: dict[str, Any], message: str) -> None:
    args = arguments(deviceless.mesh({"dp": 2, "tp": 8}, "h100"))
    with pytest.raises(DhelixError, match=message):
        dhelix.simulate(train_step, *args, **options)


def test_arguments_on_no_gpu() -> None:
    mesh = Mesh([[jax.devices()[0]]], ("dp", "tp"))
    with pytest.raises(DhelixError, match="not on GPUs"):
        dhelix.simulate(train_step, *arguments(mesh))
