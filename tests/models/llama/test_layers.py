"""Properties of Llama's layers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dhelix.models import LlamaConfig
from dhelix.models.common.layers import rotate
from dhelix.models.common.parallel import SINGLE_DEVICE
from dhelix.models.llama.layers import attention_block, rms_norm, rotation
from dhelix.tests.models.tiny import TINY

CONFIG = dataclasses.replace(TINY, kv_heads=2)


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x, weight = normal(0, 2, 3, 32), normal(1, 32)
    expected = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(rms_norm(x, weight, 1e-5), expected, rtol=1e-6)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    query, key = (jnp.broadcast_to(normal(seed, 8), (1, 12, 1, 8)) for seed in (0, 1))
    by = rotation(CONFIG, jnp.arange(12))
    scores = np.einsum("bsnd,btnd->st", rotate(query, by), rotate(key, by))
    for distance in range(-11, 12):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-4)
    assert np.ptp(scores[0]) > 0.1


def test_rope_factor_stretches_low_frequencies_only() -> None:
    config = LlamaConfig(head_dim=128)
    plain, stretched = (
        np.arctan2(sin[1], cos[1])[0]
        for cos, sin in (rotation(dataclasses.replace(config, rope_factor=f), jnp.arange(2)) for f in (1.0, 8.0))
    )
    wavelength = 2 * np.pi / plain
    np.testing.assert_allclose(stretched[wavelength < 2048], plain[wavelength < 2048], rtol=1e-6)
    np.testing.assert_allclose(stretched[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-6)
    assert np.all(np.diff(stretched) < 0)


def attention_weights(config: LlamaConfig) -> dict[str, Any]:
    heads, kv_heads = (config.heads, config.head_dim), (config.kv_heads, config.head_dim)
    return {
        "attention_norm": np.ones(config.hidden, np.float32),
        "wq": 0.1 * normal(1, config.hidden, *heads),
        "wk": 0.1 * normal(2, config.hidden, *kv_heads),
        "wv": 0.1 * normal(3, config.hidden, *kv_heads),
        "wo": 0.1 * normal(4, *heads, config.hidden),
    }


def test_attention_is_causal() -> None:
    @jax.jit
    def attend(x: Any) -> jax.Array:
        return attention_block(CONFIG, SINGLE_DEVICE, attention_weights(CONFIG), x, rotation(CONFIG, jnp.arange(10)))

    x = normal(0, 1, 10, 32)
    before, after = attend(x), attend(x + (np.arange(10) == 6)[:, None].astype(np.float32))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.all(np.any(before[:, 6:] != after[:, 6:], axis=-1))


def test_grouped_heads_share_their_keys_and_values() -> None:
    full = dataclasses.replace(CONFIG, kv_heads=CONFIG.heads)
    x, weights, by = normal(0, 2, 10, 32), attention_weights(CONFIG), rotation(CONFIG, jnp.arange(10))
    repeated = weights | {name: np.repeat(weights[name], 2, axis=1) for name in ("wk", "wv")}
    attend = jax.jit(attention_block, static_argnums=(0, 1))
    grouped, separate = (attend(c, SINGLE_DEVICE, w, x, by) for c, w in ((CONFIG, weights), (full, repeated)))
    np.testing.assert_allclose(grouped, separate, rtol=1e-4, atol=1e-5)
