"""Losses of the generated train steps: layers, stacks of layers, and auxiliary parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

if TYPE_CHECKING:
    from dhelix.tests.passes.programs import Program

WIDTH, ROWS, WORDS = 4, 3, 5
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
_POLICIES = {
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "named": jax.checkpoint_policies.save_only_these_names("before_tanh"),
}

STACKS = (
    "scan", "backwards", "counted", "by_two", "shared", "same_way", "buffered", "groups", "unrolled", "frozen",
    "encoder_decoder", "skipping",
)  # fmt: skip
_SECOND = ("frozen", "encoder_decoder", "skipping")  # stacks of two kinds of layers
LAYERS = ("mlp", "plain", "norm", "attention", "cond", "search", "sort", "custom", "recurrent")
REMATS = ("", "layer", "loss", *_POLICIES)
DROPOUTS = ("", "seeds", "carried")
AUXILIARIES = ("", "carried", "stacked", "skip", "buffer", "dense", "penalty")


def parameter_shapes(p: Program) -> dict[str, tuple[int, ...]]:
    layers = {"groups": (p.depth, p.other_depth), "shared": ()}.get(p.stack, (p.depth,))
    shapes = {"w": (*layers, WIDTH, WIDTH), "b": (*layers, WIDTH), "head": (WIDTH, WORDS if p.tokens else WIDTH)}
    if p.stack in _SECOND:
        other = p.depth if p.stack == "skipping" else p.other_depth
        shapes |= {"w2": (other, WIDTH, WIDTH), "b2": (other, WIDTH)}
    if p.tokens:
        shapes |= {"table": (WORDS, WIDTH)}
    return shapes


def last_layers(p: Program) -> str:
    """Weights whose gradient the backward layer loop makes. The head's gradient belongs to the forward part."""
    return "w2" if p.stack == "frozen" else "w"


def loss_function(p: Program) -> Callable[..., Any]:
    """loss(parameters, batch, state, constants) -> loss, {"activations": ..., "mean": ...}."""
    loss = functools.partial(_loss, p)
    return jax.checkpoint(loss) if p.remat == "loss" else loss


def _loss(p: Program, params: Any, batch: Any, state: Any, constants: Any) -> tuple[jax.Array, Any]:
    params = jax.tree.map(lambda x: x.astype(DTYPES[p.dtype]), params)
    if p.stack == "frozen":
        params = dict(params, **{name: jax.lax.stop_gradient(params[name]) for name in ("w", "b")})
    x = params["table"][batch["words"]] if p.tokens else batch["x"].astype(DTYPES[p.dtype])
    if p.constants:
        x = x + constants.astype(x.dtype)
    if "average" in state:
        x = x + state["average"].astype(x.dtype)
    if "history" in state:
        x = x + state["history"][0].astype(x.dtype)
    if p.refused == "gated":
        x = jnp.where(state["gated"] > 0.1, x, x / 2)
    key = None
    if p.dropout:
        key = state["key"] if p.dropout == "carried" else jax.random.key(batch["seed"].reshape(-1)[0])
    x, auxiliary, outputs = _stack(p, params, x, key)
    if p.auxiliary == "penalty":
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(_stack(p, params, x, key)[0]).astype(jnp.float32)))(x)
        auxiliary = jnp.mean(gradient * gradient)
    y = (x @ params["head"]).astype(jnp.float32)
    if p.tokens:
        y = y + (x @ params["table"].T).astype(jnp.float32)
        picked = jnp.take_along_axis(jax.nn.log_softmax(y), batch["words"][:, None], axis=-1)
        loss = -jnp.sum(picked * batch["weight"][:, None]) / jnp.sum(batch["weight"])
    else:
        loss = jnp.mean((y - batch["x"]) ** 2)
    loss = loss + 0.1 * auxiliary.astype(jnp.float32)
    if p.refused == "loss_scale":
        loss = loss * state["loss_scale"]
    return loss, {"activations": outputs, "mean": jnp.mean(x.astype(jnp.float32))}


