"""config.json: what older and newer files say, and which features are refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dhelix.models import GptConfig, LlamaConfig, MoeConfig, preset
from dhelix.models.huggingface.configs import fields_of, read_config
from dhelix.models.huggingface.files import WeightsError
from dhelix.models.moe.moe_config import MOE_PRESETS, LongRope
from dhelix.tests.models.huggingface.stored import copied

LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


LONG = {
    "type": "longrope", "short_factor": [1, 1.5, 2, 3], "long_factor": [1, 2, 8, 20], "short_mscale": 1.2,
    "long_mscale": 1.3, "original_max_position_embeddings": 8,
}  # fmt: skip


def test_phi_as_it_was_published(tmp_path: Path) -> None:
    """Its sizes are the preset's. Its window is as long as its longest row."""
    sizes = {
        "vocab_size": 32064, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": ..., "intermediate_size": 6400, "num_local_experts": 16,
    }  # fmt: skip
    rope = {
        "type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "short_mscale": 1.243,
        "long_mscale": 1.243, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    fields = {
        "architectures": ["PhiMoEForCausalLM"], "dtype": ..., "torch_dtype": "bfloat16", "rope_parameters": ...,
        "rope_scaling": rope, "rope_theta": 10000.0, "max_position_embeddings": 131072, "sliding_window": 131072,
        "router_jitter_noise": 0.01,
    }  # fmt: skip
    found = read_config(copied("phimoe", tmp_path, **sizes, **fields), seq=4096, capacity_factor=1.25)
    expected = dataclasses.replace(
        MOE_PRESETS["phi-moe-42b"], norm="layer", attention_bias=True, head_bias=True, routing="sparsemixer",
        long_rope=LongRope((1.0,) * 64, (2.0,) * 64, 1.243, 1.243, 4096), param_dtype="bfloat16",
    )  # fmt: skip
    assert found == expected
    architecture, written = fields_of(found)
    assert architecture == "PhimoeForCausalLM" and written["rope_scaling"]["short_mscale"] == 1.243


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("llama", {"rope_parameters": ..., "rope_theta": 500000, "rope_scaling": LLAMA3}, {"rope_factor": 32.0}),
        ("llama", {"rope_parameters": ..., "rope_scaling": None}, {"rope_factor": 1.0, "rope_theta": 10_000.0}),
        ("llama", {"head_dim": None, "num_key_value_heads": ...}, {"head_dim": 4, "kv_heads": 4}),
        ("llama", {"dtype": ..., "torch_dtype": "float16"}, {"dtype": "float16", "param_dtype": "float16"}),
        ("llama", {"sliding_window": 32}, {"seq": 32}),
        ("gpt2", {"n_inner": None, "activation_function": "gelu"}, {"ffn": 64, "activation": "gelu"}),
        ("gpt2", {"tie_word_embeddings": False}, {"tie_embeddings": False}),
        ("mixtral", {"num_local_experts": 8}, {"experts": 8, "chosen": 2, "capacity_factor": 4.0, "normalise": True}),
    ],
    ids=str,
)
def test_what_files_say_and_what_they_leave_out(
    name: str, fields: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    config = read_config(copied(name, tmp_path, **fields))
    assert {field: getattr(config, field) for field in expected} == expected


def test_choices_replace_what_the_file_says(tmp_path: Path) -> None:
    config = read_config(copied("llama", tmp_path), remat="full", seq=8, dtype="bfloat16")
    assert (config.remat, config.seq, config.dtype, config.param_dtype) == ("full", 8, "bfloat16", "float32")


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        (
            "llama",
            {"architectures": ["OPTForCausalLM"]},
            "architecture 'OPTForCausalLM' is unknown; dhelix reads L",
        ),
        ("llama", {"architectures": ...}, "architecture None is unknown"),
        ("llama", {"hidden_size": ...}, "config.json lacks hidden_size"),
        ("llama", {"hidden_size": "16"}, "hidden_size is '16'; it must be a whole number"),
        ("llama", {"hidden_size": 0}, "hidden_size is 0; it must be at least 1"),
        ("llama", {"num_key_value_heads": 3}, "config.json: 4 heads do not divide into 3 groups"),
        ("llama", {"rms_norm_eps": True}, "rms_norm_eps is True; it must be a number"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', and dhelix's model has only 'silu'"),
        ("llama", {"attention_bias": True}, "attention_bias is True, and dhelix's model has only False"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama", {"sliding_window": 8}, "sliding_window is 8, and dhelix's model has only no value"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ("llama", {"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; it must be one of float32"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: rope_type is 'yarn'"),
        ("llama", {"rope_parameters": ..., "rope_scaling": {"type": "linear"}}, "rope_scaling: type is 'linear'"),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "low_freq_factor is None, .* has only 1.0"),
        ("llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor is 2.0, .* has only 1.0"),
        ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt2", {"n_head": 3}, "n_embd = 16 is not divisible by n_head = 3"),
        ("mixtral", {"num_experts_per_tok": 5}, "5 of 4 experts cannot be chosen"),
        ("mixtral", {"sliding_window": 16}, "sliding_window is 16"),
        ("mixtral", {"rope_parameters": LONG}, "rope_parameters: type is 'longrope', and dhelix's model has only"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3, and dhelix's model has only 2"),
        ("phimoe", {"rope_parameters": LONG | {"long_factor": ["a"]}}, r"long_factor is \['a'\]; .* list of numbers"),
        ("phimoe", {"rope_parameters": LONG | {"long_factor": [1.0]}}, "4 short and 1 long factors; give head_dim / 2"),
        ("phimoe", {"rope_parameters": LONG | {"short_mscale": "1"}}, "short_mscale is '1'; it must be a number"),
    ],
    ids=str,
)
def test_a_feature_that_our_models_lack_is_one_error(
    name: str, fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match=says):
        read_config(copied(name, tmp_path, **fields))


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("llama-3.1-70b", "LlamaForCausalLM"), ("gpt-6.7b", "GPT2LMHeadModel"), ("phi-moe-demo", "MixtralForCausalLM")],
)
def test_presets_have_an_architecture(name: str, architecture: str) -> None:
    assert fields_of(preset(name))[0] == architecture


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (preset("phi-2"), "only a GPT-2 can be written"),
        (preset("deepseek-moe-16b"), "this one is neither"),
        (preset("olmoe-1b-7b"), "this one is neither"),
    ],
    ids=["phi-2", "deepseek", "olmoe"],
)
def test_models_that_transformers_lacks_are_one_error(config: LlamaConfig | GptConfig | MoeConfig, says: str) -> None:
    with pytest.raises(WeightsError, match=says):
        fields_of(config)
