"""Arguments that `value_and_grad` splits: the named ones, or the only one that holds arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhelix.errors import DhelixError
from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad
from dhelix.tests.quick import slow_after
from dhelix.tests.runtime.step.gradient_checks import ROWS, WIDTH, assert_close, mean_square, normal, split

W, X, Y = normal(WIDTH, WIDTH), normal(ROWS, WIDTH), normal(ROWS, 1)
FROZEN = normal(ROWS, WIDTH, WIDTH)  # as many layers as the batch has rows


def adapted(w: jax.Array, frozen: jax.Array, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, one: (x + jnp.tanh(x @ one) / ROWS, None), x, frozen)
    return mean_square(w, x)


def regression(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x @ w - y) ** 2)


class Model:
    def loss(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return mean_square(w, x)

    def __call__(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return mean_square(w, x)

    @classmethod
    def of_class(cls, w: jax.Array, x: jax.Array) -> jax.Array:
        return mean_square(w, x)


@pytest.mark.parametrize(
    "named", slow_after(1, [{"batch_argnums": 2}, {"batch_argnums": (-1,)}, {"batch_argnames": "x"}])
)
def test_frozen_weights_stay_whole(named: dict[str, Any]) -> None:
    expected = jax.value_and_grad(adapted)(W, FROZEN, X)
    assert_close(expected, split(value_and_grad(adapted, **named))(W, FROZEN, X))


@pytest.mark.parametrize(
    ("args", "kwargs"), [((W, FROZEN, X), {}), ((W, FROZEN), {"x": X}), ((W,), {"x": X, "frozen": FROZEN})]
)
def test_what_could_be_the_batch_must_be_named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    names = (
        r"frozen\)? with leading axis 16; argument (2 \()?x\)? with leading axis 16.*batch_argnames= \(of 'frozen', 'x'"
    )
    with pytest.raises(DhelixError, match=f"cannot tell which arguments are the batch.*{names}"):
        split(value_and_grad(adapted))(*args, **kwargs)
    assert_close(adapted(W, FROZEN, X), split(value_and_grad(adapted, batch_argnames="x"))(*args, **kwargs)[0])


def test_a_batch_of_several_arguments() -> None:
    expected = jax.value_and_grad(regression)(W, X, Y)
    for numbers, names in (((1, 2), None), (None, ("x", "y")), (1, "y")):
        named = value_and_grad(regression, batch_argnums=numbers, batch_argnames=names)
        assert_close(expected, split(named)(W, X, Y))
    with pytest.raises(DhelixError, match=r"batch_argnums= \(of 1, 2\)"):
        split(value_and_grad(regression))(W, X, Y)


def test_of_several_arguments_by_one_name() -> None:
    def loss(w: jax.Array, *batch: jax.Array) -> jax.Array:
        return regression(w, *batch)

    assert_close(jax.value_and_grad(loss)(W, X, Y), split(value_and_grad(loss, batch_argnames="batch"))(W, X, Y))


def test_what_is_no_array_is_no_batch() -> None:
    def loss(w: jax.Array, activation: Any, x: jax.Array, scale: Any, names: Any, none: None) -> jax.Array:
        return mean_square(w, activation(x)) * scale["a"] * names[1]

    def step(function: Any) -> Any:
        return lambda w, x: function(w, jnp.tanh, x, {"a": jnp.float32(2)}, ("mode", 3), None)

    assert_close(jax.jit(step(jax.value_and_grad(loss)))(W, X), split(step(value_and_grad(loss)))(W, X))


@pytest.mark.parametrize(
    "loss",
    slow_after(2, [
        Model().loss, Model.of_class, Model(), jax.jit(mean_square), jax.checkpoint(mean_square),
        functools.partial(lambda scale, w, x: scale * mean_square(w, x), 1.0),
        functools.partial(lambda w, scale, x: scale * mean_square(w, x), scale=1.0),
    ]),
    ids=["method", "class method", "object", "jit", "checkpoint", "partial", "partial by keyword"],
)  # fmt: skip
def test_all_that_can_be_called(loss: Callable[..., Any]) -> None:
    expected = jax.value_and_grad(loss)(W, x=X)
    assert_close(expected, split(value_and_grad(loss, batch_argnames="x"))(W, x=X))
    assert_close(expected, split(value_and_grad(loss))(W, x=X))


@pytest.mark.parametrize("argnums", [1, -1, [1], (1, 0), (-1, -2), np.int64(1)])
def test_positions_as_jax_takes_them(argnums: Any) -> None:
    def loss(scale: jax.Array, w: jax.Array, *, x: jax.Array) -> jax.Array:
        return scale * mean_square(w, x)

    expected = jax.value_and_grad(loss, argnums)(jnp.float32(2), W, x=X)
    assert_close(expected, split(value_and_grad(loss, argnums, batch_argnames="x"))(jnp.float32(2), W, x=X))


@pytest.mark.parametrize("argnums", [5, -5, (0, 7), ()])
def test_positions_that_jax_refuses(argnums: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        jax.value_and_grad(mean_square, argnums)(W, X)
    with pytest.raises(refused.type) as ours:
        split(value_and_grad(mean_square, argnums))(W, X)
    assert str(ours.value).startswith(str(refused.value).splitlines()[0])


def test_random_keys_by_name_and_in_trees() -> None:
    def loss(w: jax.Array, x: jax.Array, *, keys: dict[str, jax.Array]) -> Any:
        noise = {name: jax.random.uniform(key, x.shape[:1]) for name, key in keys.items()}
        return mean_square(w, x), noise

    keys = {"dropout": jax.random.key(1), "noise": jax.random.PRNGKey(2)}
    (_, noise), _ = split(value_and_grad(loss, has_aux=True, rng_argnames="keys"))(W, X, keys=keys)
    assert all(len(np.unique(drawn)) == ROWS for drawn in noise.values())
    with pytest.raises(DhelixError, match="argument 1 .* random keys and other arrays.* argument of their own"):
        split(value_and_grad(lambda w, batch: jnp.mean(w)))(W, {"x": X, "key": jax.random.key(0)})
    with pytest.raises(DhelixError, match="argument keys holds random keys.*rng_argnames='keys'"):
        split(value_and_grad(loss, has_aux=True))(W, X, keys=keys)


@pytest.mark.parametrize(
    ("options", "args", "message"),
    [
        ({"batch_argnums": 3}, (W, X), "batch_argnums=3: the loss function was called with 2 positional arguments"),
        ({"batch_argnames": "y"}, (W, X), "batch_argnames='y': the call passes no such argument; it passes w, x"),
        ({"batch_argnums": (0, 1)}, (W, X), "argument 0 is differentiated and is the batch"),
        ({"batch_argnums": 1, "rng_argnums": 1}, (W, X), "argument 1 is the batch and holds random keys"),
        ({"batch_argnums": ()}, (W, X), "no batch to split"),
        ({}, (W, {"x": X, "y": "label"}), r"argument 1\['y'\] is a Python str and has no batch axis"),
        ({}, (W, {"x": X, "scale": jnp.float32(1)}), r"argument 1\['scale'\] is float32\[\] and has no batch axis"),
        ({}, (W, X[:0]), "argument 1 has no rows to split into 4 micro-batches"),
    ],
)
def test_bad_input(options: dict[str, Any], args: tuple[Any, ...], message: str) -> None:
    def loss(w: jax.Array, x: Any, y: Any = None) -> jax.Array:
        return mean_square(w, x)

    def step(w: jax.Array) -> Any:
        return value_and_grad(loss, **options)(w, *args[1:])

    with pytest.raises(DhelixError, match=message):
        split(step)(args[0])


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(DhelixError, match="batch_argnames='z': .* no parameter of that name; it has w, x, y"):
        value_and_grad(regression, batch_argnames=("x", "z"))
    with pytest.raises(DhelixError, match="rng_argnames='key'"):
        value_and_grad(regression, rng_argnames="key")
    with pytest.raises(DhelixError, match="parameters are unknown; give positions"):
        value_and_grad(min, batch_argnames="x")
