"""Every kind of program that the passes handle: plain against interleaved over five optimizer steps on 8 devices.

The user's own loop stays, so additions keep their order, and results are equal to the last bit. XLA may still round
differently if it fuses or partitions the two programs differently (16-bit types, unrolled or grouped layers, automatic
sharding). Then each leaf agrees to 1e-6 of its largest magnitude, and 16-bit programs to two units of bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix import strand_interleave
from dhelix.tests.quick import slow_but

VOCAB, WIDTH, INNER, LAYERS, SEQ, MICROBATCHES, STEPS = 16, 8, 16, 4, 6, 3, 5
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
SPECS = {"embedding": P(), "head": P(), "up": P(None, None, "tp"), "down": P(None, "tp")}


@dataclass(frozen=True)
class Kind:
    """A program: the loops over micro-batches and layers, and the contents of the layers."""

    name: str
    loop: str = "scan"
    layers: str = "scan"
    manual: bool = True
    remat: str = ""
    dropout: bool = False
    aux: bool = False
    tied: bool = False
    dtype: Any = jnp.float32
    tolerance: float = 0.0


KINDS = (
    Kind("scan over micro-batches and layers, shard_map"),
    Kind("fori_loop over micro-batches", loop="fori_loop"),
    Kind("optax.microbatching", loop="optax", manual=False, tolerance=1e-6),
    Kind("layers in groups", layers="groups", tolerance=1e-6),
    Kind("layers in groups, checkpointed", layers="groups", remat="full", tolerance=1e-6),
    Kind("unrolled layers", layers="unrolled", tolerance=1e-6),
    Kind("automatic sharding", manual=False, tolerance=1e-6),
    Kind("automatic sharding, unrolled and checkpointed", "scan", "unrolled", False, "full", tolerance=1e-6),
    Kind("jax.checkpoint", remat="full"),
    Kind("jax.checkpoint of all but matrix products", remat="dots_saveable"),
    Kind("dropout keys split per micro-batch", dropout=True),
    Kind("auxiliary losses and metrics", aux=True),
    Kind("tied embedding", tied=True),
    Kind("bf16 compute, float32 accumulation", dtype=jnp.bfloat16, tolerance=2.0**-6),
)


def forward(kind: Kind, params: dict[str, jax.Array], tokens: jax.Array, key: jax.Array):
    """Mean cross-entropy of the next token and its metrics; tensor-parallel under shard_map if `kind.manual`."""
    params = jax.tree.map(lambda p: p.astype(kind.dtype), params)

    def layer(x: jax.Array, weights: tuple[jax.Array, ...]):
        up, down, layer_key = weights
        inner = jnp.tanh(x @ up)
        if kind.dropout:
            inner = inner * jax.random.bernoulli(layer_key, 0.9, inner.shape).astype(inner.dtype)
        out = inner @ down
        return x + (lax.psum(out, "tp") if kind.manual else out), jnp.mean(jnp.square(x), dtype=jnp.float32)

    if kind.remat:
        policy = None if kind.remat == "full" else getattr(jax.checkpoint_policies, kind.remat)
        layer = jax.checkpoint(layer, policy=policy)
    x = params["embedding"][tokens[:, :-1]]
    weights = params["up"], params["down"], jax.random.split(key, LAYERS)
    if kind.layers == "unrolled":
        sizes = []
        for n in range(LAYERS):
            x, size = layer(x, jax.tree.map(lambda w, n=n: w[n], weights))
            sizes.append(size)
    elif kind.layers == "groups":
        groups = jax.tree.map(lambda w: w.reshape(2, LAYERS // 2, *w.shape[1:]), weights)
        x, sizes = lax.scan(lambda x, group: lax.scan(layer, x, group), x, groups)
    else:
        x, sizes = lax.scan(layer, x, weights)
    head = params["embedding"].T if kind.tied else params["head"]
    logits = (x @ head).astype(jnp.float32)
    loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))
    if kind.aux:
        loss = loss + 1e-2 * jnp.mean(jnp.stack(list(sizes)))
    return loss, {"hits": jnp.sum(jnp.argmax(logits, -1) == tokens[:, 1:]), "sizes": jnp.stack(list(sizes))}


def accumulate(kind: Kind, params: dict[str, jax.Array], tokens: jax.Array):
    """Gradients and loss, summed over micro-batches in float32, and the loop's metrics. Tokens are `[rows, SEQ]`."""
    grad = jax.value_and_grad(partial(forward, kind), has_aux=True)
    keys = jax.random.split(jax.random.key(7), MICROBATCHES)
    if kind.loop == "optax":

        def loss_and_gradients(params: Any, tokens: jax.Array):
            (loss, _), gradients = grad(params, tokens, keys[0])
            return loss, gradients

        split = optax.microbatching.microbatch(
            loss_and_gradients,
            argnums=1,
            microbatch_size=tokens.shape[0] // MICROBATCHES,
            accumulator=optax.microbatching.AccumulationType.SUM,
        )
        loss, gradients = split(params, tokens)
        return gradients, loss, {}
    rows = tokens.reshape(-1, MICROBATCHES, SEQ).swapaxes(0, 1)

    def micro_batch(carry: Any, tokens: jax.Array, key: jax.Array):
        (loss, metrics), gradients = grad(params, tokens, key)
        return jax.tree.map(jnp.add, carry, (gradients, loss)), metrics

    start = jax.tree.map(jnp.zeros_like, params), jnp.zeros(())
    if kind.loop == "fori_loop":
        body: Callable[..., Any] = lambda i, carry: micro_batch(carry, rows[i], keys[i])[0]  # noqa: E731
        gradients, loss = lax.fori_loop(0, MICROBATCHES, body, start)
        return gradients, loss, {}
    (gradients, loss), metrics = lax.scan(lambda carry, xs: micro_batch(carry, *xs), start, (rows, keys))
    return gradients, loss, metrics if kind.aux else {}


