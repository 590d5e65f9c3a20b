"""Parameters of a decoder: how layers are stacked and split, their initial values, and their compute type.

The weights of layers have one array per name, `[L, ...]`. With `scan_layers=False`, there is a dict of arrays for each
layer. In a pipeline, an array is `[chunks, layers of a chunk, ...]`, and the chunks are split over the stages.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.common.mesh import spec_of
from dhelix.models.common.training import Params

TO_RESIDUAL_STREAM = ("wo", "w_down")
"""The matrices whose products are added to the residual stream."""


def layer_specs(config: DecoderConfig, of_layer: Mapping[str, PartitionSpec], pipeline: str | None) -> Any:
    """The `PartitionSpec`s of all layers, from those of one layer.

    Args:
      pipeline: name of the mesh axis of a pipeline, or None.

    Raises:
      ValueError: `pipeline` is given, but `config.scan_layers` is off.
    """
    if pipeline is not None and not config.scan_layers:
        raise ValueError("a pipeline needs stacked layers; use scan_layers=True")
    if pipeline is not None:
        return {name: spec_of(pipeline, None, *spec) for name, spec in of_layer.items()}
    if config.scan_layers:
        return {name: spec_of(None, *spec) for name, spec in of_layer.items()}
    return [dict(of_layer) for _ in range(config.layers)]


def normal(config: DecoderConfig, key: jax.Array, shape: tuple[int, ...], deviation: float = 0.02) -> jax.Array:
    """A normally distributed array in `param_dtype`."""
    return (deviation * jax.random.normal(key, shape, jnp.float32)).astype(config.param_dtype)


def initial_layers(
    config: DecoderConfig, keys: Sequence[jax.Array], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, jax.Array]:
    """Initial stacked weights of all layers in `param_dtype`.

    Matrices are normally distributed with standard deviation 0.02, or 0.02 / sqrt(2 L) if their products are added to
    the residual stream. Norms are ones. Biases are zeros.

    Args:
      keys: a random key for each name.
      shapes: the shapes in one layer, by name.
    """
    layers: dict[str, jax.Array] = {}
    for (name, shape), key in zip(shapes.items(), keys, strict=True):
        stacked = (config.layers, *shape)
        if name.endswith("norm"):
            layers[name] = jnp.ones(stacked, config.param_dtype)
        elif len(shape) == 1:
            layers[name] = jnp.zeros(stacked, config.param_dtype)
        else:
            deviation = 0.02 / math.sqrt(2 * config.layers) if name in TO_RESIDUAL_STREAM else 0.02
            layers[name] = normal(config, key, stacked, deviation)
    return layers


def as_configured(config: DecoderConfig, stacked: dict[str, jax.Array]) -> Any:
    """The stacked weights of all layers. Without `scan_layers`, they become a list with one dict per layer."""
    if config.scan_layers:
        return stacked
    return [{name: weight[i] for name, weight in stacked.items()} for i in range(config.layers)]


def cast_params(config: DecoderConfig, params: Params) -> Params:
    """The parameters in the compute `dtype`.

    Call this function once per step, before the loops. If a loop casts the parameters of each layer, the results are
    kept for the backward pass, which needs memory for a second copy of the model.
    """
    return jax.tree.map(lambda weight: weight.astype(config.dtype), params)
