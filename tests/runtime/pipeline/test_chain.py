"""The parts of a loss function compose to the loss. If it is no chain of equal layers, the error gives the reason."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dhelix.errors import DhelixError
from dhelix.runtime.pipeline.chain import Chain, take_apart, trace
from dhelix.tests.quick import slow_after
from dhelix.tests.runtime.pipeline.models import HIDDEN, WIDTH, init_params, layer, loss, nll, tokens

LAYERS, ROWS = 3, 2
PARAMS, TOKENS = init_params(LAYERS), tokens(ROWS)
LEAVES, TREE = jax.tree.flatten(PARAMS)
EMBEDDING, HEAD, NORM, W_IN, W_OUT, SCALE = range(6)
KEY = np.array([1, 2], np.uint32)
Loss = Callable[..., Any]


def chain_of(loss_fn: Loss, *batch: Any) -> Chain:
    def flat(*args: Any) -> list[Any]:
        return jax.tree.leaves(loss_fn(TREE.unflatten(args[: len(LEAVES)]), *args[len(LEAVES) :]))

    return take_apart(trace(flat, LEAVES, batch or (TOKENS,)), len(LEAVES))


def composed(chain: Chain, *batch: Any) -> list[Any]:
    """Outputs of the loss function, computed from its parts."""
    ends, context = [LEAVES[i] for i in chain.end_leaves], chain.context(batch)
    x, stacks = chain.embed(ends, batch), chain.prepare([LEAVES[i] for i in chain.layer_leaves])
    assert [(v.shape, v.dtype) for v in stacks] == [(w.shape, w.dtype) for w in chain.weights]
    for number in range(chain.length):
        x = chain.layer(context, x, [stack[number] for stack in stacks])
    assert [(v.shape, v.dtype) for v in x] == [(s.shape, s.dtype) for s in chain.state]
    return chain.head(ends, batch, x)


def over_layers(p: Any, x: Any, body: Callable[..., Any] = layer, stacks: Any = None) -> Any:
    return lax.scan(lambda x, w: (body(x, w), None), x, p["layers"] if stacks is None else stacks)[0]


def cross_entropy(p: Any, x: Any, rows: Any) -> Any:
    return jnp.mean(nll(p, x, rows[:, 1:]))


def start(p: Any, rows: Any) -> Any:
    return p["embedding"][rows[:, :-1]]


def twice_jitted(p: Any, rows: Any) -> Any:
    return jax.jit(lambda p, rows: 2.0 * jax.jit(loss)(p, rows))(p, rows) + 1.0


def with_metrics(p: Any, rows: Any) -> Any:
    return loss(p, rows), {"tokens": rows.size, "norm": jnp.sum(p["head"] ** 2)}


def with_mask(p: Any, rows: Any) -> Any:
    mask = (rows[:, :-1] > 3).astype(jnp.float32)[..., None]
    return cross_entropy(p, over_layers(p, start(p, rows), lambda x, w: layer(x, w) * mask), rows)


def with_counter(p: Any, rows: Any) -> Any:
    def body(state: Any, w: Any) -> Any:
        x, count, total = state
        return layer(x, w) * (1 + 0.1 * count), count + 1, total + jnp.mean(x**2)

    x, count, total = over_layers(p, (start(p, rows), jnp.int32(0), jnp.float32(0)), body)
    return cross_entropy(p, x, rows) + 0.1 * total / count


def with_embedding_at_the_head(p: Any, rows: Any) -> Any:
    return cross_entropy({**p, "head": p["embedding"].T}, over_layers(p, start(p, rows)) + start(p, rows), rows)


def with_head_in_pieces(p: Any, rows: Any) -> Any:
    x, rows = over_layers(p, start(p, rows)), jnp.asarray(rows)

    def piece(total: Any, place: Any) -> Any:
        return total + jnp.sum(nll(p, x[:, place], rows[:, 1 + place])), None

    by_token = lax.scan(piece, jnp.float32(0), jnp.arange(x.shape[1]))[0]
    by_row = lax.scan(lambda t, r: (t + jnp.sum(nll(p, r[0], r[1])), None), jnp.float32(0), (x, rows[:, 1:]))[0]
    return by_token + by_row


def with_bfloat16_layers(p: Any, rows: Any) -> Any:
    cast = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p["layers"])
    x = over_layers(p, start(p, rows).astype(jnp.bfloat16), jax.checkpoint(layer), cast)
    return cross_entropy(p, x.astype(jnp.float32), rows)


def with_halves_of_a_weight(p: Any, rows: Any) -> Any:
    left, right = jnp.split(p["layers"]["w_in"], 2, axis=-1)
    split = {"norm": p["layers"]["norm"], "w_out": p["layers"]["w_out"], "left": left, "right": right}

    def body(x: Any, w: Any) -> Any:
        return layer(x, {**w, "w_in": jnp.concatenate([w["left"], w["right"]], axis=-1)})

    return cross_entropy(p, over_layers(p, start(p, rows), body, split), rows)


def with_a_frozen_weight(p: Any, rows: Any) -> Any:
    frozen = {**p["layers"], "w_in": lax.stop_gradient(p["layers"]["w_in"])}
    return cross_entropy(p, over_layers(p, start(p, rows), layer, frozen), rows)


@pytest.mark.parametrize(
    "loss_fn",
    slow_after(
        1,
        [
            loss,
            twice_jitted,
            with_metrics,
            with_mask,
            with_counter,
            with_embedding_at_the_head,
            with_head_in_pieces,
            with_bfloat16_layers,
            with_halves_of_a_weight,
            with_a_frozen_weight,
        ],
    ),
)
def test_parts_make_up_the_loss(loss_fn: Loss) -> None:
    chain = chain_of(loss_fn)
    assert chain.length == LAYERS
    assert chain.layer_leaves == (NORM, W_IN, W_OUT)
    assert chain.context_of_batch == (loss_fn is with_mask)
    for actual, expected in zip(composed(chain, TOKENS), jax.tree.leaves(loss_fn(PARAMS, TOKENS)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-2 if loss_fn is with_bfloat16_layers else 1e-6)


def test_ends_and_casts() -> None:
    plain, tied = chain_of(loss), chain_of(with_embedding_at_the_head)
    assert plain.end_leaves == (EMBEDDING, HEAD, SCALE)
    assert tied.end_leaves == (EMBEDDING, SCALE)
    assert sorted(plain.casts) == sorted(chain_of(with_bfloat16_layers).casts) == [0, 1, 2]
    assert all(w.dtype == jnp.bfloat16 for w in chain_of(with_bfloat16_layers).weights)
    assert chain_of(with_halves_of_a_weight).casts == ()


def test_random_keys_may_come_with_the_batch() -> None:
    def dropped_out(p: Any, rows: Any, key: Any) -> Any:
        def body(state: Any, w: Any) -> Any:
            x, count = state
            keep = jax.random.bernoulli(jax.random.fold_in(key, count), 0.5, x.shape)
            return jnp.where(keep, layer(x, w), 0), count + 1

        return cross_entropy(p, over_layers(p, (start(p, rows), 0), body)[0], rows)

    chain = chain_of(dropped_out, TOKENS, KEY)
    assert chain.context_of_batch
    np.testing.assert_allclose(composed(chain, TOKENS, KEY)[0], dropped_out(PARAMS, TOKENS, KEY), rtol=1e-6)


def no_scan(p: Any, rows: Any) -> Any:
    x = start(p, rows)
    for number in range(LAYERS):
        x = layer(x, jax.tree.map(lambda w, number=number: w[number], p["layers"]))
    return cross_entropy(p, x, rows)


def two_chains(p: Any, rows: Any) -> Any:
    first, second = ({name: w[part] for name, w in p["layers"].items()} for part in (slice(0, 1), slice(1, None)))
    return cross_entropy(p, over_layers(p, over_layers(p, start(p, rows), stacks=first), stacks=second), rows)


def reversed_layers(p: Any, rows: Any) -> Any:
    x, _ = lax.scan(lambda x, w: (layer(x, w), None), start(p, rows), p["layers"], reverse=True)
    return cross_entropy(p, x, rows)


def auxiliary_losses(p: Any, rows: Any) -> Any:
    x, norms = lax.scan(lambda x, w: (layer(x, w), jnp.mean(x**2)), start(p, rows), p["layers"])
    return cross_entropy(p, x, rows) + jnp.sum(norms)


def shared_weight(p: Any, rows: Any) -> Any:
    return cross_entropy(p, over_layers(p, start(p, rows), lambda x, w: layer(x, w) * p["scale"]), rows)


def embedding_in_each_layer(p: Any, rows: Any) -> Any:
    x = start(p, rows)
    return cross_entropy(p, over_layers(p, x, lambda y, w: layer(y, w) + x), rows)


def rows_beside_layers(p: Any, rows: Any) -> Any:
    stacks = p["layers"], jnp.stack([rows[:, :-1]] * LAYERS)
    x = over_layers(p, start(p, rows), lambda x, w: layer(x, w[0]) * w[1][..., None], stacks)
    return cross_entropy(p, x, rows)


def weight_decay(p: Any, rows: Any) -> Any:
    return loss(p, rows) + jnp.sum(p["layers"]["w_out"] ** 2)


def layer_numbers(p: Any, rows: Any) -> Any:
    stacks = p["layers"], jnp.arange(p["layers"]["norm"].shape[0])
    return cross_entropy(p, over_layers(p, start(p, rows), lambda x, w: layer(x, w[0]) * (1 + w[1]), stacks), rows)


REFUSED = [
    (layer_numbers, r"runs over int32\[3\], which depends on no parameter .* carry a counter through the layers"),
    (
        no_scan,
        "needs layers that are one jax.lax.scan over stacked parameters, but the loss function has no such scan",
    ),
    (two_chains, "needs one chain of equal layers, but the loss function has 2 loops over stacked parameters"),
    (reversed_layers, "the scan over layers runs in reverse; give it the layers in order"),
    (auxiliary_losses, r"the scan's ys, such as auxiliary losses\); carry their sum through the layers"),
    (shared_weight, "all layers share one parameter"),
    (embedding_in_each_layer, "all layers share one parameter"),
    (rows_beside_layers, "runs over values of the batch .* derive them inside the layer"),
    (weight_decay, rf"parameter {W_OUT} float32\[{LAYERS},{HIDDEN},{WIDTH}\] is used by the layers and by the emb"),
]


@pytest.mark.parametrize(("loss_fn", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_no_chain_is_refused(loss_fn: Loss, message: str) -> None:
    with pytest.raises(DhelixError, match=message) as refusal:
        chain_of(loss_fn)
    assert str(refusal.value).startswith("pipeline=") and "\n" not in str(refusal.value)


def test_a_key_for_each_layer_is_refused() -> None:
    def noisy(p: Any, rows: Any, key: Any) -> Any:
        stacks = p["layers"], jax.random.split(key, LAYERS)
        noise = lambda w: jax.random.normal(w[1], (WIDTH,))  # noqa: E731
        return cross_entropy(p, over_layers(p, start(p, rows), lambda x, w: layer(x, w[0]) + noise(w), stacks), rows)

    with pytest.raises(DhelixError, match=r"\(or random keys\), one per layer; derive them"):
        chain_of(noisy, TOKENS, KEY)
