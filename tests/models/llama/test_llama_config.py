"""Presets: sizes, parameter counts, overrides, and errors for wrong values."""

import dataclasses
from typing import Any

import jax
import pytest

from dhelix.models import LlamaConfig, preset
from dhelix.models.llama.llama_config import LLAMA_PRESETS
from dhelix.models.llama.model import init_params


@pytest.mark.parametrize("name", LLAMA_PRESETS)
@pytest.mark.parametrize("overrides", [{}, {"tie_embeddings": True}, {"scan_layers": False, "layers": 3}])
def test_parameter_count_is_that_of_the_arrays(name: str, overrides: dict[str, Any]) -> None:
    config = dataclasses.replace(LLAMA_PRESETS[name], **overrides)
    params = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    assert config.parameter_count == sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-7b", 6.74),
        ("llama-13b", 13.02),
        ("llama-30b", 27.57),
        ("llama-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-3.1-405b", 405.85),
    ],
)
def test_published_sizes(name: str, billions: float) -> None:
    assert round(preset(name).parameter_count / 1e9, 2) == billions


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("llama-8b", (4096, 14336, 32)),
        ("llama-25b", (8192, 28672, 28)),
        ("llama-39b", (16384, 53248, 12)),
        ("llama-66b", (8192, 28672, 76)),
    ],
)
def test_presets_are_table_3_of_the_paper(name: str, row: tuple[int, int, int]) -> None:
    config = preset(name)
    assert (config.hidden, config.ffn, config.layers) == row
    assert config.vocab == 128_256


def test_flops_count_each_matmul_three_times() -> None:
    config = LlamaConfig(vocab=11, hidden=6, layers=2, heads=4, kv_heads=2, head_dim=3, ffn=5, seq=7)
    projections = 2 * 6 * (4 * 3) + 2 * 6 * (2 * 3)
    multiplying = 2 * (projections + 3 * 6 * 5) + 6 * 11
    norms = 2 * 2 * 6 + 6
    attention = 2 * (2 * 4 * 3 * 7)
    assert config.flops_per_token() == 3 * 2 * (multiplying + norms) + 3 * 2 * attention
    assert config.flops_per_token(seq=14) - config.flops_per_token() == 3 * 2 * attention


def test_overrides() -> None:
    config = preset("llama-8b", layers=8, dtype="float32")
    assert (config.layers, config.dtype, config.hidden) == (8, "float32", 4096)
    assert preset("llama-8b").layers == 32


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: preset("llama-9b"), "use one of llama-demo, llama-8b"),
        (lambda: preset("llama-8b", depth=3), "no field 'depth'"),
        (lambda: preset("llama-8b", layers=0), "layers is 0"),
        (lambda: LlamaConfig(heads=6, kv_heads=4), "multiple of kv_heads"),
        (lambda: LlamaConfig(attention="flash"), "use 'auto', 'xla' or 'cudnn'"),  # pyright: ignore
        (lambda: LlamaConfig(remat="some"), "jax.checkpoint_policies"),
    ],
)
def test_wrong_sizes_are_refused(make, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
