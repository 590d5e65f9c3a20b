"""Against published implementations: the model Mixtral, and the experts of DeepSeek-V2 (`make_references.py`)."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhelix.models.common.parallel import SINGLE_DEVICE
from dhelix.models.moe import experts, model
from dhelix.models.moe.moe_config import MOE_PRESETS
from dhelix.tests.quick import slow_but

STORED = Path(__file__).parents[2] / "testdata" / "moe" / "references.npz"
# No expert overflows: the references have no capacity.
MIXTRAL = dataclasses.replace(
    MOE_PRESETS["phi-moe-demo"], vocab=64, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24, seq=16,
    experts=4, chosen=2, norm_eps=1e-5, capacity_factor=4.0, balance_weight=0.5, z_weight=0.25,
)  # fmt: skip
DEEPSEEK = dataclasses.replace(MIXTRAL, experts=8, chosen=3, shared=2, normalise=False, capacity_factor=8.0)


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    with np.load(STORED) as arrays:
        return dict(arrays)


def under(stored: dict[str, np.ndarray], prefix: str) -> dict[str, Any]:
    """The arrays whose names begin with `prefix`, as nested dicts."""
    found: dict[str, Any] = {}
    for name in (name for name in stored if name.startswith(prefix)):
        *folders, last = name.removeprefix(prefix).split("/")
        place = found
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = jnp.asarray(stored[name])
    return found


def assert_close(found: Any, expected: Any) -> None:
    """Each array up to rounding, relative to its largest element."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        scale = float(np.max(np.abs(other)))
        np.testing.assert_allclose(one, other, atol=2e-5 * scale, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("scanned", slow_but([True], [True, False]))
def test_logits_losses_and_gradients_are_those_of_mixtral(stored: dict[str, np.ndarray], scanned: bool) -> None:
    config = dataclasses.replace(MIXTRAL, scan_layers=scanned)
    params, expected = under(stored, "mixtral/param/"), under(stored, "mixtral/gradient/")
    if not scanned:
        for tree in (params, expected):
            tree["layers"] = [jax.tree.map(lambda w, i=i: w[i], tree["layers"]) for i in range(config.layers)]
    tokens = jnp.asarray(stored["tokens"])
    logits, _ = jax.jit(lambda params: model.logits(config, params, tokens[:, :-1]))(params)
    assert_close(logits, stored["mixtral/logits"])
    take = jax.jit(
        jax.grad(lambda params: model.objective(config, params, tokens[:, :-1], tokens[:, 1:]), has_aux=True)
    )
    gradients, metrics = take(params)
    assert float(metrics.pop("dropped")) == 0.0
    routing = config.balance_weight * metrics["balance"] + config.z_weight * metrics["z"]
    assert float(metrics.pop("loss")) == pytest.approx(float(metrics["cross_entropy"] + routing), rel=1e-6)
    assert_close(metrics, {name: stored[f"mixtral/{name}"] for name in metrics})
    assert_close(gradients, expected)


def test_shared_experts_are_those_of_deepseek(stored: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        experts, "norm", lambda config, weights, name, x: x
    )  # DeepSeek's block does not contain the norm
    weights, expected = under(stored, "deepseek/param/"), under(stored, "deepseek/gradient/")
    rows, by_rows = jnp.asarray(stored["deepseek/x"]), expected.pop("x")

    def loss(weights: Any, rows: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        y, auxiliary = experts.experts_block(DEEPSEEK, SINGLE_DEVICE, weights | {"ffn_norm": jnp.ones(32)}, rows)
        return jnp.sum(jnp.sin(y)), (y, auxiliary)

    gradients, (y, auxiliary) = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(weights, rows)
    assert auxiliary[experts.AUXILIARY.index("dropped")] == 0.0
    assert_close(y, stored["deepseek/y"])
    assert_close(gradients, (expected, by_rows))
