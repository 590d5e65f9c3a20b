"""A chain's passes equal jax.vjp of the whole chain, and keep nothing between them that depends on weights alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhelix.runtime.pipeline.chain import take_apart, trace
from dhelix.runtime.pipeline.derivatives import Derivatives, derive
from dhelix.tests.runtime.pipeline.models import HIDDEN, SEQ, WIDTH, assert_close, init_params, layer, nll, tokens

LAYERS, ROWS, WEIGHT = 2, 3, 0.5
PARAMS = init_params(LAYERS)
LEAVES, TREE = jax.tree.flatten(PARAMS)


def loss(p: Any, rows: Any, scale: Any) -> Any:
    """A loss with a context for its layers, a weight that is cast, and a counter in the state."""

    def body(state: Any, w: Any) -> Any:
        x, count = state
        w = {**w, "w_out": jnp.tanh(w["w_out"].astype(jnp.bfloat16)).astype(jnp.float32)}
        return (layer(x, w) * jnp.exp(scale) + count, count + 1), None

    start = p["embedding"][rows[:, :-1]], jnp.int32(0)
    (x, _), _ = jax.lax.scan(body, start, p["layers"])
    return jnp.mean(nll(p, x, rows[:, 1:])), jnp.sum(rows)


def derivatives() -> tuple[Derivatives, Any]:
    def flat(*args: Any) -> list[Any]:
        return list(loss(TREE.unflatten(args[: len(LEAVES)]), *args[len(LEAVES) :]))

    batch = [jnp.asarray(tokens(ROWS)), jnp.float32(0.1)]
    chain = take_apart(trace(flat, LEAVES, batch), len(LEAVES))
    return derive(chain, [LEAVES[i] for i in chain.end_leaves], batch, lambda batch: jnp.float32(WEIGHT)), batch


@pytest.fixture(scope="module")
def parts() -> tuple[Derivatives, Any]:
    return derivatives()


def test_passes_of_all_parts_make_up_the_gradients(parts: Any) -> None:
    of, batch = parts

    def by_parts(params: Any) -> Any:
        ends = [params["embedding"], params["head"], params["scale"]]
        weights = [jax.tree.leaves(jax.tree.map(lambda w, n=n: w[n], params["layers"])) for n in range(LAYERS)]
        context, x, kept = of.context(batch), of.embed(ends, batch), []
        for each in weights:
            x, residuals = of.layer_forward(context, x, each)
            kept.append(residuals)
        cotangents, of_head, outputs = of.head(ends, batch, x)
        of_layers = []
        for each, residuals in zip(reversed(weights), reversed(kept), strict=True):
            cotangents, gradients = of.layer_backward(context, each, residuals, cotangents)
            of_layers.insert(0, gradients)
        of_embedding = of.embed_backward(ends, batch, cotangents)
        embedding, head, scale = (a + b for a, b in zip(of_head, of_embedding, strict=True))
        layers = dict(zip(sorted(params["layers"]), map(jnp.stack, zip(*of_layers, strict=True)), strict=True))
        return outputs, {"embedding": embedding, "head": head, "layers": layers, "scale": scale}

    outputs, gradients = jax.jit(by_parts)(PARAMS)
    (value, count), expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(PARAMS, *batch)
    assert_close(outputs, [WEIGHT * value, count])
    assert_close(gradients, jax.tree.map(lambda g: WEIGHT * g, expected), tolerance=2e-6)


def test_values_without_a_gradient_are_handed_on(parts: Any) -> None:
    of, _ = parts
    assert [x.dtype for x in of.state] == [jnp.float32, jnp.int32]
    assert of.moving == (0,)
    assert of.trained == of.trained_ends == (0, 1, 2)


def test_only_what_depends_on_the_state_is_kept(parts: Any) -> None:
    of, _ = parts
    assert of.context_of_batch
    assert of.residuals
    rows = (ROWS, SEQ)
    assert all(residual.shape[:2] == rows for residual in of.residuals), of.residuals
    assert (WIDTH, HIDDEN) not in [residual.shape for residual in of.residuals]
    assert sum(np.prod(residual.shape[2:]) for residual in of.residuals) <= 5 * WIDTH + 3 * HIDDEN


def test_a_checkpointed_layer_keeps_its_input() -> None:
    def checkpointed(*args: Any) -> list[Any]:
        p, rows = TREE.unflatten(args[:-1]), args[-1]
        x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), p["embedding"][rows[:, :-1]], p["layers"])
        return [jnp.mean(nll(p, x, rows[:, 1:]))]

    batch = [jnp.asarray(tokens(ROWS))]
    chain = take_apart(trace(checkpointed, LEAVES, batch), len(LEAVES))
    of = derive(chain, [LEAVES[i] for i in chain.end_leaves], batch, lambda batch: jnp.float32(1))
    assert [residual.shape for residual in of.residuals] == [(ROWS, SEQ, WIDTH)]
    assert not of.context_of_batch


def test_a_micro_batch_of_no_weight_leaves_no_trace() -> None:
    def undefined(*args: Any) -> list[Any]:
        p, rows = TREE.unflatten(args[:-1]), args[-1]
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), p["embedding"][rows[:, :-1]], p["layers"])
        return [jnp.sum(nll(p, x, rows[:, 1:])) * (0.0 / jnp.sum(0 * rows))]

    batch = [jnp.asarray(tokens(ROWS))]
    chain = take_apart(trace(undefined, LEAVES, batch), len(LEAVES))
    ends = [LEAVES[i] for i in chain.end_leaves]
    of = derive(chain, ends, batch, lambda batch: jnp.float32(0))
    for value in jax.tree.leaves(of.head(ends, batch, [jnp.ones((ROWS, SEQ, WIDTH))])):
        assert not np.any(value)