def _stack(p: Program, params: Any, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array, Any]:
    """Output of the layers, auxiliary loss, and the other outputs of each layer."""
    layer = _checkpointed_layer(p)
    carry = {"x": x}
    if p.auxiliary == "carried":
        carry["auxiliary"] = jnp.zeros((), x.dtype)
    if p.auxiliary in ("buffer", "dense"):
        carry["buffer"] = jnp.zeros((p.depth, *x.shape), x.dtype)

    def body(carry: Any, layer_input: Any) -> tuple[Any, Any]:
        index, (w, b), key = layer_input
        x = carry["x"] + jnp.mean(carry["buffer"], axis=0) if p.auxiliary == "dense" else carry["x"]
        y = layer(x, w, b, key)
        carry = dict(carry, x=y)
        if "auxiliary" in carry:
            carry["auxiliary"] += jnp.mean(y * y)
        if "buffer" in carry:
            carry["buffer"] = jax.lax.dynamic_update_index_in_dim(carry["buffer"], y, index, 0)
        wanted = p.auxiliary in ("stacked", "skip") or p.stack == "skipping" or "activations" in p.metrics
        return carry, y if wanted else None

    count = p.depth * p.other_depth if p.stack == "groups" else p.depth
    keys = None if key is None else jax.random.split(key, count)
    carry, outputs = _run_layers(p, body, carry, (params["w"], params["b"]), keys)
    if p.stack in _SECOND:
        carry["x"] = _second_stack(p, params, carry["x"], outputs)
    x, auxiliary = carry["x"], carry.get("auxiliary", jnp.zeros((), x.dtype))
    if p.auxiliary == "stacked":
        auxiliary = jnp.sum(jnp.mean(outputs * outputs, axis=(-1, -2)))
    if p.auxiliary == "skip":
        x = x + outputs.reshape(-1, *x.shape)[0]
    if p.auxiliary in ("buffer", "dense"):
        auxiliary = jnp.mean(carry["buffer"] * carry["buffer"])
    return x, auxiliary, outputs


def _checkpointed_layer(p: Program) -> Callable[..., jax.Array]:
    layer = functools.partial(_layer, p)
    return jax.checkpoint(layer, policy=_POLICIES.get(p.remat)) if p.remat in ("layer", *_POLICIES) else layer


def _second_stack(p: Program, params: Any, encoded: jax.Array, outputs: Any) -> jax.Array:
    """The second stack: layers that are not frozen, or a decoder.

    Decoder layers read the encoder's result ("encoder_decoder"), or one encoder layer's output each ("skipping").
    """

    def body(x: jax.Array, xs: Any) -> tuple[jax.Array, None]:
        (w, b), skipped = xs
        if p.stack == "skipping":  # less work than an encoder layer, but more in the backward pass
            return (x @ w + b) * skipped, None
        x = _layer(p, x, w, b, None)
        return (x + encoded if p.stack == "encoder_decoder" else x), None

    weights = params["w2"], params["b2"]
    skipping = p.stack == "skipping"
    return jax.lax.scan(body, encoded, (weights, outputs if skipping else None), reverse=skipping)[0]


def _run_layers(p: Program, body: Callable[..., Any], carry: Any, weights: Any, keys: Any) -> tuple[Any, Any]:
    indices = jnp.arange(p.depth)

    def at(n: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, n, 0, False), (weights, keys))

    def group(carry: Any, xs: Any) -> Any:
        index, weights, keys = xs
        return jax.lax.scan(lambda c, ys: body(c, (index, *ys)), carry, (weights, keys))

    match p.stack:
        case "shared":
            return jax.lax.scan(lambda c, xs: body(c, (xs[0], weights, xs[1])), carry, (indices, keys), p.depth)
        case "groups":
            keys = None if keys is None else keys.reshape(p.depth, p.other_depth)
            return jax.lax.scan(group, carry, (indices, weights, keys))
        case "unrolled":
            outputs = []
            for n in range(p.depth):
                carry, y = body(carry, (n, *jax.tree.map(lambda x, n=n: x[n], (weights, keys))))
                outputs.append(y)
            return carry, None if outputs[0] is None else jnp.stack(outputs)
        case "same_way" | "buffered":
            x, outputs = _own_backward(p.stack, carry["x"], weights)
            return dict(carry, x=x), outputs
        case "counted":
            return jax.lax.scan(lambda c, n: body(c, (n, *at(n))), carry, indices)
        case _:
            unroll = 2 if p.stack == "by_two" else 1
            reverse = p.stack == "backwards"
            return jax.lax.scan(body, carry, (indices, weights, keys), reverse=reverse, unroll=unroll)


