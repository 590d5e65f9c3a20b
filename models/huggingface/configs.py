"""config.json of a checkpoint, and the configuration of dhelix that belongs to it.

    config = read_config("Llama-3.1-8B", remat="full")           LlamaConfig(vocab=128256, hidden=4096, ...)
    architecture, fields = fields_of(config)                     "LlamaForCausalLM", {"vocab_size": 128256, ...}

What our models lack is an error: a field of config.json whose value would change the logits, and that no field of our
configuration stands for. Fields that only concern training, generation or sizes of caches are not looked at.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.gpt.gpt_config import GptConfig
from dhelix.models.huggingface.files import TYPES, WeightsError, read_json
from dhelix.models.llama.llama_config import LlamaConfig
from dhelix.models.moe.moe_config import LongRope, MoeConfig

CONFIG = "config.json"
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ACTIVATIONS: dict[str, Literal["gelu", "gelu_tanh"]] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", dict: "an object", list: "a list"}


class Fields:
    """The fields of a config.json, with errors that name the field.

    Attributes:
      values: the fields. A field that is null counts as absent.
      place: what errors call the file.
    """

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values = {name: value for name, value in values.items() if value is not None}
        self.place = place

    def get(self, name: str, otherwise: Any = None) -> Any:
        """The value of a field, which has the type of `otherwise`.

        Raises:
          WeightsError: the value has another type.
        """
        value = self.values.get(name, otherwise)
        wanted = (int, float) if isinstance(otherwise, float) else type(otherwise)
        wrong_bool = isinstance(value, bool) != isinstance(otherwise, bool)
        if otherwise is not None and (not isinstance(value, wanted) or wrong_bool):
            raise WeightsError(f"{self.place}: {name} is {value!r}; it must be {_KINDS[type(otherwise)]}")
        return float(value) if isinstance(otherwise, float) else value

    def size(self, name: str) -> int:
        """The value of a field that must be there.

        Raises:
          WeightsError: the field is absent, or no number of at least 1.
        """
        if name not in self.values:
            raise WeightsError(f"{self.place} lacks {name}; copy the file again from where the checkpoint came from")
        if self.get(name, 0) < 1:
            raise WeightsError(f"{self.place}: {name} is {self.values[name]}; it must be at least 1")
        return self.values[name]

    def only(self, name: str, *allowed: Any) -> None:
        """Checks that a field is absent or has one of the values that our model stands for.

        Raises:
          WeightsError: it has another value.
        """
        if name in self.values and self.values[name] not in allowed:
            shown = " or ".join(f"{value!r}" for value in allowed) or "no value"
            raise WeightsError(
                f"{self.place}: {name} is {self.values[name]!r}, and dhelix's model has only {shown}; use a checkpoint "
                "without this feature"
            )


def read_config(folder: str | Path, **choices: Any) -> DecoderConfig:
    """The configuration of a checkpoint.

    `dtype` and `param_dtype` are the type that config.json names, or float32. `seq` is the longest sequence. An expert
    has room for all tokens, so that the logits are those of a model that drops none; a smaller `capacity_factor` is
    faster.

    Args:
      folder: has config.json.
      choices: fields of the configuration that are replaced. Sizes must be those of the tensors.

    Raises:
      WeightsError: config.json is missing, its architecture is unknown, or it has what our models lack.
    """
    fields, architecture = _fields(Path(folder))
    fields.only("quantization_config")
    dtype = str(fields.get("dtype") or fields.get("torch_dtype") or "float32")
    if dtype not in TYPES.values():
        raise WeightsError(f"{fields.place}: dtype is {dtype!r}; it must be one of {', '.join(TYPES.values())}")
    try:
        config = dataclasses.replace(_READERS[architecture](fields), dtype=dtype, param_dtype=dtype)
    except WeightsError:
        raise
    except ValueError as error:
        raise WeightsError(f"{fields.place}: {error}") from None
    return dataclasses.replace(config, **choices)


def architecture_in(folder: str | Path) -> str:
    """The architecture of a checkpoint, a key of `huggingface.names.NAMES`.

    Raises:
      WeightsError: config.json is missing, or its architecture is unknown.
    """
    return _fields(Path(folder))[1]


def _fields(folder: Path) -> tuple[Fields, str]:
    fields = Fields(read_json(folder / CONFIG), str(folder / CONFIG))
    found = fields.get("architectures", [])
    name = found[0] if found and isinstance(found[0], str) else None
    if name not in _READERS:
        raise WeightsError(f"{fields.place}: the architecture {name!r} is unknown; dhelix reads {', '.join(_READERS)}")
    return fields, name


def fields_of(config: DecoderConfig) -> tuple[str, dict[str, Any]]:
    """The architecture of a configuration and the fields of its config.json.

    Raises:
      WeightsError: no architecture is such a model.
    """
    writers: dict[type, Callable[[Any], tuple[str, dict[str, Any]]]] = {
        LlamaConfig: _llama_fields, MoeConfig: _moe_fields, GptConfig: _gpt2_fields
    }  # fmt: skip
    if type(config) not in writers:
        raise WeightsError(f"{type(config).__name__} is no model of dhelix; use LlamaConfig, GptConfig or MoeConfig")
    architecture, fields = writers[type(config)](config)
    common = {"tie_word_embeddings": config.tie_embeddings, "torch_dtype": config.param_dtype, "use_cache": True}
    return architecture, {"architectures": [architecture], **fields, **common}


def _llama(fields: Fields) -> LlamaConfig:
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    return LlamaConfig(**_decoder(fields, norm_eps=1e-6, theta=10_000.0))


def _mixtral(fields: Fields) -> MoeConfig:
    fields.only("attention_bias", False)
    return MoeConfig(**_decoder(fields, norm_eps=1e-5, theta=1_000_000.0), **_experts(fields))


def _phimoe(fields: Fields) -> MoeConfig:
    experts = _experts(fields)
    if experts["chosen"] != 2:
        fields.only("num_experts_per_tok", 2)  # transformers chooses two, whatever this field says
    return MoeConfig(
        **_decoder(fields, norm_eps=1e-5, theta=1_000_000.0, with_long=True), **experts,
        norm="layer", routing="sparsemixer",
        attention_bias=fields.get("attention_bias", False), head_bias=fields.get("lm_head_bias", False),
        jitter=fields.get("router_jitter_noise", 0.01),
    )  # fmt: skip


def _experts(fields: Fields) -> dict[str, Any]:
    experts, chosen = fields.size("num_local_experts"), fields.get("num_experts_per_tok", 2)
    return {"experts": experts, "chosen": chosen, "capacity_factor": experts / max(chosen, 1)}


def _decoder(fields: Fields, norm_eps: float, theta: float, with_long: bool = False) -> dict[str, Any]:
    """What Llama and the models with experts share.

    Args:
      norm_eps, theta: what transformers takes if config.json does not say it.
      with_long: whether our model may have a `LongRope`.
    """
    fields.only("hidden_act", "silu")
    seq, hidden, heads = (
        fields.size(name) for name in ("max_position_embeddings", "hidden_size", "num_attention_heads")
    )
    if fields.get("sliding_window", seq) < seq:  # a window as long as the longest sequence hides nothing
        fields.only("sliding_window")
    return {
        "vocab": fields.size("vocab_size"), "hidden": hidden, "layers": fields.size("num_hidden_layers"),
        "heads": heads, "kv_heads": fields.get("num_key_value_heads", heads),
        "head_dim": fields.get("head_dim", hidden // heads), "ffn": fields.size("intermediate_size"), "seq": seq,
        "norm_eps": fields.get("rms_norm_eps", norm_eps), "tie_embeddings": fields.get("tie_word_embeddings", False),
        **_rotary(fields, theta, with_long),
    }  # fmt: skip


def _rotary(fields: Fields, theta: float, with_long: bool) -> dict[str, Any]:
    """The fields of the rotary embedding. Newer files have `rope_parameters`, and older ones two fields."""
    name = "rope_parameters" if "rope_parameters" in fields.values else "rope_scaling"
    rope = Fields(fields.get(name, {}), f"{fields.place}, {name}")
    found = {"rope_theta": rope.get("rope_theta", fields.get("rope_theta", theta))}
    rope.only("partial_rotary_factor", 1.0)
    for kind in ("rope_type", "type"):
        rope.only(kind, "default", "llama3", *(["longrope"] if with_long else []))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "longrope":
        return found | {"long_rope": _long_rope(rope)}
    if kind == "default":
        return found
    for constant, value in _LLAMA3_ROPE.items():
        rope.values.setdefault(constant, None)  # transformers has no value for an absent one
        rope.only(constant, value)
    return found | {"rope_factor": rope.get("factor", 8.0)}


def _long_rope(rope: Fields) -> LongRope:
    def numbers(name: str) -> tuple[float, ...]:
        found = rope.get(name, [])
        if not found or not all(isinstance(one, int | float) for one in found):
            raise WeightsError(f"{rope.place}: {name} is {found!r}; it must be a list of numbers")
        return tuple(map(float, found))

    return LongRope(
        numbers("short_factor"), numbers("long_factor"), rope.get("short_mscale", 1.0), rope.get("long_mscale", 1.0),
        rope.size("original_max_position_embeddings"),
    )  # fmt: skip


def _gpt2(fields: Fields) -> GptConfig:
    fields.only("activation_function", *_ACTIVATIONS)
    for feature in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        fields.only(feature, False)
    fields.only("scale_attn_weights", True)
    hidden, heads = fields.size("n_embd"), fields.size("n_head")
    if hidden % heads:
        raise WeightsError(f"{fields.place}: n_embd = {hidden} is not divisible by n_head = {heads}")
    return GptConfig(
        vocab=fields.size("vocab_size"), hidden=hidden, layers=fields.size("n_layer"), heads=heads, kv_heads=heads,
        head_dim=hidden // heads, ffn=fields.get("n_inner", 4 * hidden), seq=fields.size("n_positions"),
        norm_eps=fields.get("layer_norm_epsilon", 1e-5), tie_embeddings=fields.get("tie_word_embeddings", True),
        activation=_ACTIVATIONS[fields.get("activation_function", "gelu_new")],
    )  # fmt: skip


_READERS: dict[str, Callable[[Fields], Any]] = {
    "LlamaForCausalLM": _llama,
    "GPT2LMHeadModel": _gpt2,
    "MixtralForCausalLM": _mixtral,
    "PhimoeForCausalLM": _phimoe,
    "PhiMoEForCausalLM": _phimoe,
}


def _llama_fields(config: LlamaConfig) -> tuple[str, dict[str, Any]]:
    return "LlamaForCausalLM", {"model_type": "llama", **_decoder_fields(config)}


def _moe_fields(config: MoeConfig) -> tuple[str, dict[str, Any]]:
    experts = {"num_local_experts": config.experts, "num_experts_per_tok": config.chosen}
    fields = {**_decoder_fields(config), **experts}
    special = (config.norm, config.attention_bias, config.head_bias, config.routing, config.long_rope)
    if special == ("rms", False, False, "softmax", None) and config.normalise and not config.shared:
        return "MixtralForCausalLM", {"model_type": "mixtral", **fields}
    if config.norm == "layer" and config.routing == "sparsemixer" and config.chosen == 2 and not config.shared:
        biases = {"attention_bias": config.attention_bias, "lm_head_bias": config.head_bias}
        return "PhimoeForCausalLM", {
            "model_type": "phimoe", **fields, **biases, "router_jitter_noise": config.jitter
        }  # fmt: skip
    raise WeightsError(
        "a model with experts can be written as Mixtral (RMS norms, no biases, softmax, normalise) or as Phi-MoE "
        "(LayerNorms, sparsemixer, 2 experts chosen), without shared experts; this one is neither"
    )


def _decoder_fields(config: LlamaConfig) -> dict[str, Any]:
    """The fields as older files have them, which both older and newer programs read."""
    scaling = {"rope_type": "llama3", "factor": config.rope_factor, **_LLAMA3_ROPE}
    scaling = scaling if config.rope_factor != 1.0 else None
    if isinstance(config, MoeConfig) and (rope := config.long_rope):
        scaling = {
            "rope_type": "longrope", "short_factor": rope.short, "long_factor": rope.long,
            "short_mscale": rope.short_scale, "long_mscale": rope.long_scale,
            "original_max_position_embeddings": rope.trained,
        }  # fmt: skip
    return {
        "vocab_size": config.vocab, "hidden_size": config.hidden, "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim,
        "intermediate_size": config.ffn, "max_position_embeddings": config.seq, "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu", "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
    }  # fmt: skip


def _gpt2_fields(config: GptConfig) -> tuple[str, dict[str, Any]]:
    plain = config.positions == "learned" and config.bias and not config.head_bias and not config.parallel_block
    if not plain or config.kv_heads != config.heads or config.heads * config.head_dim != config.hidden:
        raise WeightsError(
            "only a GPT-2 can be written: learned positions, biases everywhere but in the head, blocks that are not "
            "parallel, kv_heads = heads, and heads * head_dim = hidden"
        )
    return "GPT2LMHeadModel", {
        "model_type": "gpt2", "vocab_size": config.vocab, "n_embd": config.hidden, "n_layer": config.layers,
        "n_head": config.heads, "n_inner": config.ffn, "n_positions": config.seq,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new" if config.activation == "gelu_tanh" else "gelu",
    }  # fmt: skip
