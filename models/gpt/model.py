"""GPT, Phi-2 and MPT: parameters, shardings, forward pass and loss.

Parameters are nested dicts of arrays:

    embedding [vocab, hidden], positions [seq, hidden] (if learned), final_norm [hidden],
    head [hidden, vocab] (absent when tied), head_bias [vocab], layers:
    attention_norm, ffn_norm [L, hidden], wq [L, hidden, heads * head_dim], wk, wv [L, hidden, kv_heads * head_dim],
    wo [L, heads * head_dim, hidden], w_up [L, hidden, ffn], w_down [L, ffn, hidden]

With biases, each norm also has `..._norm_bias`, and each matrix `w...` has `b...`, as long as the matrix has columns.
With a parallel block, `ffn_norm` is absent. With `scan_layers=False`, `layers` is a list of L dicts without the leading
dimension. Biases are vectors, so that FSDP does not split them.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dhelix.models.common.cross_entropy import loss_alone
from dhelix.models.common.layers import through_model
from dhelix.models.common.parallel import SINGLE_DEVICE, Parallel
from dhelix.models.common.parameters import as_configured, cast_params, initial_layers, layer_specs, normal
from dhelix.models.common.training import Params
from dhelix.models.gpt.gpt_config import GptConfig
from dhelix.models.gpt.layers import decoder_layer, norm, order_of

METRICS = ("loss",)

# How each weight of a layer is split over `tp`: by heads, or by columns of the feed-forward's hidden layer.
_COLUMNS, _ROWS, _WHOLE = PartitionSpec(None, "tp"), PartitionSpec("tp"), PartitionSpec()
_MATRIX_SPECS = {"wq": _COLUMNS, "wk": _COLUMNS, "wv": _COLUMNS, "wo": _ROWS, "w_up": _COLUMNS, "w_down": _ROWS}
_BIAS_SPECS = {
    "bq": PartitionSpec("tp"),
    "bk": PartitionSpec("tp"),
    "bv": PartitionSpec("tp"),
    "bo": _WHOLE,
    "b_up": PartitionSpec("tp"),
    "b_down": _WHOLE,
}


def param_specs(config: GptConfig, pipeline: str | None = None, shared_ends: bool = True) -> Params:
    """The `PartitionSpec` of each parameter. Matrices are split over `tp`, and so are the biases of their columns.

    The arguments and errors are those of `llama.param_specs`. The table of positions is split like the embedding.
    """
    norms = {name: _WHOLE for name in _norms(config)}
    layers = layer_specs(config, norms | _MATRIX_SPECS | (_BIAS_SPECS if config.bias else {}), pipeline)
    vocabulary = ("tp", pipeline) if pipeline is not None and shared_ends else "tp"
    specs = {"embedding": PartitionSpec(vocabulary), "layers": layers, "final_norm": _WHOLE}
    if config.positions == "learned":
        specs["positions"] = PartitionSpec(vocabulary)
    if config.bias:
        specs["final_norm_bias"] = _WHOLE
    if not config.tie_embeddings:
        specs["head"] = PartitionSpec(None, vocabulary)
    if config.head_bias:
        specs["head_bias"] = PartitionSpec(vocabulary)
    return specs


def _norms(config: GptConfig) -> list[str]:
    """The names of the weights and biases of a layer's norms."""
    names = ["attention_norm", *([] if config.parallel_block else ["ffn_norm"])]
    return names + [f"{name}_bias" for name in names if config.bias]


def _layer_shapes(config: GptConfig) -> dict[str, tuple[int, ...]]:
    hidden, ffn = config.hidden, config.ffn
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    matrices = {
        "wq": (hidden, queries),
        "wk": (hidden, keys),
        "wv": (hidden, keys),
        "wo": (queries, hidden),
        "w_up": (hidden, ffn),
        "w_down": (ffn, hidden),
    }
    biases = {f"b{name[1:]}": shape[1:] for name, shape in matrices.items() if config.bias}
    return {name: (hidden,) for name in _norms(config)} | matrices | biases


def init_params(config: GptConfig, key: jax.Array) -> Params:
    """Initial parameters in `param_dtype` (`initial_layers`). Embedding, positions and head have deviation 0.02.

    The values depend neither on the sharding nor on `scan_layers`.
    """
    shapes, dtype = _layer_shapes(config), jnp.dtype(config.param_dtype)
    embedding_key, positions_key, head_key, *layer_keys = jax.random.split(key, 3 + len(shapes))
    params = {
        "embedding": normal(config, embedding_key, (config.vocab, config.hidden)),
        "layers": as_configured(config, initial_layers(config, layer_keys, shapes)),
        "final_norm": jnp.ones((config.hidden,), dtype),
    }
    if config.positions == "learned":
        params["positions"] = normal(config, positions_key, (config.seq, config.hidden))
    if config.bias:
        params["final_norm_bias"] = jnp.zeros((config.hidden,), dtype)
    if not config.tie_embeddings:
        params["head"] = normal(config, head_key, (config.hidden, config.vocab))
    if config.head_bias:
        params["head_bias"] = jnp.zeros((config.vocab,), dtype)
    return params


def trainable(config: GptConfig, params: Params, parallel: Parallel) -> Params:
    """The parameters that a step differentiates: `cast_params`."""
    return cast_params(config, params)


def logits(
    config: GptConfig,
    params: Params,
    tokens: jax.Array,
    parallel: Parallel = SINGLE_DEVICE,
    segments: jax.Array | None = None,
) -> jax.Array:
    """The forward pass. Arguments and result are those of `llama.logits`.

    Raises:
      ValueError: rows are longer than the table of learned positions.
    """
    seq = tokens.shape[1] * (1 if parallel.context is None else parallel.context.size)
    if config.positions == "learned" and seq > config.seq:
        raise ValueError(
            f"rows of {seq} tokens have no positions in a table of seq = {config.seq}; use a model with a larger seq"
        )
    order = order_of(config, parallel, tokens.shape[1])

    def layer(x: jax.Array, weights: Mapping[str, jax.Array]) -> jax.Array:
        return decoder_layer(config, parallel, weights, x, order, segments)

    x, ends = through_model(config, parallel, params, tokens, layer)
    return project(config, ends, x, parallel)


def project(config: GptConfig, params: Mapping[str, Any], x: jax.Array, parallel: Parallel) -> jax.Array:
    """The head of the model: the logits of this device's shard of the vocabulary, from the last layer's output `x`."""
    ends = parallel.ends
    h = ends.gather_sequence(norm(config, params, "final_norm", ends.from_layers(x)))
    head = params["embedding"].T if config.tie_embeddings else params["head"]
    values = ends.split_features(jnp.einsum("bsh,hv->bsv", h, head))
    return values + params["head_bias"] if config.head_bias else values


objective = loss_alone(logits)
