"""Optimizers by name, learning rates, and steps that are skipped."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dhelix.errors import DhelixError
from dhelix.launch.train import optimizers
from dhelix.launch.train.options import Options

PARAMS = {"layers": {"wq": jnp.ones((2, 4, 4)), "attention_norm": jnp.ones((2, 4)), "bq": jnp.ones((2, 4))}}


@pytest.mark.parametrize(
    ("schedule", "middle", "last"),
    [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1.0, 1.0), ("wsd", 1.0, 0.1)],
)
def test_learning_rates(schedule: str, middle: float, last: float) -> None:
    rate = optimizers.learning_rate(Options(steps=110, warmup=10, lr=2.0, lr_schedule=schedule))
    values = [float(np.asarray(rate(step))) / 2.0 for step in (0, 4, 9, 59, 109)]
    assert values == pytest.approx([0.1, 0.5, 1.0, middle, last], abs=1e-6)


def test_the_default_is_adamw_that_decays_matrices_alone() -> None:
    made = optimizers.optimizer(Options(steps=10, warmup=0, lr=1.0))
    zeros = {"layers": {name: jnp.zeros_like(value) for name, value in PARAMS["layers"].items()}}
    updates, _ = made.update(zeros, made.init(PARAMS), PARAMS)
    moved = {name: bool(jnp.any(value != 0)) for name, value in updates["layers"].items()}  # type: ignore
    assert moved == {"wq": True, "attention_norm": False, "bq": False}


def test_options_of_an_optimizer() -> None:
    made = optimizers.optimizer(Options(optimizer_options="mu_dtype=bfloat16,b1=0.8"))
    state = optax.tree.get(made.init(PARAMS), "mu")
    assert state["layers"]["wq"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"optimizer": "adamix"}, "is no function of optax"),
        ({"optimizer": "tree"}, "is no function of optax"),
        ({"optimizer_options": "b3=1"}, "adamw takes b1, b2"),
        ({"optimizer_options": "b1"}, "write b1=0.9,b2=0.95"),
        ({"optimizer_options": "mu_dtype=int8"}, "use float32 or bfloat16"),
        ({"optimizer_options": "b2=abc"}, "give a number, True, False or None"),
        ({"optimizer_options": "b2=None"}, "adamw cannot train this way"),
        ({"optimizer": "lbfgs"}, "lbfgs cannot train this way"),
        ({"decay_steps": 3}, "for --lr_schedule wsd"),
        ({"decay_steps": 49, "lr_schedule": "wsd", "warmup": 2}, "more than the 48 steps after the warm-up"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(DhelixError, match=says):
        optimizers.optimizer(Options(**options))


def test_the_state_has_the_same_form_for_any_clip() -> None:
    forms = [jax.tree.structure(optimizers.optimizer(Options(clip=clip)).init(PARAMS)) for clip in (0.0, 1.0)]
    assert forms[0] == forms[1]


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    made = optimizers.optimizer(Options(on_nan="skip", warmup=0))
    state = made.init(PARAMS)
    bad = {"layers": {name: value.at[0].set(jnp.nan) for name, value in PARAMS["layers"].items()}}
    updates, after = made.update(bad, state, PARAMS)
    assert all(not np.any(leaf) for leaf in (updates["layers"].values()))  # type: ignore
    assert counts(after) == {0} and not np.any(optax.tree.get(after, "mu")["layers"]["wq"])
    updates, after = made.update(PARAMS, after, PARAMS)
    assert np.any(updates["layers"]["wq"]) and counts(after) == {1}  # type: ignore


def counts(state: optax.OptState) -> set[int]:
    return {int(count) for _, count in optax.tree.get_all_with_path(state, "count")}
