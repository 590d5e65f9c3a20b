"""The model against one that computes all experts for all tokens; and its counts of parameters."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhelix.models import layers
from dhelix.models.moe import model
from dhelix.models.moe.experts import experts_block
from dhelix.models.moe.moe_config import MOE_PRESETS, MoeConfig
from dhelix.models.parallel import SINGLE_DEVICE

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


@pytest.mark.parametrize("name", MOE_PRESETS)
def test_counts_are_those_of_the_parameters(name: str) -> None:
    config = MOE_PRESETS[name]
    shapes = jax.eval_shape(lambda key: model.init_params(config, key), jax.random.key(0))
    assert config.parameter_count == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert jax.tree.structure(shapes) == jax.tree.structure(
        model.param_specs(config), is_leaf=lambda s: not isinstance(s, dict)
    )


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("phi-moe-42b", 41.9, 6.6), ("olmoe-1b-7b", 6.9, 1.3), ("phi-moe-31b", 31.5, 5.1), ("phi-moe-16b", 15.9, 2.7)],
)
def test_presets_have_the_published_sizes(name: str, total: float, active: float) -> None:
    config = MOE_PRESETS[name]
    assert config.parameter_count / 1e9 == pytest.approx(total, abs=0.06)
    assert config.active_parameter_count / 1e9 == pytest.approx(active, abs=0.06)


def dense_block(config: MoeConfig, weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Every expert computes every token; the weights of the experts that were not chosen are zero."""
    h = layers.rms_norm(x, weights["ffn_norm"], config.norm_eps)
    p = jax.nn.softmax(h @ weights["router"], axis=-1)
    least = jnp.sort(p, axis=-1)[..., -config.chosen, None]
    kept = jnp.where(p >= least, p, 0.0)
    if config.normalise:
        kept = kept / jnp.sum(kept, axis=-1, keepdims=True)
    gate, up = (jnp.einsum("bsh,ehf->bsef", h, weights[name]) for name in ("w_gate", "w_up"))
    y = jnp.einsum("bsef,efh,bse->bsh", jax.nn.silu(gate) * up, weights["w_down"], kept)
    if config.shared:
        y = y + (jax.nn.silu(h @ weights["shared_gate"]) * (h @ weights["shared_up"])) @ weights["shared_down"]
    return y


@pytest.mark.parametrize(
    ("chosen", "shared", "normalise"),
    [pytest.param(1, 0, True, marks=pytest.mark.slow), pytest.param(2, 0, True, marks=pytest.mark.slow), (3, 2, False)],
)
def test_a_layer_computes_what_all_experts_together_would(chosen: int, shared: int, normalise: bool) -> None:
    config = dataclasses.replace(TINY, chosen=chosen, shared=shared, normalise=normalise, capacity_factor=4.0)
    stacked = model.init_params(config, jax.random.key(1))["layers"]
    weights = {name: 10 * weight[0] for name, weight in stacked.items()}
    x = jax.random.normal(jax.random.key(2), (3, 16, config.hidden))

    def ours(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(experts_block(config, SINGLE_DEVICE, weights, x)[0]))

    def dense(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(dense_block(config, weights, x)))

    dropped = jax.jit(lambda x: experts_block(config, SINGLE_DEVICE, weights, x)[1][2])(x)
    assert float(dropped) == 0.0
    found, wanted = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(weights, x) for f in (ours, dense))
    # The gradient of the router of one chosen expert is zero, as the difference of terms as large as the others.
    largest = max(float(np.max(np.abs(other))) for other in jax.tree.leaves(wanted))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6 * largest + 1e-4 * float(np.max(np.abs(other))))


def test_the_loss_is_the_cross_entropy_and_the_weighted_routing_losses() -> None:
    config = dataclasses.replace(TINY, balance_weight=0.5, z_weight=0.25)
    params = model.init_params(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 25), 0, config.vocab)
    loss, metrics = model.loss(config, params, tokens[:, :-1], tokens[:, 1:])
    expected = metrics["cross_entropy"] + 0.5 * metrics["balance"] + 0.25 * metrics["z"]
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
