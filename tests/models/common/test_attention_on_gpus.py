"""Blocks of attention by cuDNN against the same blocks by XLA, on a GPU."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhelix.models.common.attention_blocks import Block, backward, forward, linear_bias

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_a_gpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cuda")[0]):
        yield


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("causal", "masked"), [(True, False), (False, False), (True, True), (False, True)])
def test_cudnn_computes_blocks_as_xla_does(causal: bool, masked: bool, biased: bool) -> None:
    random = np.random.default_rng(0)
    query, key, value, cotangent = (
        jnp.asarray(random.standard_normal((2, 256, heads, 64), np.float32), jnp.bfloat16) for heads in (8, 2, 2, 8)
    )
    segments = jnp.asarray(np.sort(random.integers(0, 3, (2, 256)), axis=1))
    mask = segments[:, :, None] == segments[:, None, :] if masked else None
    positions = jnp.stack([jnp.arange(256), 256 + jnp.arange(256)])
    bias = linear_bias(2.0 ** -jnp.arange(1.0, 9.0), positions, positions, jnp.bfloat16) if biased else None

    @functools.partial(jax.jit, static_argnums=0)
    def both(block: Block) -> Any:
        out, log_sums = forward(block, query, key, value, mask, bias)
        return out, log_sums, backward(block, query, key, value, out, log_sums + 0.5, cotangent, mask, bias)

    by_cudnn, by_xla = (jax.tree.leaves(both(Block(causal, which))) for which in ("cudnn", "xla"))
    for found, expected in zip(by_cudnn, by_xla, strict=True):
        found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
        assert np.abs(found - expected).max() <= 0.02 * np.abs(expected).max()
