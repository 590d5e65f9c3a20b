"""Which attention runs where, and the sharded cross-entropy compared with Optax's."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from dhelix.models import LlamaConfig, make_mesh
from dhelix.models.common.cross_entropy import cross_entropy
from dhelix.models.common.layers import resolve_attention
from dhelix.models.common.parallel import SINGLE_DEVICE, ManualParallel


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("overrides", "platform", "expected"),
    [
        ({}, "gpu", "cudnn"),
        ({}, "cuda", "cudnn"),
        ({}, "cpu", "xla"),
        ({"dtype": "float32"}, "gpu", "xla"),
        ({"head_dim": 12}, "gpu", "xla"),
        ({"attention": "cudnn"}, "cpu", "cudnn"),
        ({"attention": "xla"}, "gpu", "xla"),
    ],
)
def test_attention_by_platform(overrides: dict[str, object], platform: str, expected: str) -> None:
    assert resolve_attention(dataclasses.replace(LlamaConfig(), **overrides), platform) == expected


@pytest.mark.parametrize("tp", [1, 4])
def test_cross_entropy_and_its_gradient_are_optaxs(tp: int) -> None:
    logits, targets = 5 * normal(0, 3, 7, 64), np.arange(21, dtype=np.int32).reshape(3, 7) * 3
    weights = normal(2, 3, 7)
    mesh, sharded = make_mesh(1, tp), P(None, None, "tp")
    parallel = ManualParallel() if tp > 1 else SINGLE_DEVICE

    def ours(logits: jax.Array) -> tuple[Any, Any]:
        losses, pullback = jax.vjp(lambda shard: cross_entropy(shard, targets, parallel), logits)
        return losses, pullback(weights)[0]

    mapped = jax.shard_map(ours, mesh=mesh, in_specs=sharded, out_specs=(P(), sharded), check_vma=False)
    losses, gradient = jax.jit(mapped)(logits)
    expected, pullback = jax.vjp(lambda x: optax.softmax_cross_entropy_with_integer_labels(x, targets), logits)
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, pullback(weights)[0], rtol=1e-5, atol=1e-6)


def test_cross_entropy_survives_large_logits_and_sums_in_float32() -> None:
    logits = jnp.zeros((1, 2, 4096), jnp.bfloat16).at[0, 1, 7].set(3e4)
    targets = jnp.array([[0, 7]])
    losses: Any
    losses, pullback = jax.vjp(lambda x: cross_entropy(x, targets, SINGLE_DEVICE), logits)
    np.testing.assert_allclose(losses, [[np.log(4096), 0.0]], rtol=1e-6)
    gradient = pullback(jnp.ones_like(losses))[0]
    assert gradient.dtype == jnp.bfloat16 and np.all(np.isfinite(gradient.astype(jnp.float32)))


def test_cross_entropy_never_gathers_the_vocabulary() -> None:
    mesh, sharded = make_mesh(1, 4), P(None, None, "tp")
    loss = jax.shard_map(
        lambda x, t: cross_entropy(x, t, ManualParallel()),
        mesh=mesh,
        in_specs=(sharded, P()),
        out_specs=P(),
        check_vma=False,
    )
    text = jax.jit(loss).lower(jnp.zeros((1, 8, 64)), jnp.zeros((1, 8), jnp.int32)).compile().as_text()
    assert text is not None and "all-gather" not in text
    assert "all-reduce" in text
