"""A mixture-of-experts decoder: parameters, their shardings, the forward pass and the loss.

Parameters are those of `models.llama`, with these in place of the feed-forward network's in `layers`:

    router [L, hidden, E], w_gate, w_up [L, E, hidden, ffn], w_down [L, E, ffn, hidden]
    with shared experts: shared_gate, shared_up [L, hidden, shared ffn], shared_down [L, shared ffn, hidden]
    with LayerNorms: attention_norm_bias, ffn_norm_bias [L, hidden], final_norm_bias [hidden]
    with biases: bq [L, heads * head_dim], bk, bv [L, kv_heads * head_dim], bo [L, hidden]; head_bias [vocab]

Biases are vectors, so that FSDP does not split them.
With `scan_layers=False`, `layers` is a list of L such dicts without the leading dimension. A step is then faster:
its batched products read the weights in place, whereas XLA copies each layer's weights out of a stack; and they add up
the gradients by themselves (`wide_gradients`).
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dhelix.models.common.cross_entropy import mean_loss
from dhelix.models.common.layers import Rotation, rope_frequencies, through_model, turned
from dhelix.models.common.mesh import spec_of
from dhelix.models.common.parallel import SINGLE_DEVICE, Parallel
from dhelix.models.common.parameters import as_configured, cast_params, normal
from dhelix.models.common.training import Metrics, Params
from dhelix.models.llama import model as llama
from dhelix.models.llama.layers import attention_block, rotation
from dhelix.models.moe.experts import AUXILIARY, experts_block
from dhelix.models.moe.moe_config import MoeConfig
from dhelix.models.moe.wide_gradients import Wide, widen

METRICS = ("loss", "cross_entropy", *AUXILIARY)
EXPERTS = ("w_gate", "w_up", "w_down")
"""The weights of routed experts, in place of those of the feed-forward network."""
_EXPERT_SPECS = {
    "router": PartitionSpec(),
    "w_gate": PartitionSpec("ep", None, "tp"),
    "w_up": PartitionSpec("ep", None, "tp"),
    "w_down": PartitionSpec("ep", "tp"),
}
_SHARED_SPECS = {
    "shared_gate": PartitionSpec(None, "tp"),
    "shared_up": PartitionSpec(None, "tp"),
    "shared_down": PartitionSpec("tp"),
}
_NORM_SPECS = {"attention_norm_bias": PartitionSpec(), "ffn_norm_bias": PartitionSpec()}
_BIAS_SPECS = {
    "bq": PartitionSpec("tp"),
    "bk": PartitionSpec("tp"),
    "bv": PartitionSpec("tp"),
    "bo": PartitionSpec(),
}


def param_specs(config: MoeConfig, pipeline: str | None = None, shared_ends: bool = True) -> Params:
    """The `PartitionSpec` of each parameter: experts over `ep`, and their hidden layer over `tp`; else as in Llama."""
    specs = llama.param_specs(config, pipeline, shared_ends)
    chosen = _EXPERT_SPECS | (_SHARED_SPECS if config.shared else {})
    chosen |= (_NORM_SPECS if config.norm == "layer" else {}) | (_BIAS_SPECS if config.attention_bias else {})
    if config.norm == "layer":
        specs["final_norm_bias"] = PartitionSpec()
    if config.head_bias:
        specs["head_bias"] = specs["embedding"]  # split like the vocabulary

    def of(layer: dict[str, PartitionSpec], *leading: str | None) -> dict[str, PartitionSpec]:
        kept = {name: spec for name, spec in layer.items() if name not in EXPERTS}
        return kept | {name: spec_of(*leading, *spec) for name, spec in chosen.items()}

    layers = specs["layers"]
    if not config.scan_layers:
        return specs | {"layers": [of(layer) for layer in layers]}
    return specs | {"layers": of(layers, *([pipeline] if pipeline else []), None)}


def _expert_shapes(config: MoeConfig) -> dict[str, tuple[int, ...]]:
    hidden, ffn, experts = config.hidden, config.ffn, config.experts
    shapes = {
        "router": (hidden, experts),
        "w_gate": (experts, hidden, ffn),
        "w_up": (experts, hidden, ffn),
        "w_down": (experts, ffn, hidden),
    }
    if config.shared:
        wide = config.shared * ffn
        shapes |= {"shared_gate": (hidden, wide), "shared_up": (hidden, wide), "shared_down": (wide, hidden)}
    return shapes


def _bias_shapes(config: MoeConfig) -> dict[str, tuple[int]]:
    """The biases of one layer."""
    hidden, queries, keys = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    norms = dict.fromkeys(_NORM_SPECS, (hidden,)) if config.norm == "layer" else {}
    attention = {"bq": (queries,), "bk": (keys,), "bv": (keys,), "bo": (hidden,)} if config.attention_bias else {}
    return norms | attention


def init_params(config: MoeConfig, key: jax.Array) -> Params:
    """Fresh parameters in `param_dtype`. Weights are normal with deviation 0.02, divided by sqrt(2 L) for those that
    add to the residual stream. Biases are zeros. The values depend neither on the sharding nor on `scan_layers`.
    """
    params = llama.init_params(dataclasses.replace(config, scan_layers=True), key)
    layers = {name: weight for name, weight in params["layers"].items() if name not in EXPERTS}
    shapes = _expert_shapes(config)
    for (name, shape), one in zip(
        shapes.items(), jax.random.split(jax.random.fold_in(key, 1), len(shapes)), strict=True
    ):
        deviation = 0.02 / math.sqrt(2 * config.layers) if name.endswith("down") else 0.02
        layers[name] = normal(config, one, (config.layers, *shape), deviation)
    biases = _bias_shapes(config)
    layers |= {name: jnp.zeros((config.layers, *shape), config.param_dtype) for name, shape in biases.items()}
    if config.norm == "layer":
        params["final_norm_bias"] = jnp.zeros((config.hidden,), config.param_dtype)
    if config.head_bias:
        params["head_bias"] = jnp.zeros((config.vocab,), config.param_dtype)
    return params | {"layers": as_configured(config, layers)}


def trainable(config: MoeConfig, params: Params, parallel: Parallel) -> Params:
    """The parameters that a step differentiates: `cast_params`, with `wide_gradients` for unrolled layers.

    With stacked layers, wide gradients would double the stacks that the loop over layers fills. With FSDP, they would
    double the volume of reduce-scatters.
    """
    params = cast_params(config, params)
    if config.scan_layers or parallel.gathers_weights:
        return params

    def wide(layer: dict[str, jax.Array]) -> dict[str, jax.Array | Wide]:
        return {name: widen(weight) if name in EXPERTS else weight for name, weight in layer.items()}

    return params | {"layers": [wide(layer) for layer in params["layers"]]}


def logits(
    config: MoeConfig,
    params: Params,
    tokens: jax.Array,
    parallel: Parallel = SINGLE_DEVICE,
    segments: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The forward pass. The arguments are those of `llama.logits`.

    Returns:
      Logits `[batch, seq / cp, vocab / tp]` in the compute dtype, and the means over layers of `AUXILIARY`, float32
      `[3]`.
    """
    by = rotary(config, parallel, tokens.shape[1])

    def layer(state: tuple[jax.Array, jax.Array], weights: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, totals = state
        x = x + attention_block(config, parallel, weights, x, by, segments)
        more, auxiliary = experts_block(config, parallel, weights, x)
        return x + more, totals + auxiliary

    none = jnp.zeros(len(AUXILIARY), jnp.float32)
    (x, totals), ends = through_model(config, parallel, params, tokens, layer, lambda x: (x, none))
    return llama.project(config, ends, x, parallel), totals / config.layers


def rotary(config: MoeConfig, parallel: Parallel, seq: int) -> Rotation:
    """The rotary embedding of this device's `seq` tokens (`llama.rotation`), with `long_rope` if there is one."""
    positions = parallel.positions(seq, jnp.float32)
    if (rope := config.long_rope) is None:
        return rotation(config, positions)
    whole = seq * (1 if parallel.context is None else parallel.context.size)
    factors, scale = (rope.long, rope.long_scale) if whole > rope.trained else (rope.short, rope.short_scale)
    frequency = rope_frequencies(config.rope_theta, config.head_dim) / jnp.asarray(factors, jnp.float32)
    cos, sin = turned(positions, frequency)
    return scale * cos, scale * sin


def objective(
    config: MoeConfig,
    params: Params,
    tokens: jax.Array,
    targets: jax.Array,
    parallel: Parallel = SINGLE_DEVICE,
    segments: jax.Array | None = None,
    weights: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """What to differentiate, and the metrics, all float32. The arguments are those of `llama.loss`.

    Under `shard_map`, the sum over a `tp` group of each device's derivatives is the derivative of the cross-entropy
    plus the mean of the devices' routing losses: each device of the group routes its own part of the sequence.

    Returns:
      The cross-entropy per token in nats plus this device's share of the routing losses; and the metrics: the loss with
      all of the device's routing losses, `cross_entropy`, and `AUXILIARY`, for this device's tokens.
    """
    values, auxiliary = logits(config, params, tokens, parallel, segments)
    entropy = mean_loss(values, targets, parallel.ends, weights, config.z_loss)
    named = dict(zip(AUXILIARY, auxiliary, strict=True))
    routing = config.balance_weight * named["balance"] + config.z_weight * named["z"]
    metrics = {"loss": entropy + routing, "cross_entropy": entropy, **named}
    return entropy + routing / parallel.sequence_shards(), metrics
