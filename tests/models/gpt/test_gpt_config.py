"""Presets of GPT, Phi-2 and MPT: sizes, counts of parameters, and errors for wrong values."""

import dataclasses
from typing import Any

import jax
import pytest

from dhelix.models import GptConfig, preset
from dhelix.models.gpt.gpt_config import GPT_PRESETS
from dhelix.models.gpt.model import init_params, param_specs


@pytest.mark.parametrize("name", GPT_PRESETS)
@pytest.mark.parametrize(
    "overrides", [{}, {"tie_embeddings": False, "head_bias": True, "kv_heads": 8}, {"scan_layers": False, "layers": 3}]
)
def test_counts_are_those_of_the_arrays(name: str, overrides: dict[str, Any]) -> None:
    config = dataclasses.replace(GPT_PRESETS[name], **overrides)
    params = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    assert config.parameter_count == sum(leaf.size for leaf in jax.tree.leaves(params))
    looked_up = ["positions", *([] if config.tie_embeddings else ["embedding"])]
    assert config.looked_up_count == sum(params[table].size for table in looked_up if table in params)
    assert jax.tree.structure(params) == jax.tree.structure(param_specs(config))


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt-6.7b", 6.69), ("gpt-18b", 18.49), ("gpt-30b", 29.72), ("phi-2", 2.78), ("mpt-7b", 6.65)],
)
def test_presets_have_the_sizes_that_their_names_say(name: str, billions: float) -> None:
    assert round(preset(name).parameter_count / 1e9, 2) == billions


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("gpt-6.7b", (4096, 16_384, 32)),
        ("gpt-18b", (6144, 24_576, 40)),
        ("gpt-30b", (12_288, 49_152, 16)),
    ],
)
def test_presets_are_table_4_of_the_paper(name: str, row: tuple[int, int, int]) -> None:
    config = GPT_PRESETS[name]
    assert (config.hidden, config.ffn, config.layers) == row
    assert config.hidden == config.heads * config.head_dim and config.seq == 8192


def test_a_longer_sequence_has_a_longer_table_of_positions() -> None:
    config = preset("gpt-6.7b", seq=16_384)
    assert config.parameter_count - preset("gpt-6.7b").parameter_count == 8192 * config.hidden


def test_only_what_multiplies_counts_as_operations() -> None:
    config = GptConfig(vocab=11, hidden=6, layers=2, heads=4, kv_heads=4, head_dim=3, ffn=5, seq=7)
    matrices = 4 * 6 * 12 + 2 * 6 * 5
    vectors = 2 * 2 * 6 + 3 * 12 + 6 + 5 + 6
    multiplying = 11 * 6 + 2 * (matrices + vectors) + 2 * 6
    assert config.flops_per_token() == 6 * multiplying + 12 * 2 * 4 * 3 * 7


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: preset("gpt-7b"), "use one of .*gpt-demo, gpt-6.7b"),
        (lambda: preset("gpt-demo", rope_factor=8.0), "GptConfig has no field 'rope_factor'"),
        (lambda: GptConfig(positions="sinusoidal"), "use 'learned', 'rotary' or 'alibi'"),  # pyright: ignore
        (lambda: GptConfig(activation="relu"), "use 'gelu' or 'gelu_tanh'"),  # pyright: ignore
        (lambda: GptConfig(positions="rotary"), "rotary_dim = 0 of 128 elements"),
        (lambda: preset("phi-2", rotary_dim=33), "use an even number from 2 to 80"),
        (lambda: preset("phi-2", rotary_dim=82), "use an even number from 2 to 80"),
    ],
)
def test_wrong_values_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
