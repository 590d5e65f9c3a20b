"""`value_and_grad` is JAX's outside a step. Inside, its loop over micro-batches computes the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError
from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad
from dhelix.tests.runtime.step.gradient_checks import ROWS, WIDTH, assert_close, mean_square, normal, split


def _masked_mean(w: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    rows = jnp.tanh(batch["x"] @ w).sum(axis=1)
    return jnp.where(batch["mask"], rows, 0).sum() / batch["mask"].sum()


MASKED = {"x": normal(ROWS, WIDTH), "mask": jnp.arange(ROWS) < 7}


def test_outside_a_step_it_is_jaxs() -> None:
    w, x = normal(WIDTH, WIDTH), normal(ROWS, WIDTH)
    loss, grads = value_and_grad(mean_square, reduce="sum")(w, x)
    expected = jax.value_and_grad(mean_square)(w, x)
    np.testing.assert_array_equal(loss, expected[0])
    np.testing.assert_array_equal(grads, expected[1])


@pytest.mark.parametrize("microbatches", [1, 2, 8, 16])
def test_mean_loss(microbatches: int) -> None:
    w, x = normal(WIDTH, WIDTH), normal(ROWS, WIDTH)
    assert_close(jax.value_and_grad(mean_square)(w, x), split(value_and_grad(mean_square), microbatches)(w, x))


def test_sum_loss_and_several_differentiated_arguments() -> None:
    def loss(w: jax.Array, x: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w + b))

    args = normal(WIDTH, WIDTH), normal(ROWS, WIDTH), normal(WIDTH)
    ours = split(value_and_grad(loss, argnums=(0, 2), reduce="sum"))
    terms = ROWS * WIDTH  # of the loss; each is at most 1
    assert_close(jax.value_and_grad(loss, argnums=(0, 2))(*args), ours(*args), tolerance=1e-7, terms=terms)


def test_weighted_by_unmasked_tokens_even_where_a_microbatch_has_none() -> None:
    w = normal(WIDTH, WIDTH)
    weighted = value_and_grad(_masked_mean, reduce="weighted", weights=lambda w, batch: batch["mask"].sum())
    assert_close(jax.value_and_grad(_masked_mean)(w, MASKED), split(weighted)(w, MASKED))
    empty = {**MASKED, "mask": jnp.arange(ROWS) % 4 == 1}  # micro-batches 0, 2, 3 have no token
    assert_close(jax.value_and_grad(_masked_mean)(w, empty), split(weighted)(w, empty))


def test_where_nothing_counts_all_is_zero() -> None:
    """A loss that guards against 0/0 is zero then. A step in which some devices have only padding must not be NaN."""

    def guarded(w: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        rows = jnp.tanh(batch["x"] @ w).sum(axis=1)
        return jnp.where(batch["mask"], rows, 0).sum() / jnp.maximum(batch["mask"].sum(), 1)

    nothing = {**MASKED, "mask": jnp.zeros(ROWS, bool)}
    weighted = value_and_grad(guarded, reduce="weighted", weights=lambda w, batch: batch["mask"].sum())
    w = normal(WIDTH, WIDTH)
    assert_close(jax.value_and_grad(guarded)(w, nothing), split(weighted)(w, nothing))


def test_types_of_jax_and_sums_in_float32() -> None:
    w, x = normal(WIDTH, WIDTH, dtype=jnp.bfloat16), normal(ROWS, WIDTH, dtype=jnp.bfloat16)
    expected, actual = jax.value_and_grad(mean_square)(w, x), split(value_and_grad(mean_square), 16)(w, x)
    assert_close(expected, actual, tolerance=2 * 2.0**-7)
    text = split(value_and_grad(mean_square), 16).lower(w, x).as_text()
    assert f"tensor<{WIDTH}x{WIDTH}xf32>" in text


def test_auxiliary_outputs() -> None:
    def loss(w: jax.Array, x: jax.Array) -> Any:
        y = jnp.tanh(x @ w)
        aux = {
            "rows": y, "columns": jnp.mean(y**2, axis=0), "half": jnp.mean(y**2) / 2,
            "count": jnp.sum(y > 0), "per column": jnp.sum(y > 0, axis=0),
        }  # fmt: skip
        return jnp.mean(y**2), aux

    args = normal(WIDTH, WIDTH), normal(ROWS, WIDTH)
    assert_close(jax.value_and_grad(loss, has_aux=True)(*args), split(value_and_grad(loss, has_aux=True))(*args))


def test_arguments_that_are_no_arrays_and_auxiliary_outputs_that_are_pythons() -> None:
    def loss(w: jax.Array, apply: Any, x: jax.Array, train: bool, mode: str = "") -> Any:
        y = apply(x @ w) if train and mode == "a" else x @ w
        return jnp.mean(y**2), {"rows": len(x), "scale": 2.0}

    w, x = normal(WIDTH, WIDTH), normal(ROWS, WIDTH)

    def step(function: Any) -> Any:
        return lambda w, x: function(w, jnp.tanh, x, train=True, mode="a")

    expected = jax.jit(step(jax.value_and_grad(loss, has_aux=True)))(w, x)
    assert_close(expected, split(step(value_and_grad(loss, has_aux=True, batch_argnums=2)))(w, x))


def test_what_jax_keeps_of_an_inner_function_is_of_this_step() -> None:
    inner = jax.jit(value_and_grad(lambda w, x: jnp.sum(x @ w)))
    w, x = normal(WIDTH, WIDTH), normal(ROWS, WIDTH)

    def loops(microbatches: int) -> bool:
        return f"length={microbatches}" in str(jax.make_jaxpr(split(lambda w, x: inner(w, x), microbatches))(w, x))

    assert loops(4) and loops(2)
    assert "scan" not in str(jax.make_jaxpr(inner)(w, x))
    split(lambda w, x: inner(w, x), 4, "sum")(w, x)
    assert_close(jax.value_and_grad(lambda w, x: jnp.sum(x @ w))(w, x), inner(w, x))


def test_random_keys_differ_between_microbatches() -> None:
    def loss(w: jax.Array, x: jax.Array, key: jax.Array) -> Any:
        noise = jax.random.uniform(key, x.shape[:1])
        return jnp.mean(x @ w), noise

    ours = split(value_and_grad(loss, has_aux=True, rng_argnums=2))
    (_, noise), _ = ours(normal(WIDTH, WIDTH), normal(ROWS, WIDTH), jax.random.key(1))
    assert len(np.unique(noise)) == ROWS


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_no_row_of_a_sharded_batch_moves(axis_type: AxisType) -> None:
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(axis_type,))
    w = jax.device_put(normal(WIDTH, WIDTH), NamedSharding(mesh, P()))
    x = jax.device_put(normal(32, WIDTH), NamedSharding(mesh, P("dp")))
    ours = split(value_and_grad(mean_square))
    assert_close(jax.jit(value_and_grad(mean_square))(w, x), ours(w, x))
    text = ours.lower(w, x).compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma: bool) -> None:
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)

    def step(w: jax.Array, x: jax.Array) -> Any:
        loss, grads = value_and_grad(mean_square)(w, x)
        return jax.lax.pmean(loss, ("dp", "tp")), grads

    specs = P(None, "tp"), P("dp")
    sharded = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(), specs[0]), check_vma=check_vma)
    args = normal(WIDTH, WIDTH), normal(32, WIDTH)
    assert_close(jax.jit(sharded)(*args), split(sharded)(*args))


def _loss_of(aux: Callable[[jax.Array], Any]) -> Callable[..., Any]:
    return lambda w, x: (jnp.mean(x @ w), aux(x))


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (
            value_and_grad(mean_square),
            (normal(10, WIDTH),),
            r"argument 1 has 10 rows, which do not divide into 4 micro-batches",
        ),
        (
            value_and_grad(lambda w, b: mean_square(w, b["x"])),
            ({"x": normal(ROWS, WIDTH), "y": normal(8, 2)},),
            r"argument 1\['x'\] has 16 rows, but argument 1\['y'\] has 8",
        ),
        (
            value_and_grad(lambda w, x, k: mean_square(w, x)),
            (normal(ROWS, WIDTH), jax.random.key(0)),
            r"argument 2 \(k\) holds random keys: name it with .*rng_argnums=2",
        ),
        (value_and_grad(lambda w: jnp.sum(w)), (), "no batch to split"),
        (value_and_grad(mean_square, reduce="weighted"), (normal(ROWS, WIDTH),), "needs .*weights="),
        (value_and_grad(mean_square, weights=lambda w, x: 1.0), (normal(ROWS, WIDTH),), 'use reduce="weighted"'),
        (
            value_and_grad(mean_square, reduce="weighted", weights=lambda w, x: x[:, 0]),
            (normal(ROWS, WIDTH),),
            "must return one number",
        ),
        (
            value_and_grad(_loss_of(lambda x: {"gram": x @ x.T}), has_aux=True),
            (normal(ROWS, WIDTH),),
            r"aux\['gram'\] is float32\[4, 4\] for a micro-batch and \[16, 16\] for the batch",
        ),
        (
            value_and_grad(_loss_of(lambda x: jnp.all(x > 0)), has_aux=True),
            (normal(ROWS, WIDTH),),
            r"aux is bool\[\]",
        ),
    ],
)
def test_bad_input(function: Callable[..., Any], args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DhelixError, match=message):
        split(function)(normal(WIDTH, WIDTH), *args)


def test_the_program_in_the_docs() -> None:
    page = Path(__file__).parents[4] / "docs" / "guide" / "gradients.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(program, str(page), "exec"), names)
    adapters = {"a": jnp.full((8, 2), 0.1), "b": jnp.full((2, 8), 0.1)}
    batch = jnp.full((32, 8, 8), 0.01), jnp.ones((32, 8)), jnp.zeros((32, 8))
    loss, grads = jax.value_and_grad(names["loss_fn"])(adapters, *batch)
    assert_close((jax.tree.map(lambda p, g: p - 0.1 * g, adapters, grads), loss), (names["adapters"], names["loss"]))


def test_unknown_reduction() -> None:
    with pytest.raises(DhelixError, match="use one of mean, sum, weighted"):
        value_and_grad(mean_square, reduce="median")
