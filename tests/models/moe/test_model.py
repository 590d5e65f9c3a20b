"""The model's counts of parameters, its loss, and the gradients of its products."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhelix.models.common.parallel import SINGLE_DEVICE
from dhelix.models.moe import model
from dhelix.models.moe.moe_config import MOE_PRESETS, LongRope, MoeConfig
from dhelix.models.moe.wide_gradients import product, widen

TINY = dataclasses.replace(
    MOE_PRESETS["phi-moe-demo"],
    vocab=64,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=24,
    seq=24,
    experts=4,
)


BIASED = dataclasses.replace(TINY, norm="layer", attention_bias=True, head_bias=True, routing="sparsemixer")


@pytest.mark.parametrize("config", [*MOE_PRESETS.values(), BIASED], ids=[*MOE_PRESETS, "biased"])
def test_counts_are_those_of_the_parameters(config: MoeConfig) -> None:
    shapes = jax.eval_shape(lambda key: model.init_params(config, key), jax.random.key(0))
    assert config.parameter_count == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert jax.tree.structure(shapes) == jax.tree.structure(
        model.param_specs(config), is_leaf=lambda s: not isinstance(s, dict)
    )


@pytest.mark.parametrize(("seq", "factors", "scale"), [(8, [1.0, 1.5, 2.0, 3.0], 1.2), (9, [1.0, 2.0, 8.0, 20.0], 1.3)])
def test_rows_longer_than_those_of_training_are_stretched_more(seq: int, factors: list[float], scale: float) -> None:
    rope = LongRope((1.0, 1.5, 2.0, 3.0), (1.0, 2.0, 8.0, 20.0), 1.2, 1.3, trained=8)
    config = dataclasses.replace(TINY, long_rope=rope)
    angle = np.arange(seq)[:, None] * config.rope_theta ** (-np.arange(4) / 4) / np.array(factors)
    cos, sin = model.rotary(config, SINGLE_DEVICE, seq)
    np.testing.assert_allclose(cos[:, 0], scale * np.cos(angle), atol=1e-6)
    np.testing.assert_allclose(sin[:, 0], scale * np.sin(angle), atol=1e-6)


def test_an_unknown_word_is_one_error() -> None:
    with pytest.raises(ValueError, match="norm='batch' is unknown; use 'rms' or 'layer'"):
        dataclasses.replace(TINY, norm="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="routing='random' is unknown; use 'softmax' or 'sparsemixer'"):
        dataclasses.replace(TINY, routing="random")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("phi-moe-42b", 41.9, 6.6), ("olmoe-1b-7b", 6.9, 1.3), ("phi-moe-31b", 31.5, 5.1), ("phi-moe-16b", 15.9, 2.7)],
)
def test_presets_have_the_published_sizes(name: str, total: float, active: float) -> None:
    config = MOE_PRESETS[name]
    assert config.parameter_count / 1e9 == pytest.approx(total, abs=0.06)
    assert config.active_parameter_count / 1e9 == pytest.approx(active, abs=0.06)


@pytest.mark.parametrize("spec", ["erh,ehf->erf", "erf,efh->erh"])
def test_wide_gradients_are_not_rounded(spec: str) -> None:
    """In bfloat16, the derivative by the weight has an error as of float32; the derivative by the rows is JAX's own."""
    sizes = dict(zip("erhf", (2, 8, 5, 6), strict=True))
    random, (of_rows, of_weight) = np.random.default_rng(0), spec.split("->")[0].split(",")
    rows, weight = (
        jnp.asarray(random.standard_normal([sizes[i] for i in of]), jnp.bfloat16) for of in (of_rows, of_weight)
    )

    def loss(multiply: Any, rows: jax.Array, weight: Any) -> jax.Array:
        return jnp.sum(multiply(rows, weight).astype(jnp.float32) ** 2)

    wide = jax.grad(functools.partial(loss, functools.partial(product, spec)), argnums=(0, 1))
    plain = jax.grad(functools.partial(loss, functools.partial(jnp.einsum, spec)), argnums=(0, 1))
    (by_rows, by_weight), (expected, rounded) = wide(rows, widen(weight)), plain(rows, weight)
    np.testing.assert_array_equal(by_rows, expected)
    assert by_weight.gradient.dtype == jnp.float32 and not np.any(by_weight.weight)
    np.testing.assert_allclose(by_weight.gradient, rounded.astype(np.float32), rtol=2**-8)
    y = jnp.einsum(spec, rows, weight).astype(jnp.float32)
    exact = np.einsum(f"{of_rows},{spec[-3:]}->{of_weight}", *(np.float64(a) for a in (rows, 2 * y)))
    np.testing.assert_allclose(by_weight.gradient, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_loss_is_the_cross_entropy_and_the_weighted_routing_losses() -> None:
    config = dataclasses.replace(TINY, balance_weight=0.5, z_weight=0.25)
    params = model.init_params(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 25), 0, config.vocab)
    loss, metrics = model.objective(config, params, tokens[:, :-1], tokens[:, 1:])
    expected = metrics["cross_entropy"] + 0.5 * metrics["balance"] + 0.25 * metrics["z"]
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
