"""Collective matmuls under automatic sharding: programs of XLA's GPU partitioner, inspected and run on CPU devices.

The module that passes get at PRE_SCHEDULER is taken from a compilation for GPUs. It goes through the passes, and runs
as the body of a `shard_map` over CPU devices.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dhelix.models.common.parallel import AutoParallel
from dhelix.models.llama import model as llama
from dhelix.models.llama.llama_config import LLAMA_PRESETS
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.hlo import HloModule
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.step.collective_matmuls.jax_forms import collective_matmul_passes
from dhelix.tests.passes import partitioned

pytestmark = pytest.mark.deviceless
AXES = {"dp": 2, "tp": 4}
WEIGHTS = {  # two layers
    "scale": ((2, 16), PartitionSpec()),
    "up": ((2, 16, 32), PartitionSpec(None, None, "tp")),
    "bias": ((2, 32), PartitionSpec(None, "tp")),
    "down": ((2, 32, 16), PartitionSpec(None, "tp")),
}
ROWS = PartitionSpec("dp", "tp")
Tree = Any


def step(mesh: Mesh, whole: bool) -> Callable[[Tree, jax.Array], Any]:
    """Loss and gradients of layers whose users annotate the residual stream and the hidden layer.

    `whole`: also annotates operands and sums of products, so the partitioner gathers before the norm's weights.
    """

    def annotate(x: jax.Array, *spec: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        h = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * w["scale"]
        h = annotate(h, "dp") if whole else h
        hidden = annotate(jnp.einsum("bsh,hf->bsf", h, w["up"]) + w["bias"], "dp", None, "tp")
        y = jnp.einsum("bsf,fh->bsh", jax.nn.gelu(hidden), w["down"])
        return annotate(x + annotate(annotate(y, "dp") if whole else y, "dp", "tp"), "dp", "tp"), None

    return jax.value_and_grad(lambda w, x: jnp.sum(jnp.sin(jax.lax.scan(layer, x, w)[0])))


def of_step(whole: bool) -> bytes:
    """The partitioned module of the step."""
    mesh = deviceless.mesh(AXES)

    def abstract(size: tuple[int, ...], spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, jnp.float32, sharding=NamedSharding(mesh, spec))

    weights = {name: abstract(size, spec) for name, (size, spec) in WEIGHTS.items()}
    return partitioned.of_gpus(jax.jit(step(mesh, whole)).lower(weights, abstract((4, 16, 16), ROWS)))


def of_llama() -> bytes:
    mesh = deviceless.mesh(AXES)
    config = dataclasses.replace(LLAMA_PRESETS["llama-demo"], layers=2)

    def abstract(value: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, spec))

    shapes = jax.eval_shape(lambda: llama.init_params(config, jax.random.key(0)))
    params = jax.tree.map(abstract, shapes, llama.param_specs(config))
    tokens = abstract(jax.ShapeDtypeStruct((4, config.seq), jnp.int32), PartitionSpec("dp"))

    def loss(params: Tree, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        return llama.loss(config, params, tokens, targets, AutoParallel(mesh))

    return partitioned.of_gpus(jax.jit(jax.value_and_grad(loss)).lower(params, tokens, tokens))


def transformed(module: bytes, form: str = "ring") -> tuple[HloModule, Counter[str]]:
    """The module after the passes, and the number of replaced sites by kind."""
    passes = collective_matmul_passes(list(deviceless.mesh(AXES).devices.flat), form)
    new, report = PassManager(passes, strict=True).run(Stage.PRE_SCHEDULER, module)
    assert new is not None
    notes = [note for entry in report.passes for note in entry.notes if note.message == "a collective matmul"]
    return HloModule.from_bytes(new), Counter(
        note.facts["site"].split()[0] for note in notes for _ in range(note.facts["count"])
    )


def test_every_site_of_a_llama_is_found() -> None:
    """Two sites of either kind per layer, forward and backward, and the head's, as in a shard_map."""
    _, made = transformed(of_llama())
    assert (made["all_gather_matmul"], made["matmul_reduce_scatter"]) == (5, 5)


def test_sites_between_annotated_residuals_are_found() -> None:
    """In forward and backward. The partitioner gathers the cotangent again for the weight's gradient."""
    _, made = transformed(of_step(whole=False))
    assert (made["all_gather_matmul"], made["matmul_reduce_scatter"]) == (2, 2)


def test_the_same_is_computed() -> None:
    """The user's program, the partitioned one, and the one with collective matmuls."""
    module = of_step(whole=True)
    after, made = transformed(module)
    assert (made["all_gather_matmul"], made["matmul_reduce_scatter"]) == (2, 2)
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(tuple(AXES.values())), tuple(AXES))
    draw = np.random.default_rng(0)
    weights = {n: draw.standard_normal(size).astype(np.float32) / 4 for n, (size, _) in WEIGHTS.items()}
    x = draw.standard_normal((4, 16, 16)).astype(np.float32)
    given = [*(shards(mesh, spec, weights[name]) for name, (_, spec) in sorted(WEIGHTS.items())), shards(mesh, ROWS, x)]
    plain = partitioned.execute(HloModule.from_bytes(module), given)
    for a, b in zip(plain, partitioned.execute(after, given), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(np.max(np.abs(a))))
    loss, gradients = jax.jit(step(mesh, whole=True))(weights, x)
    np.testing.assert_allclose(plain[0], np.full(8, loss), rtol=1e-5)
    for a, b in zip(plain[1:], (gradients[name] for name in sorted(WEIGHTS)), strict=True):
        np.testing.assert_allclose(a, of_devices(mesh, b), rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(b))))


def shards(mesh: Mesh, spec: PartitionSpec, value: np.ndarray) -> np.ndarray:
    """[devices, ...]: the value as the devices of `mesh` hold it."""
    return of_devices(mesh, jax.device_put(value, NamedSharding(mesh, spec)))


def of_devices(mesh: Mesh, value: jax.Array) -> np.ndarray:
    by_device = {shard.device: np.asarray(shard.data) for shard in value.addressable_shards}
    return np.stack([by_device[device] for device in mesh.devices.flat])