def make_step(kind: Kind, mesh: Mesh):
    def local(params: dict[str, jax.Array], tokens: jax.Array):
        return jax.tree.map(lambda x: lax.pmean(x, "dp"), accumulate(kind, params, tokens))

    whole = partial(accumulate, kind)
    manual = jax.shard_map(local, mesh=mesh, in_specs=(SPECS, P("dp")), out_specs=(SPECS, P(), P()), check_vma=False)

    def step(state: Any, tokens: jax.Array):
        params, opt_state = state
        gradients, loss, metrics = (manual if kind.manual else whole)(params, tokens)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state)
        return (optax.apply_updates(params, updates), opt_state), (loss, metrics)

    return step


SLOW = {"layers in groups", "unrolled layers", "automatic sharding", "jax.checkpoint"}
"""Other kinds have these properties, too, and one more."""


@pytest.mark.parametrize(
    "kind", slow_but([kind for kind in KINDS if kind.name not in SLOW], KINDS), ids=lambda kind: kind.name
)
def test_five_steps_of_every_kind(kind: Kind) -> None:
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    draw = np.random.default_rng(0)
    shapes = {"embedding": (VOCAB, WIDTH), "head": (WIDTH, VOCAB)}
    shapes |= {"up": (LAYERS, WIDTH, INNER), "down": (LAYERS, INNER, WIDTH)}
    params = {
        name: jax.device_put(draw.standard_normal(shape, np.float32) * 0.3, NamedSharding(mesh, SPECS[name]))
        for name, shape in shapes.items()
    }
    step = make_step(kind, mesh)
    plain, interleaved = jax.jit(step), strand_interleave(step, strict=True)
    expected = actual = params, OPTIMIZER.init(params)
    for _ in range(STEPS):
        rows = draw.integers(0, VOCAB, (12 * MICROBATCHES, SEQ), dtype=np.int32)
        tokens = jax.device_put(rows, NamedSharding(mesh, P("dp")))
        expected, plain_results = plain(expected, tokens)
        actual, results = interleaved(actual, tokens)
        for want, got in zip(
            jax.tree.leaves((expected, plain_results)), jax.tree.leaves((actual, results)), strict=True
        ):
            allowed = kind.tolerance * float(np.max(np.abs(want), initial=0))
            np.testing.assert_allclose(got, want, rtol=0, atol=allowed)
    assert interleaved.report(actual, tokens)["strand-duplication"].changed
