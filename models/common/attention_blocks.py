"""Attention of a block of queries to a block of keys, and its derivative as a part of a larger attention.

    forward:   out, log_sums = forward(Block(causal), q, k, v)      softmax over the keys of this block alone
    backward:  dq, dk, dv = backward(Block(causal), q, k, v, whole_out, whole_log_sums, d_out)

Blocks of the same queries are merged by `log_sums`, the logarithms of the sums of a softmax. The derivative of the
whole attention is a sum over blocks: a block needs the whole attention's output and log-sums, not its own.

On GPUs, both are cuDNN's fused attention, which stores no scores. `jax.nn.dot_product_attention` rounds log-sums to the
compute type and has no derivative for a block, so this module calls cuDNN's custom calls by `jax.ffi.ffi_call`, with
the operands and the configuration that JAX's own lowering gives them (jax/_src/cudnn/fused_attention_stablehlo.py).
Elsewhere, scores are stored.
"""

import dataclasses
import functools
import json
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

Implementation = Literal["xla", "cudnn"]


def masked_score(dtype: Any) -> float:
    """The score of a masked key. It is finite in `dtype`, so that a query without visible keys gives no NaN."""
    return -0.7 * float(jnp.finfo(dtype).max)


@dataclasses.dataclass(frozen=True)
class Block:
    """How a block is computed.

    Attributes:
      causal: whether query n sees only the keys up to n. Otherwise it sees all keys.
      implementation: "cudnn" or "xla".
    """

    causal: bool
    implementation: Implementation


def linear_bias(slopes: jax.Array, queries: jax.Array, keys: jax.Array, dtype: Any) -> jax.Array:
    """Addends to scores that fall with the distance of a key (ALiBi), `[rows, heads, queries, keys]`.

    Args:
      slopes: how fast they fall for each head, float32 `[heads]`.
      queries, keys: positions in the sequence, int32 `[rows, queries]` and `[rows, keys]`.
      dtype: type of the result.
    """
    distance = keys[:, None, None, :] - queries[:, None, :, None]
    return (slopes[:, None, None] * distance).astype(dtype)


