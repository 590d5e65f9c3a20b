"""Routing against a loop over tokens in NumPy; dispatch and combine against JAX's own derivatives of the same sums."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhelix.models.moe.dispatch import combine, dispatch
from dhelix.models.moe.moe_config import MOE_PRESETS, MoeConfig
from dhelix.models.moe.routing import route, sparsemixer

DEMO = MOE_PRESETS["phi-moe-demo"]


def config(**changes: object) -> MoeConfig:
    return dataclasses.replace(DEMO, **changes)  # type: ignore[arg-type]


def by_hand(config: MoeConfig, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and weights of a loop: all first choices in token order, then all second choices."""
    tokens, experts = logits.shape
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    chosen = np.argsort(-p, axis=-1, kind="stable")[:, : config.chosen]
    weights = np.take_along_axis(p, chosen, -1)
    if config.normalise:
        weights /= weights.sum(-1, keepdims=True)
    capacity, taken = config.capacity(tokens), [0] * experts
    rows = np.full((tokens, config.chosen), experts * capacity)
    for k in range(config.chosen):
        for t in range(tokens):
            expert = chosen[t, k]
            if taken[expert] < capacity:
                rows[t, k] = expert * capacity + taken[expert]
                taken[expert] += 1
    return rows, weights


@pytest.mark.parametrize("tokens", [1, 60, 300])
@pytest.mark.parametrize(("chosen", "factor", "normalise"), [(1, 1.0, True), (2, 1.25, True), (3, 0.7, False)])
def test_tokens_go_where_a_loop_sends_them(tokens: int, chosen: int, factor: float, normalise: bool) -> None:
    if factor * tokens * chosen < DEMO.experts:
        factor = 8.0
    made = config(chosen=chosen, capacity_factor=factor, normalise=normalise)
    logits = np.random.default_rng(tokens).normal(size=(tokens, made.experts)).astype(np.float32) * 2
    found = jax.jit(lambda x: route(made, x))(logits)
    rows, weights = by_hand(made, logits)
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-5)
    assert float(found.dropped) == pytest.approx(np.mean(rows == made.experts * made.capacity(tokens)))
    choices = np.asarray(found.choices)
    for place in np.flatnonzero(choices < tokens * chosen):
        assert rows.reshape(-1)[choices[place]] == place
    assert np.sum(choices < tokens * chosen) == np.sum(rows < made.experts * made.capacity(tokens))


@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_sparsemixer_weighs_each_choice_among_the_experts_within_the_margin(jitter: float) -> None:
    logits = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    weights, chosen = jax.jit(lambda x: sparsemixer(x, 2, jitter))(logits)
    shared = 0
    for row, found, experts in zip(logits, weights, chosen, strict=True):
        order = np.argsort(-row)
        np.testing.assert_array_equal(experts, order[:2])
        for k in range(2):
            best = row[order[k]]
            near = [s for s in row[order[k:]] if (best - s) / max(abs(s), best) <= 2 * jitter]
            shared += len(near) > 1
            assert float(found[k]) == pytest.approx(1 / sum(np.exp(near - best)), rel=1e-5)
    assert (shared > 20) == (jitter > 0.0)


def test_sparsemixer_has_finite_gradients() -> None:
    taken = jax.grad(lambda x: jnp.sum(jnp.sin(sparsemixer(x, 2, 0.2)[0])))
    logits = np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32)
    for some in (logits, np.zeros((20, 4), np.float32)):
        assert np.all(np.isfinite(taken(some)))
    assert np.any(taken(logits))


def test_losses_of_a_balanced_and_of_a_lopsided_load() -> None:
    tokens, made = 64, config(chosen=1)
    balanced = 20.0 * jax.nn.one_hot(jnp.arange(tokens) % made.experts, made.experts)
    lopsided = 20.0 * jax.nn.one_hot(jnp.zeros(tokens, int), made.experts)
    assert float(route(made, balanced).balance) == pytest.approx(1.0, abs=1e-4)
    assert float(route(made, lopsided).balance) == pytest.approx(made.experts, rel=1e-4)
    assert float(route(made, lopsided).z) == pytest.approx(400.0, rel=1e-3)
    assert float(route(made, lopsided).dropped) == pytest.approx(1 - made.capacity(tokens) / tokens)


def test_dispatch_and_combine_have_the_derivatives_of_plain_sums() -> None:
    tokens, made = 96, config(capacity_factor=0.8)
    draw = np.random.default_rng(0)
    routing = route(made, jnp.asarray(draw.normal(size=(tokens, made.experts)), jnp.float32))
    assert float(routing.dropped) > 0.05
    x, mix = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((tokens, 16), (16, 16)))
    slots = made.experts * made.capacity(tokens)

    def ours(x: jax.Array, weights: jax.Array) -> jax.Array:
        rows = jnp.tanh(dispatch(x, routing.rows, routing.choices) @ mix)
        return jnp.sum(jnp.sin(combine(rows, weights, routing.rows, routing.choices)))

    def plain(x: jax.Array, weights: jax.Array) -> jax.Array:
        place = jax.nn.one_hot(routing.rows, slots)  # [T, k, E * C]; zeros where dropped
        rows = jnp.tanh(jnp.einsum("tks,th->sh", place, x) @ mix)
        return jnp.sum(jnp.sin(jnp.einsum("tks,tk,sh->th", place, weights, rows)))

    (value, gradients), (expected, wanted) = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(x, routing.weights) for f in (ours, plain)
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for one, other in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_no_scatter_adds_activations() -> None:
    """Only the inverse map of rows is scattered, in integers; a scatter of activations would be slow on GPUs."""
    made = config()

    def loss(x: jax.Array, router: jax.Array) -> jax.Array:
        routing = route(made, x @ router)
        rows = dispatch(x, routing.rows, routing.choices)
        return jnp.sum(combine(rows**2, routing.weights, routing.rows, routing.choices))

    text = jax.jit(jax.grad(loss)).lower(jnp.ones((64, 16)), jnp.ones((16, made.experts))).as_text()
    scatters = [line for line in text.splitlines() if '"stablehlo.scatter"' in line or "stablehlo.scatter(" in line]
    assert len(scatters) <= 2  # the map of rows, and the derivative of the k largest probabilities


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"chosen": 9}, "9 of 8 experts cannot be chosen"),
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**changes)


def test_a_capacity_below_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="room for 0.31 of 1 tokens"):
        route(DEMO, jnp.zeros((1, DEMO.experts)))
