"""`value_and_grad` is JAX's outside a step, and its loop over micro-batches computes the same inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError
from dhelix.runtime.step.value_and_grad import microbatching, value_and_grad

ROWS, WIDTH = 16, 8


def _normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.RandomState(sum(shape)).standard_normal(shape), dtype)


def _split(function: Callable[..., Any], microbatches: int = 4, reduce: str = "mean") -> Callable[..., Any]:
    """`function` jitted, its value_and_grad calls looping over micro-batches."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        with microbatching(microbatches, reduce):
            return function(*args, **kwargs)

    return jax.jit(traced)


def _close(expected: Any, actual: Any, tolerance: float = 1e-6) -> None:
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        assert want.dtype == got.dtype and want.shape == got.shape
        scale = max(float(jnp.max(jnp.abs(want.astype(jnp.float32)))), 1e-30)
        np.testing.assert_allclose(want.astype(jnp.float32), got.astype(jnp.float32), atol=tolerance * scale)


def _mean(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def _masked_mean(w: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    rows = jnp.tanh(batch["x"] @ w).sum(axis=1)
    return jnp.where(batch["mask"], rows, 0).sum() / batch["mask"].sum()


MASKED = {"x": _normal(ROWS, WIDTH), "mask": jnp.arange(ROWS) < 7}


def test_outside_a_step_it_is_jaxs() -> None:
    w, x = _normal(WIDTH, WIDTH), _normal(ROWS, WIDTH)
    loss, grads = value_and_grad(_mean, reduce="sum")(w, x)
    expected = jax.value_and_grad(_mean)(w, x)
    np.testing.assert_array_equal(loss, expected[0])
    np.testing.assert_array_equal(grads, expected[1])


@pytest.mark.parametrize("microbatches", [1, 2, 8, 16])
def test_mean_loss(microbatches: int) -> None:
    w, x = _normal(WIDTH, WIDTH), _normal(ROWS, WIDTH)
    _close(jax.value_and_grad(_mean)(w, x), _split(value_and_grad(_mean), microbatches)(w, x))


def test_sum_loss_and_several_differentiated_arguments() -> None:
    def loss(w: jax.Array, x: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w + b))

    args = _normal(WIDTH, WIDTH), _normal(ROWS, WIDTH), _normal(WIDTH)
    split = _split(value_and_grad(loss, argnums=(0, 2), reduce="sum"))
    _close(jax.value_and_grad(loss, argnums=(0, 2))(*args), split(*args))


def test_weighted_by_unmasked_tokens_even_where_a_microbatch_has_none() -> None:
    w = _normal(WIDTH, WIDTH)
    weighted = value_and_grad(_masked_mean, reduce="weighted", weights=lambda w, batch: batch["mask"].sum())
    _close(jax.value_and_grad(_masked_mean)(w, MASKED), _split(weighted)(w, MASKED))
    empty = {**MASKED, "mask": jnp.arange(ROWS) % 4 == 1}  # micro-batches 0, 2, 3 have no token at all
    _close(jax.value_and_grad(_masked_mean)(w, empty), _split(weighted)(w, empty))


def test_where_nothing_counts_all_is_zero() -> None:
    """A loss that guards itself is zero then, and a step in which some devices have padding alone must not be NaN."""

    def guarded(w: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        rows = jnp.tanh(batch["x"] @ w).sum(axis=1)
        return jnp.where(batch["mask"], rows, 0).sum() / jnp.maximum(batch["mask"].sum(), 1)

    nothing = {**MASKED, "mask": jnp.zeros(ROWS, bool)}
    weighted = value_and_grad(guarded, reduce="weighted", weights=lambda w, batch: batch["mask"].sum())
    w = _normal(WIDTH, WIDTH)
    _close(jax.value_and_grad(guarded)(w, nothing), _split(weighted)(w, nothing))


def test_types_of_jax_and_sums_in_float32() -> None:
    w, x = _normal(WIDTH, WIDTH, dtype=jnp.bfloat16), _normal(ROWS, WIDTH, dtype=jnp.bfloat16)
    expected, actual = jax.value_and_grad(_mean)(w, x), _split(value_and_grad(_mean), 16)(w, x)
    _close(expected, actual, tolerance=2 * 2.0**-7)
    text = _split(value_and_grad(_mean), 16).lower(w, x).as_text()
    assert f"tensor<{WIDTH}x{WIDTH}xf32>" in text


def test_auxiliary_outputs() -> None:
    def loss(w: jax.Array, x: jax.Array) -> Any:
        y = jnp.tanh(x @ w)
        aux = {
            "rows": y, "columns": jnp.mean(y**2, axis=0), "half": jnp.mean(y**2) / 2,
            "count": jnp.sum(y > 0), "per column": jnp.sum(y > 0, axis=0),
        }  # fmt: skip
        return jnp.mean(y**2), aux

    args = _normal(WIDTH, WIDTH), _normal(ROWS, WIDTH)
    _close(jax.value_and_grad(loss, has_aux=True)(*args), _split(value_and_grad(loss, has_aux=True))(*args))


def test_arguments_that_are_no_arrays_and_auxiliary_outputs_that_are_pythons() -> None:
    def loss(w: jax.Array, apply: Any, x: jax.Array, train: bool, mode: str = "") -> Any:
        y = apply(x @ w) if train and mode == "a" else x @ w
        return jnp.mean(y**2), {"rows": len(x), "scale": 2.0}

    w, x = _normal(WIDTH, WIDTH), _normal(ROWS, WIDTH)

    def step(function: Any) -> Any:
        return lambda w, x: function(w, jnp.tanh, x, train=True, mode="a")

    expected = jax.jit(step(jax.value_and_grad(loss, has_aux=True)))(w, x)
    _close(expected, _split(step(value_and_grad(loss, has_aux=True, batch_argnums=2)))(w, x))


def test_what_jax_keeps_of_an_inner_function_is_of_this_step() -> None:
    inner = jax.jit(value_and_grad(lambda w, x: jnp.sum(x @ w)))
    w, x = _normal(WIDTH, WIDTH), _normal(ROWS, WIDTH)

    def loops(microbatches: int) -> bool:
        return f"length={microbatches}" in str(jax.make_jaxpr(_split(lambda w, x: inner(w, x), microbatches))(w, x))

    assert loops(4) and loops(2)
    assert "scan" not in str(jax.make_jaxpr(inner)(w, x))
    _split(lambda w, x: inner(w, x), 4, "sum")(w, x)
    _close(jax.value_and_grad(lambda w, x: jnp.sum(x @ w))(w, x), inner(w, x))


def test_random_keys_differ_between_microbatches() -> None:
    def loss(w: jax.Array, x: jax.Array, key: jax.Array) -> Any:
        noise = jax.random.uniform(key, x.shape[:1])
        return jnp.mean(x @ w), noise

    split = _split(value_and_grad(loss, has_aux=True, rng_argnums=2))
    (_, noise), _ = split(_normal(WIDTH, WIDTH), _normal(ROWS, WIDTH), jax.random.key(1))
    assert len(np.unique(noise)) == ROWS


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_no_row_of_a_sharded_batch_moves(axis_type: AxisType) -> None:
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(axis_type,))
    w = jax.device_put(_normal(WIDTH, WIDTH), NamedSharding(mesh, P()))
    x = jax.device_put(_normal(32, WIDTH), NamedSharding(mesh, P("dp")))
    split = _split(value_and_grad(_mean))
    _close(jax.jit(value_and_grad(_mean))(w, x), split(w, x))
    text = split.lower(w, x).compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma: bool) -> None:
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)

    def step(w: jax.Array, x: jax.Array) -> Any:
        loss, grads = value_and_grad(_mean)(w, x)
        return jax.lax.pmean(loss, ("dp", "tp")), grads

    specs = P(None, "tp"), P("dp")
    sharded = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(), specs[0]), check_vma=check_vma)
    args = _normal(WIDTH, WIDTH), _normal(32, WIDTH)
    _close(jax.jit(sharded)(*args), _split(sharded)(*args))