def _with_own_backward(stack: str, x: jax.Array, weights: Any) -> tuple[jax.Array, jax.Array]:
    """Layers with their own backward pass, which reads the layers' outputs and is not their true gradient.

    "same_way": backward visits the layers in the order of the forward pass.
    "buffered": backward visits them in the opposite order, but forward reads earlier results while it stores its own.
    """

    def body(carry: Any) -> Any:
        index, x, buffer = carry
        w, b = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, False), weights)
        x = jnp.tanh(x @ w + b + (jnp.mean(buffer, axis=0) if stack == "buffered" else 0))
        return index + 1, x, jax.lax.dynamic_update_index_in_dim(buffer, x, index, 0)

    depth = weights[0].shape[0]
    start = (jnp.int32(0), x, jnp.zeros((depth, *x.shape), x.dtype))
    return jax.lax.while_loop(lambda carry: carry[0] < depth, body, start)[1:]


def _own_backward_forward(stack: str, x: jax.Array, weights: Any) -> tuple[Any, Any]:
    result = _with_own_backward(stack, x, weights)
    return result, (result[1], weights)


def _own_backward_backward(stack: str, residuals: Any, cotangents: Any) -> Any:
    def body(g: jax.Array, xs: Any) -> tuple[jax.Array, Any]:
        y, further, (w, _) = xs
        g = g * (1 - y * y) + further
        return g @ w.T, (y.T @ g, jnp.sum(g, axis=0))

    outputs, weights = residuals
    g, further = cotangents
    return jax.lax.scan(body, g, (outputs, further, weights), reverse=stack == "buffered")


_own_backward: Any = jax.custom_vjp(_with_own_backward, nondiff_argnums=(0,))
_own_backward.defvjp(_own_backward_forward, _own_backward_backward)


@jax.custom_vjp
def _cubic(x: jax.Array) -> jax.Array:
    return x * x * x


_cubic.defvjp(lambda x: (_cubic(x), x), lambda x, g: (g * x * jnp.sin(x),))


def _layer(p: Program, x: jax.Array, w: jax.Array, b: jax.Array, key: jax.Array | None) -> jax.Array:
    h = checkpoint_name(x @ w + b, "before_tanh")
    if p.constants:
        h = h * jnp.cos(jnp.arange(WIDTH, dtype=jnp.float32) / WIDTH).astype(h.dtype)
    match p.layer:
        case "norm":
            y = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1)
        case "attention":
            scores = h @ x.T
            if p.constants:
                scores = jnp.where(jnp.tri(*scores.shape, dtype=bool), scores, -1e4)
            y = jax.nn.softmax(scores, axis=-1) @ x
        case "cond":
            y = jax.lax.cond(jnp.sum(h) > 0, jnp.tanh, lambda h: h * 0.5, h)
        case "search":  # its trip count depends on the data
            size = jax.lax.stop_gradient(jnp.sum(jnp.abs(h)).astype(jnp.float32))
            scale = jax.lax.while_loop(lambda s: s * size > 1, lambda s: s * 0.5, jnp.float32(1))
            y = h * scale.astype(h.dtype)
        case "sort":
            y = jnp.tanh(jnp.take_along_axis(h, jnp.argsort(jax.lax.stop_gradient(h), axis=0), axis=0))
        case "custom":
            y = _cubic(h / 4)
        case "plain":  # its output is its residual, and it has more work than a "skipping" layer
            return jnp.exp(jnp.tanh(jnp.tanh(h) @ w) @ w)
        case "recurrent":
            y = jax.lax.scan(lambda s, row: (jnp.tanh(s + row), s), jnp.zeros_like(h[0]), h)[1]
        case _:
            y = jnp.tanh(h)
    if key is not None:
        y = jnp.where(jax.random.bernoulli(key, 0.8, y.shape), y, jnp.zeros_like(y))
    return x + y