def forward(
    block: Block,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention within the block.

    Args:
      query: `[batch, queries, heads, head_dim]`.
      key, value: `[batch, keys, kv_heads, head_dim]`.
      mask: booleans `[batch, queries, keys]`; False hides a key. None: no mask.
      bias: addends to the scores, `[batch or 1, heads, queries, keys]`, without a derivative. None: no addends.

    Returns:
      The output, like `query`; and the log-sums, float32 `[batch, heads, queries]`.
    """
    if block.implementation == "cudnn":
        outputs = [_transposed(query), jax.ShapeDtypeStruct(_statistics(query), jnp.float32)]
        addends = _addends(mask, bias, query)
        out, log_sums = _cudnn(block, query, key, [query, key, value, *addends], outputs, bool(addends))
        return out.swapaxes(1, 2), log_sums
    scores = _scores(block, query, key, mask, bias)
    log_sums = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - log_sums[..., None])
    out = jnp.einsum("bkgqs,bskh->bqkgh", weights.astype(value.dtype), value)
    return out.reshape(query.shape), log_sums.reshape(_statistics(query))


def backward(
    block: Block,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    log_sums: jax.Array,
    cotangent: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The block's part of the derivatives of a larger attention.

    Args:
      query, key, value, mask, bias: see `forward`.
      out, log_sums: the larger attention's output and log-sums of the block's queries.
      cotangent: the cotangent of `out`.

    Returns:
      The block's addends to the cotangents of query, key and value.
    """
    if block.implementation == "cudnn":
        outputs = [_transposed(each) for each in (query, key, value)]
        addends = _addends(mask, bias, query)
        operands = [query, key, value, log_sums, cotangent, *addends, out]
        gradients = _cudnn(block, query, key, operands, outputs, bool(addends), backward=True)
        dq, dk, dv = (gradient.swapaxes(1, 2) for gradient in gradients)
        return dq, dk, dv
    wide = jnp.float32
    grouped = (*key.shape[:1], query.shape[1], key.shape[2], -1, query.shape[3])
    scores = _scores(block, query, key, mask, bias)
    weights = jnp.exp(scores - log_sums.reshape(*scores.shape[:-1], 1))
    d_out, q = cotangent.astype(wide).reshape(grouped), query.astype(wide).reshape(grouped)
    inner = jnp.sum(d_out * out.astype(wide).reshape(grouped), axis=-1)
    d_weights = jnp.einsum("bqkgh,bskh->bkgqs", d_out, value.astype(wide))
    d_scores = weights * (d_weights - inner.transpose(0, 2, 3, 1)[..., None]) / math.sqrt(query.shape[3])
    dq = jnp.einsum("bkgqs,bskh->bqkgh", d_scores, key.astype(wide)).reshape(query.shape)
    dk = jnp.einsum("bkgqs,bqkgh->bskh", d_scores, q)
    dv = jnp.einsum("bkgqs,bqkgh->bskh", weights, d_out)
    return dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(
    block: Block,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    slopes: jax.Array,
) -> jax.Array:
    """The output of a whole attention with `linear_bias`, which has no derivative.

    `jax.nn.dot_product_attention` would compute one, as large as the scores. But XLA's partitioner can split JAX's
    attention, and not this one.

    Args:
      query, key, value, mask: see `forward`. `mask` may be None.
      slopes: float32 `[heads]`.
    """
    return _attention(block, query, key, value, mask, slopes)[0]


def _attention(
    block: Block,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    slopes: jax.Array,
):
    out, log_sums = forward(block, query, key, value, mask, _whole_bias(slopes, query))
    return out, (query, key, value, mask, slopes, out, log_sums)


def _attention_backward(block: Block, kept: tuple, cotangent: jax.Array):
    query, key, value, mask, slopes, out, log_sums = kept
    bias = _whole_bias(slopes, query)
    return *backward(block, query, key, value, out, log_sums, cotangent, mask, bias), None, None


attention.defvjp(_attention, _attention_backward)


def _whole_bias(slopes: jax.Array, query: jax.Array) -> jax.Array:
    positions = jnp.arange(query.shape[1])[None]
    return linear_bias(slopes, positions, positions, query.dtype)


def _scores(
    block: Block, query: jax.Array, key: jax.Array, mask: jax.Array | None, bias: jax.Array | None
) -> jax.Array:
    """Scaled and masked scores, float32 `[batch, kv_heads, group, queries, keys]`."""
    batch, queries, _, head_dim = query.shape
    grouped = query.reshape(batch, queries, key.shape[2], -1, head_dim)
    scores = jnp.einsum("bqkgh,bskh->bkgqs", grouped, key, preferred_element_type=jnp.float32) / math.sqrt(head_dim)
    if bias is not None:
        scores += bias.reshape(-1, *scores.shape[1:])
    if block.causal:
        scores = jnp.where(jnp.tri(queries, key.shape[1], dtype=bool), scores, masked_score(scores.dtype))
    return scores if mask is None else jnp.where(mask[:, None, None], scores, masked_score(scores.dtype))


def _statistics(query: jax.Array) -> tuple[int, int, int]:
    return (query.shape[0], query.shape[2], query.shape[1])


def _addends(mask: jax.Array | None, bias: jax.Array | None, query: jax.Array) -> list[jax.Array]:
    """cuDNN's form of a mask and a bias: addends to the scores, `[batch, heads or 1, queries, keys]`."""
    shown = jnp.zeros((), query.dtype) if bias is None else bias.astype(query.dtype)
    if mask is None:
        return [] if bias is None else [shown]
    hidden = jnp.asarray(masked_score(query.dtype), query.dtype)
    return [jnp.where(mask[:, None], shown, hidden)]


def _transposed(x: jax.Array) -> jax.ShapeDtypeStruct:
    """The shape of a result of cuDNN for `x [batch, seq, heads, head_dim]`: heads are before the sequence."""
    batch, seq, heads, head_dim = x.shape
    return jax.ShapeDtypeStruct((batch, heads, seq, head_dim), x.dtype)


_TARGETS = {
    (False, False): "__cudnn$fmhaSoftmax",
    (False, True): "__cudnn$fmhaScaleBiasSoftmax",
    (True, False): "__cudnn$fmhaSoftmaxBackward",
    (True, True): "__cudnn$fmhaScaleBiasSoftmaxBackward",
}
# Dimension numbers of the products of operands [batch, seq, heads, head_dim] and scores [batch, heads, queries, keys]:
# contracted dimension of both sides, and batch dimensions of both sides.
_PRODUCTS = {
    False: {"bmm1": ((3, 3), ((0, 2), (0, 2))), "bmm2": ((3, 1), ((0, 1), (0, 2)))},
    True: {
        "bmm1_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
        "bmm1_grad_gemm2": ((3, 1), ((0, 1), (0, 2))),
        "bmm2_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
        "bmm2_grad_gemm2": ((3, 3), ((0, 2), (0, 2))),
    },
}


def _cudnn(
    block: Block,
    query: jax.Array,
    key: jax.Array,
    operands: list[jax.Array],
    outputs: list[jax.ShapeDtypeStruct],
    biased: bool,
    backward: bool = False,
) -> list[jax.Array]:
    """The outputs of cuDNN's custom call, without its workspace.

    4-dimensional outputs are [batch, heads, seq, head_dim], but lie in memory as [batch, seq, heads, head_dim].
    """
    workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)
    call = jax.ffi.ffi_call(
        _TARGETS[backward, biased],
        [*outputs, workspace],
        output_layouts=[(0, 2, 1, 3) if len(output.shape) == 4 else None for output in (*outputs, workspace)],
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(_backend_config(block, query, key, backward)),
    )
    return list(call(*operands))[:-1]


def _backend_config(block: Block, query: jax.Array, key: jax.Array, backward: bool) -> dict[str, Any]:
    batch, queries, heads, head_dim = query.shape
    types = {jnp.dtype("bfloat16"): "BF16", jnp.dtype("float16"): "F16"}
    if jnp.dtype(query.dtype) not in types:
        raise ValueError(f"cuDNN's attention has no form for {query.dtype}; use bfloat16, float16 or attention='xla'")
    products = {
        f"{name}_dot_dimension_numbers": {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": [str(each) for each in left_batch],
            "rhs_batch_dimensions": [str(each) for each in right_batch],
        }
        for name, ((left, right), (left_batch, right_batch)) in _PRODUCTS[backward].items()
    }
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": 1 / math.sqrt(head_dim),
        "intermediate_tensor_shape": {
            "element_type": types[jnp.dtype(query.dtype)],
            "dimensions": [str(size) for size in (batch, heads, queries, key.shape[1])],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if block.causal else "NO_MASK",
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
        **products,
    }
    return {"operation_queue_id": "0", "cudnn_fmha_backend_config": attention}
