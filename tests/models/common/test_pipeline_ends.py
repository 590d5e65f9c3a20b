"""Embedding and head of a pipeline that splits the vocabulary over tp and pp, compared with one device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from dhelix.models import LlamaConfig, make_mesh
from dhelix.models.common.cross_entropy import cross_entropy
from dhelix.models.common.layers import embed
from dhelix.models.common.parallel import SINGLE_DEVICE, ManualParallel
from dhelix.models.llama.model import init_params, param_specs, project
from dhelix.tests.models.tiny import TINY

CONFIG = TINY

# The tests only compare values, so optimization by LLVM would cost more time than it saves.
fast_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def specs_of_ends(config: LlamaConfig) -> Any:
    return {name: spec for name, spec in param_specs(config, "pp").items() if name != "layers"}


def middle(x: jax.Array) -> jax.Array:
    """Stands in for the layers. It is elementwise, so it needs no exchange."""
    return x + x**2


def one_device(config: LlamaConfig, params: Any, rows: Any) -> jax.Array:
    x = middle(params["embedding"][rows[:, :-1]])
    return jnp.mean(cross_entropy(project(config, params, x), rows[:, 1:], SINGLE_DEVICE))


def pipelined(config: LlamaConfig, mesh: Any) -> Any:
    """Loss and gradients as an executor computes them.

    x goes from the first stage to the last, which gives it to the head. Only the last stage's cotangent goes back from
    the head, and only the first stage's cotangent goes into the embedding.
    """
    specs = specs_of_ends(config)
    parallel = ManualParallel(pipeline="pp")

    def local(params: Any, rows: jax.Array) -> Any:
        stage, last = lax.axis_index("pp"), lax.axis_size("pp") - 1

        def only(x: jax.Array, where: Any) -> jax.Array:
            return jnp.where(stage == where, x, 0)

        def head(params: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(cross_entropy(project(config, params, x, parallel), rows[:, 1:], parallel.ends))

        x, embedding_vjp = jax.vjp(lambda params: embed(config, parallel, params["embedding"], rows[:, :-1]), params)
        x, middle_vjp = jax.vjp(middle, lax.psum(only(x, 0), "pp"))
        loss, head_vjp = jax.vjp(head, params, only(x, last))
        gradients, dx = head_vjp(jnp.ones_like(loss))
        (dx,) = middle_vjp(lax.psum(only(dx, last), "pp"))
        (of_embedding,) = embedding_vjp(only(dx, 0))
        gradients = jax.tree.map(jnp.add, gradients, of_embedding)
        gradients["final_norm"] = lax.psum(gradients["final_norm"], ("tp", "pp"))
        return lax.pmean(loss, "dp"), lax.pmean(gradients, "dp")

    in_specs, out_specs = (specs, PartitionSpec("dp")), (PartitionSpec(), specs)
    return fast_jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


@pytest.mark.parametrize(
    ("pp", "dp", "tp", "tied"), [(2, 2, 2, False), (2, 2, 2, True), (4, 1, 2, False), (2, 1, 4, False)]
)
def test_loss_and_gradients_of_the_ends_are_those_of_one_device(pp: int, dp: int, tp: int, tied: bool) -> None:
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params = init_params(config, jax.random.key(1))
    params = {name: params[name] * (1 if "norm" in name else 5) for name in specs_of_ends(config)}
    rows = np.random.default_rng(3).integers(0, config.vocab, (4, config.seq + 1)).astype(np.int32)

    expected_loss, expected = fast_jit(jax.value_and_grad(lambda params: one_device(config, params, rows)))(params)
    loss, gradients = pipelined(config, make_mesh(dp, tp, pp=pp))(params, rows)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        error = np.abs(gradient - expected[name]).max() / np.abs(expected[name]).max()
        assert error <= 1e-6, f"{name}: {error}"


def test_each_stage_holds_its_part_of_the_vocabulary() -> None:
    specs = param_specs(CONFIG, "pp")
    assert specs["embedding"] == PartitionSpec(("tp", "pp"))
    assert specs["head"] == PartitionSpec(None, ("tp", "pp"))
    assert specs["final_norm"] == PartitionSpec()
    assert specs["layers"]["wq"] == PartitionSpec("pp", None, None, "tp")
    assert specs["layers"]["ffn_norm"] == PartitionSpec("pp")


def test_a_pipeline_needs_stacked_layers() -> None:
    with pytest.raises(ValueError, match="scan_layers=True"):
        param_specs(dataclasses.replace(CONFIG, scan_layers=False), "pp")


def test_a_mesh_with_stages_keeps_tp_innermost() -> None:
    devices = jax.devices("cpu")
    mesh = make_mesh(2, 2, devices, pp=2)
    assert dict(mesh.shape) == {"pp": 2, "dp": 2, "tp": 2}
    assert list(mesh.devices[0, 0]) == devices[:2]
    assert list(mesh.devices[1].flat) == devices[4:8]
    assert make_mesh(2, 2, devices).axis_names == ("dp", "tp")
    with pytest.raises(ValueError, match="pp 4 x dp 2 x tp 2 needs 16 devices, but there are 8"):
        make_mesh(2, 2, devices, pp=4)