def _loss_of(aux: Callable[[jax.Array], Any]) -> Callable[..., Any]:
    return lambda w, x: (jnp.mean(x @ w), aux(x))


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (value_and_grad(_mean), (_normal(10, WIDTH),), r"argument 1 has 10 rows, which 4 micro-batches"),
        (
            value_and_grad(lambda w, b: _mean(w, b["x"])),
            ({"x": _normal(ROWS, WIDTH), "y": _normal(8, 2)},),
            r"argument 1\['x'\] has 16 rows and argument 1\['y'\] 8",
        ),
        (
            value_and_grad(lambda w, x, k: _mean(w, x)),
            (_normal(ROWS, WIDTH), jax.random.key(0)),
            r"argument 2 has no batch axis to split.*rng_argnums",
        ),
        (value_and_grad(lambda w: jnp.sum(w)), (), "no batch to split"),
        (value_and_grad(_mean, reduce="weighted"), (_normal(ROWS, WIDTH),), "needs .*weights="),
        (value_and_grad(_mean, weights=lambda w, x: 1.0), (_normal(ROWS, WIDTH),), 'take reduce="weighted"'),
        (
            value_and_grad(_mean, reduce="weighted", weights=lambda w, x: x[:, 0]),
            (_normal(ROWS, WIDTH),),
            "must return one number",
        ),
        (
            value_and_grad(_loss_of(lambda x: {"gram": x @ x.T}), has_aux=True),
            (_normal(ROWS, WIDTH),),
            r"aux\['gram'\] is float32\[4, 4\] for a micro-batch and \[16, 16\] for the batch",
        ),
        (
            value_and_grad(_loss_of(lambda x: jnp.all(x > 0)), has_aux=True),
            (_normal(ROWS, WIDTH),),
            r"aux is bool\[\]",
        ),
    ],
)
def test_bad_input(function: Callable[..., Any], args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DhelixError, match=message):
        _split(function)(_normal(WIDTH, WIDTH), *args)


def test_unknown_reduction() -> None:
    with pytest.raises(DhelixError, match="take one of mean, sum, weighted"):
        value_and_grad(_mean, reduce="median")
