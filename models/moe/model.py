"""A mixture-of-experts decoder: parameters, their shardings, the forward pass and the loss.

Parameters are those of `models.llama`, with these in place of the feed-forward network's in `layers`:

    router [L, hidden, E], w_gate, w_up [L, E, hidden, ffn], w_down [L, E, ffn, hidden]
    with shared experts: shared_gate, shared_up [L, hidden, shared ffn], shared_down [L, shared ffn, hidden]

With `scan_layers=False`, `layers` is a list of L such dicts without the leading dimension. A step is then faster:
its batched products read the weights in place, whereas XLA copies each layer's weights out of a stack; and they add up
the gradients by themselves (`wide_gradients`).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dhelix.models.common.cross_entropy import cross_entropy
from dhelix.models.common.layers import attention_block, embed, rotation, through_layers
from dhelix.models.common.parallel import SINGLE_DEVICE, Parallel
from dhelix.models.llama import model as llama
from dhelix.models.llama.model import Params
from dhelix.models.moe.experts import AUXILIARY, experts_block
from dhelix.models.moe.moe_config import MoeConfig

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


def param_specs(config: MoeConfig) -> Params:
    """The `PartitionSpec` of each parameter: experts over `ep`, and their hidden layer over `tp`; else as in Llama."""
    specs = llama.param_specs(config)
    chosen = _EXPERT_SPECS | (_SHARED_SPECS if config.shared else {})

    def of(layer: dict[str, PartitionSpec], *leading: None) -> dict[str, PartitionSpec]:
        kept = {name: spec for name, spec in layer.items() if name not in EXPERTS}
        return kept | {name: llama.spec_of(*leading, *spec) for name, spec in chosen.items()}

    layers = specs["layers"]
    return specs | {"layers": of(layers, None) if config.scan_layers else [of(layer) for layer in layers]}


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


def init_params(config: MoeConfig, key: jax.Array) -> Params:
    """Fresh parameters in `param_dtype`. Weights are normal with deviation 0.02, divided by sqrt(2 L) for those that
    add to the residual stream. The values depend neither on the sharding nor on `scan_layers`.
    """
    params = llama.init_params(dataclasses.replace(config, scan_layers=True), key)
    layers = {name: weight for name, weight in params["layers"].items() if name not in EXPERTS}
    shapes = _expert_shapes(config)
    for (name, shape), one in zip(
        shapes.items(), jax.random.split(jax.random.fold_in(key, 1), len(shapes)), strict=True
    ):
        deviation = 0.02 / math.sqrt(2 * config.layers) if name.endswith("down") else 0.02
        drawn = deviation * jax.random.normal(one, (config.layers, *shape), jnp.float32)
        layers[name] = drawn.astype(config.param_dtype)
    return params | {"layers": llama.as_configured(config, layers)}


def logits(
    config: MoeConfig, params: Params, tokens: jax.Array, parallel: Parallel = SINGLE_DEVICE
) -> tuple[jax.Array, jax.Array]:
    """The forward pass.

    Args:
      params: in the compute dtype; under `shard_map`, this device's shards.
      tokens: int32 `[batch, seq]`; each device of a `tp` group holds the whole sequence.

    Returns:
      Logits `[batch, seq, vocab / tp]` in the compute dtype, and the means over layers of `AUXILIARY`, float32 `[3]`.
    """
    by = rotation(config, tokens.shape[1])
    ends = parallel.whole_weights({name: weight for name, weight in params.items() if name != "layers"})

    def layer(x: jax.Array, weights: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        weights = parallel.whole_weights(weights)
        x = x + attention_block(config, parallel, weights, x, by)
        more, auxiliary = experts_block(config, parallel, weights, x)
        return x + more, auxiliary

    x = embed(config, parallel, ends["embedding"], tokens)
    x, auxiliary = through_layers(config, layer, x, params["layers"], parallel.gathers_weights)
    return llama.project(config, dict(ends), x, parallel), jnp.mean(auxiliary, axis=0)


def loss(
    config: MoeConfig, params: Params, tokens: jax.Array, targets: jax.Array, parallel: Parallel = SINGLE_DEVICE
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What to differentiate, and metrics, all float32.

    Under `shard_map` the sum over a `tp` group of each device's derivatives is that of the cross-entropy plus the mean
    of the devices' routing losses: each device of the group routes its own part of the sequence.

    Args:
      params: in the compute dtype.
      tokens, targets: int32 `[batch, seq]`.

    Returns:
      The cross-entropy per token in nats plus this device's share of the routing losses; and `cross_entropy` and
      `AUXILIARY` by name, for this device's tokens.
    """
    values, auxiliary = logits(config, params, tokens, parallel)
    entropy = jnp.mean(cross_entropy(values, targets, parallel.ends))
    metrics: dict[str, Any] = {"cross_entropy": entropy, **dict(zip(AUXILIARY, auxiliary, strict=True))}
    routing = config.balance_weight * metrics["balance"] + config.z_weight * metrics["z"]
    return entropy + routing / parallel.sequence_shards(), metrics
