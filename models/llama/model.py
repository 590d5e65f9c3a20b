"""Llama 3: parameters, shardings, forward pass and loss. There are functions on a pytree, and an NNX module.

Parameters are nested dicts of arrays:

    embedding [vocab, hidden], final_norm [hidden], head [hidden, vocab] (absent when tied), layers:
    attention_norm, ffn_norm [L, hidden], wq [L, hidden, heads, head_dim], wk, wv [L, hidden, kv_heads, head_dim],
    wo [L, heads, head_dim, hidden], w_gate, w_up [L, hidden, ffn], w_down [L, ffn, hidden]

With `scan_layers=False`, `layers` is a list of L such dicts without the leading dimension.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from dhelix.models.common.cross_entropy import loss_alone
from dhelix.models.common.layers import through_model
from dhelix.models.common.parallel import SINGLE_DEVICE, Parallel
from dhelix.models.common.parameters import as_configured, cast_params, initial_layers, layer_specs, normal
from dhelix.models.common.training import Params
from dhelix.models.llama.layers import decoder_layer, norm, rotation
from dhelix.models.llama.llama_config import LlamaConfig, dense_layer_shapes

METRICS = ("loss",)

# How each weight of a layer is split over `tp`: by heads, or by columns of the feed-forward's hidden layer.
_LAYER_SPECS = {
    "attention_norm": PartitionSpec(),
    "wq": PartitionSpec(None, "tp"),
    "wk": PartitionSpec(None, "tp"),
    "wv": PartitionSpec(None, "tp"),
    "wo": PartitionSpec("tp"),
    "ffn_norm": PartitionSpec(),
    "w_gate": PartitionSpec(None, "tp"),
    "w_up": PartitionSpec(None, "tp"),
    "w_down": PartitionSpec("tp"),
}


def param_specs(config: LlamaConfig, pipeline: str | None = None, shared_ends: bool = True) -> Params:
    """The `PartitionSpec` of each parameter. Matrices are split over `tp`. Norms are not split.

    Args:
      pipeline: name of the mesh axis of a pipeline, or None. With a pipeline, leaves of `layers` are `[chunks, layers
        of a chunk, ...]`, and the chunks are split over this axis.
      shared_ends: whether embedding and head are also split over `pipeline`, even if they are one tied table. Otherwise
        every stage holds both.

    Raises:
      ValueError: `pipeline` is given, but `config.scan_layers` is off.
    """
    layers = layer_specs(config, _LAYER_SPECS, pipeline)
    vocabulary = ("tp", pipeline) if pipeline is not None and shared_ends else "tp"
    specs = {"embedding": PartitionSpec(vocabulary), "layers": layers, "final_norm": PartitionSpec()}
    if not config.tie_embeddings:
        specs["head"] = PartitionSpec(None, vocabulary)
    return specs


def init_params(config: LlamaConfig, key: jax.Array) -> Params:
    """Initial parameters in `param_dtype` (`initial_layers`). Embedding and head have standard deviation 0.02.

    The values depend neither on the sharding nor on `scan_layers`.
    """
    embedding_key, head_key, *layer_keys = jax.random.split(key, 2 + len(_LAYER_SPECS))
    params = {
        "embedding": normal(config, embedding_key, (config.vocab, config.hidden)),
        "layers": as_configured(config, initial_layers(config, layer_keys, dense_layer_shapes(config))),
        "final_norm": jnp.ones((config.hidden,), config.param_dtype),
    }
    if not config.tie_embeddings:
        params["head"] = normal(config, head_key, (config.hidden, config.vocab))
    return params


def trainable(config: LlamaConfig, params: Params, parallel: Parallel) -> Params:
    """The parameters that a step differentiates: `cast_params`."""
    return cast_params(config, params)


def logits(
    config: LlamaConfig,
    params: Params,
    tokens: jax.Array,
    parallel: Parallel = SINGLE_DEVICE,
    segments: jax.Array | None = None,
) -> jax.Array:
    """The logits of the model: its forward pass.

    Args:
      params: parameters in the compute dtype; under `shard_map`, this device's shards.
      tokens: int32 `[batch, seq / cp]`. Each device of a `tp` group holds the same tokens.
      segments: int32 `[batch, seq]`, the document of each token of whole rows. None: each row is one document.

    Returns:
      The logits, `[batch, seq / cp, vocab / tp]` in the compute dtype.
    """
    by = rotation(config, parallel.positions(tokens.shape[1], jnp.float32))

    def layer(x: jax.Array, weights: Mapping[str, jax.Array]) -> jax.Array:
        return decoder_layer(config, parallel, weights, x, by, segments)

    x, ends = through_model(config, parallel, params, tokens, layer)
    return project(config, ends, x, parallel)


def project(
    config: LlamaConfig, params: Mapping[str, Any], x: jax.Array, parallel: Parallel = SINGLE_DEVICE
) -> jax.Array:
    """The head of the model: the logits of this device's shard of the vocabulary, from the last layer's output `x`."""
    ends = parallel.ends
    h = ends.gather_sequence(norm(config, params, "final_norm", ends.from_layers(x)))
    head = params["embedding"].T if config.tie_embeddings else params["head"]
    values = ends.split_features(jnp.einsum("bsh,hv->bsv", h, head))
    return values + params["head_bias"] if "head_bias" in params else values


objective = loss_alone(logits)


def loss(
    config: LlamaConfig,
    params: Params,
    tokens: jax.Array,
    targets: jax.Array,
    parallel: Parallel = SINGLE_DEVICE,
    segments: jax.Array | None = None,
    weights: jax.Array | None = None,
) -> jax.Array:
    """The mean cross-entropy per token in nats, float32.

    Under `shard_map`, this is the mean over the tokens of this device. All devices of a `tp` group get the same value.

    Args:
      params: parameters in the compute dtype.
      tokens, targets: int32 `[batch, seq / cp]`.
      segments: see `logits`.
      weights: the weights of tokens in the mean, whose own mean over all devices is 1. None: all weights are 1.
    """
    return objective(config, params, tokens, targets, parallel, segments, weights)[0]


def _as_module(tree: Any, specs: Any) -> Any:
    """Nested dicts and lists of arrays, converted to NNX containers of parameters with the shardings `specs`."""
    if isinstance(tree, dict):
        return nnx.Dict({name: _as_module(child, specs[name]) for name, child in tree.items()})
    if isinstance(tree, list):
        return nnx.List([_as_module(child, spec) for child, spec in zip(tree, specs, strict=True)])
    return nnx.Param(tree, out_sharding=specs, eager_sharding=False)


def _as_tree(module: Any) -> Any:
    """The nested dicts and lists of arrays from which `_as_module` made `module`."""
    if isinstance(module, nnx.Dict):
        return {name: _as_tree(child) for name, child in module.items()}
    if isinstance(module, nnx.List):
        return [_as_tree(child) for child in module]
    return module.get_value()


class Llama(nnx.Module):
    """The model as an ordinary NNX module. The module holds the parameters, and calls the functions of this file.

    `nnx.split` and `nnx.merge` work as on any module. `nnx.get_partition_spec(nnx.state(model))` returns the shardings.
    To train the model under `jit` over a mesh, pass `parallel=AutoParallel(mesh)`.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, parallel: Parallel = SINGLE_DEVICE) -> None:
        self.config = config
        self.parallel = parallel
        self.weights = _as_module(init_params(config, rngs.params()), param_specs(config))

    @property
    def params(self) -> Params:
        """The parameters as nested dicts, which the functions of this file take."""
        return _as_tree(self.weights)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits `[batch, seq, vocab]` for `tokens`, int32 `[batch, seq]`."""
        return logits(self.config, cast_params(self.config, self.params), tokens, self.parallel)

    def loss(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """The mean cross-entropy per token in nats, for `tokens` and `targets`, int32 `[batch, seq]`."""
        return loss(self.config, cast_params(self.config, self.params), tokens, targets, self.parallel)
