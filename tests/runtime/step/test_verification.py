"""`verify=True` accepts a correct step and stops a wrong one with the name of the difference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.runtime.step.verification import VerificationError, compare, tolerance
from dhelix.tests.quick import slow_after
from dhelix.tests.runtime.step.test_strand_interleave import Replace
from dhelix.tests.runtime.steps import batch, squared_error, weights


def test_wrong_pass_is_caught_before_it_touches_donated_arguments() -> None:
    @strand_interleave(passes=[Replace("sine", "cosine")], verify=True, donate_argnums=0)
    def step(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"kept": state["kept"] * 2, "wrong": jnp.sin(state["wrong"])}

    state = {"kept": jnp.ones(3), "wrong": jnp.ones(3)}
    with pytest.raises(VerificationError, match=r"output\['wrong'\] differs by 0.301, but only 8.41e-07 is allowed"):
        step(state)
    assert not state["wrong"].is_deleted()


def test_right_pass_runs_and_donates() -> None:
    @strand_interleave(passes=[Replace("sine", "sine")], verify=True, donate_argnums=0)
    def step(state: Any) -> Any:
        return jnp.sin(state["x"]), jax.random.split(state["key"])[0], state["n"] + 1

    state = {"x": jnp.array([1.0, jnp.nan, jnp.inf]), "key": jax.random.key(3), "n": 4}
    x, key, n = step(state)
    np.testing.assert_array_equal(x, jnp.sin(jnp.array([1.0, jnp.nan, jnp.inf])))
    assert state["x"].is_deleted() and int(n) == 5


def _masked(w: jax.Array, data: dict[str, jax.Array]) -> jax.Array:
    mask = data["mask"]
    return jnp.where(mask, squared_rows(w, data), 0).sum() / mask.sum()


def squared_rows(w: jax.Array, data: dict[str, jax.Array]) -> jax.Array:
    return ((jnp.tanh(data["x"] @ w[0]) - data["y"]) ** 2).sum(axis=1)


@pytest.mark.parametrize(
    ("loss", "reduce", "message"),
    slow_after(
        1,
        [
            (squared_error, "mean", None),
            (squared_error, "sum", 'the loss is a mean over the rows, so use reduce="mean"'),
            (lambda w, data: squared_error(w, data) * 128, "mean", None),
            (
                lambda w, data: squared_rows(w, data).sum(),
                "mean",
                'the loss is the sum over the rows, so use reduce="sum"',
            ),
            (lambda w, data: squared_rows(w, data).sum(), "sum", None),
            (_masked, "mean", 'padding masks\\), use reduce="weighted"'),
            (_masked, "weighted", None),
        ],
        several=True,
    ),
)
def test_reduction_that_does_not_fit_the_loss(loss: Any, reduce: Any, message: str | None) -> None:
    weigh = (lambda w, data: data["mask"].sum()) if reduce == "weighted" else None
    gradients = value_and_grad(loss, weights=weigh)

    @strand_interleave(microbatches=4, reduce=reduce, verify=True, passes=[])
    def step(w: jax.Array, data: Any) -> Any:
        value, grads = gradients(w, data)
        return w - 0.1 * grads, value

    data = {**batch(), "mask": jnp.arange(16) < 7}
    if message is None:
        step(weights(), data)
    else:
        with pytest.raises(VerificationError, match=message):
            step(weights(), data)


@pytest.mark.parametrize(
    ("expected", "actual", "passes"),
    [
        (jnp.float32([1, 1e-9]), jnp.float32([1, 9e-7]), True),
        (jnp.float32([1, 0]), jnp.float32([1, 2e-6]), False),
        (jnp.float32([jnp.nan, jnp.inf]), jnp.float32([jnp.nan, jnp.inf]), True),
        (jnp.float32([jnp.nan, 1]), jnp.float32([0, 1]), False),
        (jnp.float32([jnp.inf, 1]), jnp.float32([-jnp.inf, 1]), False),
        (jnp.int32([1, 2]), jnp.int32([1, 3]), False),
        (jnp.array([True]), jnp.array([False]), False),
        (jnp.zeros((0, 3)), jnp.zeros((0, 3)), True),
        (jax.random.key(1), jax.random.key(2), False),
        (jnp.zeros(2), jnp.float32([0, 1e-30]), False),
    ],
)
def test_compare(expected: jax.Array, actual: jax.Array, passes: bool) -> None:
    if passes:
        compare({"x": expected}, {"x": actual}, "tree", 1e-6, "")
    else:
        with pytest.raises(VerificationError, match=r"tree\['x'\] differs"):
            compare({"x": expected}, {"x": actual}, "tree", 1e-6, "")


def test_integers_differ_by_what_they_do() -> None:
    with pytest.raises(VerificationError, match="count differs by 9, but only 0 is allowed"):
        compare(jnp.int32([3, 1]), jnp.int32([12, 1]), "count", 1e-6, "")
    with pytest.raises(VerificationError, match="count differs by 1,"):  # both are equal in float32
        compare(jnp.int32(2**24), jnp.int32(2**24 + 1), "count", 1e-6, "")


def test_tolerance_follows_the_narrowest_type() -> None:
    def narrow(dtype: Any) -> float:
        return tolerance(jax.jit(lambda x: (x.astype(dtype) * 2).astype(x.dtype)).lower(jnp.ones(3)), 1e-6)

    assert narrow(jnp.float32) == 1e-6
    assert narrow(jnp.bfloat16) == 2.0**-6
    assert narrow(jnp.float8_e4m3fn) == 0.5


def test_noise_is_allowed_and_named() -> None:
    plain, noise = {"b": jnp.array([1.0]), "w": jnp.array([1.0, 2.0])}, {"b": 0.0, "w": 0.1}
    found = compare(plain, {"b": jnp.array([1.0]), "w": jnp.array([1.0, 2.3])}, "output", 1e-6, "", noise=noise)
    assert found.noise == ("output['w']",) and found.leaves == 2 and found.largest == 0
    with pytest.raises(VerificationError, match=r"output\['w'\] differs by 1"):
        compare(plain, {**plain, "w": jnp.array([1.0, 3.0])}, "output", 1e-6, "", noise=noise)
    with pytest.raises(VerificationError):
        compare(plain, {**plain, "w": jnp.array([1.0, 2.3])}, "output", 1e-6, "")


def test_histories_give_gradients_no_scale() -> None:
    expected = {"params": jnp.array([0.01]), "_overwrite_with_gradient": jnp.array([100.0])}
    compare(expected, {**expected, "_overwrite_with_gradient": jnp.array([110.0])}, "gradient", 0.5, "", one_scale=True)
    with pytest.raises(VerificationError, match=r"gradient\['params'\] differs by 0.01, but only 0.005 is allowed"):
        compare(expected, {**expected, "params": jnp.array([0.0])}, "gradient", 0.5, "", one_scale=True)


def test_auxiliary_output_that_is_no_mean() -> None:
    def loss(w: jax.Array, data: dict[str, jax.Array]) -> Any:
        return squared_error(w, data), {"largest": jnp.abs(data["x"]).max()}

    @strand_interleave(microbatches=4, verify=True, passes=[])
    def step(w: jax.Array, data: Any) -> Any:
        return value_and_grad(loss, has_aux=True)(w, data)

    message = r"auxiliary output\['largest'\] differs .* Losses and gradients of 4 micro-batches agree with the whole"
    with pytest.raises(VerificationError, match=message):
        step(weights(), batch())


def test_where_gradients_are_taken_in_a_function_that_jax_traces_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    @strand_interleave(microbatches=4, verify=True)
    def step(w: jax.Array, batch: Any) -> Any:
        loss, gradients = jax.jit(lambda w, batch: value_and_grad(squared_error)(w, batch))(w, batch)
        return w - gradients, loss

    _, loss = step(weights(), batch())
    np.testing.assert_allclose(loss, squared_error(weights(), batch()), rtol=1e-6)
    assert "dhelix.value_and_grad is called inside" in caplog.text


def test_arguments_that_lie_on_no_device_in_particular() -> None:
    """Such an array goes to the devices of the others, so its copies must, too."""

    @strand_interleave(microbatches=4, verify=True, strict=True)
    def step(w: jax.Array, batch: Any) -> Any:
        loss, gradients = value_and_grad(squared_error)(w, batch)
        return w - gradients, loss

    uncommitted = jnp.asarray(np.asarray(weights()))
    assert not uncommitted.committed
    step(uncommitted, batch())
