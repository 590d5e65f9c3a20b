"""Against published implementations: GPT-2, Phi and MPT (`make_references.py`)."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhelix.models.gpt import model
from dhelix.models.gpt.gpt_config import GPT_PRESETS, GptConfig

STORED = Path(__file__).parents[2] / "testdata" / "gpt" / "references.npz"


def tiny(name: str, **changes: Any) -> GptConfig:
    sizes = {"vocab": 64, "layers": 2, "seq": 16, "dtype": "float32", "param_dtype": "float32"}
    return dataclasses.replace(GPT_PRESETS[name], **{**sizes, **changes})


CONFIGS = {
    "gpt2": tiny("gpt-6.7b", hidden=16, heads=4, kv_heads=4, head_dim=4, ffn=48),
    "phi": tiny("phi-2", hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, rotary_dim=4),
    "mpt": tiny("mpt-7b", hidden=24, heads=6, kv_heads=6, head_dim=4, ffn=96),
}


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    with np.load(STORED) as arrays:
        return dict(arrays)


def under(stored: dict[str, np.ndarray], prefix: str, config: GptConfig) -> dict[str, Any]:
    """The parameters whose names begin with `prefix`, as `models.gpt` has them."""
    arrays = {name.removeprefix(prefix): jnp.asarray(stored[name]) for name in stored if name.startswith(prefix)}
    stacked = {name.removeprefix("layers/"): array for name, array in arrays.items() if name.startswith("layers/")}
    layers = stacked if config.scan_layers else [{n: w[i] for n, w in stacked.items()} for i in range(config.layers)]
    return {name: array for name, array in arrays.items() if "/" not in name} | {"layers": layers}


def assert_close(found: Any, expected: Any) -> None:
    """Each array up to rounding, relative to the largest element of all arrays.

    The gradient of a key's bias is zero but for rounding, because a softmax ignores what all scores have in common.
    """
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    scale = max(float(np.max(np.abs(array))) for array in jax.tree.leaves(expected))
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6 * scale, rtol=2e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    ("name", "scanned"),
    [
        *((name, True) for name in CONFIGS),
        ("gpt2", False),
        pytest.param("phi", False, marks=pytest.mark.slow),
        pytest.param("mpt", False, marks=pytest.mark.slow),
    ],
)
def test_logits_loss_and_gradients_are_those_of_the_published_model(
    stored: dict[str, np.ndarray], name: str, scanned: bool
) -> None:
    config = dataclasses.replace(CONFIGS[name], scan_layers=scanned)
    params, expected = (under(stored, f"{name}/{kind}/", config) for kind in ("param", "gradient"))
    tokens = jnp.asarray(stored["tokens"])
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    @jax.jit
    def both(params: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        take = jax.value_and_grad(lambda params: model.objective(config, params, inputs, targets)[0])
        return model.logits(config, params, inputs), take(params)

    logits, (loss, gradients) = both(params)
    assert_close(logits, stored[f"{name}/logits"])
    assert float(loss) == pytest.approx(float(stored[f"{name}/loss"]), rel=1e-6)
    assert_close(gradients, expected)
