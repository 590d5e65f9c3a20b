"""Steps of Equinox modules, and of other trees with leaves that are not arrays: as under `eqx.filter_jit`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.runtime.step.frameworks.fixed_leaves import Fixed, fixed, free
from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.quick import slow_after
from dhelix.tests.runtime.step.frameworks.nnx_training import COUNT, LAYERS, ROWS, WIDTH, batch, mesh


class Network(eqx.Module):
    """Has a function, a number, a flag and None among its leaves, and a static name."""

    layers: jax.Array
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    activation: Callable[[jax.Array], jax.Array]
    scale: float
    extra: None
    name: str = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (x + self.activation(w @ x), None), x, self.layers)
        return self.dropout(self.linear(x)) * self.scale


def network(activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu) -> Network:
    one, other = jax.random.split(jax.random.key(0))
    layers = jax.random.normal(one, (LAYERS, WIDTH, WIDTH)) / 5
    linear = eqx.nn.Linear(WIDTH, WIDTH, key=other)
    return Network(layers, linear, eqx.nn.Dropout(inference=True), activation, 2.0, None, "network")


def loss(model: Network, batch: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(batch) - 1) ** 2)


OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def step_of(take: Callable[..., Any]) -> Callable[..., Any]:
    def train_step(model: Network, moments: Any, batch: jax.Array) -> Any:
        value, gradients = take(model, batch)
        updates, moments = OPTIMIZER.update(gradients, moments, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), moments, value

    return train_step


def own_loop(model: Network, batch: jax.Array) -> Any:
    def microbatch(total: Any, rows: jax.Array) -> Any:
        return jax.tree.map(jnp.add, total, eqx.filter_value_and_grad(loss)(model, rows)), None

    zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_inexact_array))
    total, _ = jax.lax.scan(microbatch, zeros, batch.reshape(ROWS // COUNT, COUNT, WIDTH).swapaxes(0, 1))
    return jax.tree.map(lambda x: x / COUNT, total)


def train(step: Callable[..., Any]) -> tuple[Any, ...]:
    arrays, rest = eqx.partition(network(), eqx.is_array)
    model = eqx.combine(jax.device_put(arrays, NamedSharding(mesh(), P())), rest)  # so that each step compiles once
    state = model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(2):
        *state, value = step(*state, batch())
    return *state, value


@functools.cache
def reference() -> tuple[Any, ...]:
    return train(eqx.filter_jit(step_of(own_loop)))


def check_close(expected: Any, actual: Any, tolerance: float) -> None:
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        if eqx.is_array(want):
            np.testing.assert_allclose(want, got, rtol=0, atol=tolerance)
        else:
            assert want is got or want == got


@pytest.mark.slow
@pytest.mark.parametrize("filtered", [False, True])
def test_own_loop(filtered: bool) -> None:
    function = step_of(own_loop)
    step = strand_interleave(eqx.filter_jit(function) if filtered else function, strict=True)
    actual = train(step)
    check_close(reference(), actual, 1e-6)  # replicas are summed once per step, so additions are in another order
    assert step.report(*actual[:2], batch())["strand-duplication"].changed


@pytest.mark.parametrize("off", [False, True])
def test_microbatches(off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if off:
        monkeypatch.setenv("DHELIX", "off")
    step = strand_interleave(
        step_of(value_and_grad(loss)), microbatches=COUNT, donate_argnums=1, strict=not off, verify=not off
    )
    check_close(reference(), train(step), 1e-6)


def test_what_is_no_array_is_part_of_the_program() -> None:
    traces = []

    def step(model: Network, flag: bool, x: jax.Array) -> Any:
        traces.append(1)
        y = model(x)
        return (y if flag else -y), flag, model.name, model

    model, x = network(), jnp.ones(WIDTH)
    decorated, plain = strand_interleave(step), eqx.filter_jit(step)
    for one in (model, network(jax.nn.relu), eqx.tree_at(lambda m: m.scale, model, 3.0)):
        for flag in (True, False):
            got = [decorated(one, flag, x) for _ in range(2)]
            check_close(plain(one, flag, x), got[1], 1e-6)
            assert got[0][1] is flag and got[0][3].activation is one.activation
    assert len(traces) == 2 * 6


@pytest.mark.parametrize("donate", ["none", "all-except-first", "all"])
def test_donation_of_filter_jit(donate: Any) -> None:
    def step(x: jax.Array, y: jax.Array, *, z: jax.Array) -> Any:
        return x + 1, y + 1, z + 1

    for decorate in (lambda f: f, strand_interleave):
        arrays = [jnp.ones(4) * number for number in range(3)]
        decorate(eqx.filter_jit(step, donate=donate))(arrays[0], arrays[1], z=arrays[2])
        first, rest = donate == "all", donate != "none"
        assert [x.is_deleted() for x in arrays] == [first, rest, rest]


def test_leaves_of_plain_trees(caplog: pytest.LogCaptureFixture) -> None:
    step = strand_interleave(lambda tree: (tree["x"] * len(tree["name"]), tree["name"]))
    for length in range(1, 10):
        assert step({"x": jnp.float32(2), "name": "n" * length}) == (2 * length, "n" * length)
    assert caplog.text.count("pass changing numbers as jnp.asarray(number)") == 1
    with pytest.raises(TypeError, match=r"d\['name'\]|tree\['name'\]"):
        step({"x": jnp.float32(2), "name": set()})


def test_numbers_stay_arguments_where_jit_takes_them() -> None:
    traces = []

    def step(tree: dict[str, Any]) -> Any:
        traces.append(1)
        return tree["x"] * tree["rate"]

    decorated = strand_interleave(step)
    assert [decorated({"x": jnp.ones(()), "rate": float(rate)}) for rate in range(3)] == [0, 1, 2]
    assert len(traces) == 1


def test_fixed_leaves_compare_by_type_and_value() -> None:
    assert Fixed(1) == Fixed(1) and hash(Fixed("a")) == hash(Fixed("a"))
    for one, other in ((1, True), (1, 1.0), (0.0, -0.0), ("a", "b"), (jnp.sin, jnp.cos)):
        assert Fixed(one) != Fixed(other)
    tree = {"f": jnp.sin, "n": None, "x": np.ones(2), "s": "name", "k": 1}
    structure = jax.tree.structure(fixed(tree))
    assert structure.num_leaves == 1 and structure == jax.tree.structure(fixed(dict(tree)))
    assert free(fixed(tree)) is not tree and free(fixed(tree))["f"] is jnp.sin


GRADIENTS: dict[str, tuple[Callable[..., Any], bool, Callable[[], tuple[Any, ...]]]] = {
    "a module": (loss, False, lambda: (network(), batch())),
    "a teacher": (
        lambda model, teacher, x: jnp.mean((jax.vmap(model)(x) - jax.vmap(teacher)(x)) ** 2),
        False,
        lambda: (network(), network(jax.nn.relu), batch()),
    ),
    "auxiliary outputs": (
        lambda model, x: (loss(model, x), {"y": jax.vmap(model)(x), "name": model.name}),
        True,
        lambda: (network(), batch()),
    ),
    "integers": (
        lambda tree, x: jnp.mean(tree["act"](x * tree["w"]) + tree["step"]),
        False,
        lambda: ({"act": jnp.tanh, "w": jnp.ones(WIDTH), "step": jnp.int32(1)}, batch()),
    ),
}


@pytest.mark.parametrize("name", slow_after(1, GRADIENTS))
def test_gradients_are_those_of_filter_value_and_grad(name: str) -> None:
    function, has_aux, arguments = GRADIENTS[name]
    expected = eqx.filter_jit(eqx.filter_value_and_grad(function, has_aux=has_aux))(*arguments())
    check_close(expected, eqx.filter_jit(value_and_grad(function, has_aux=has_aux))(*arguments()), 1e-6)
    step = strand_interleave(value_and_grad(function, has_aux=has_aux), microbatches=COUNT, passes=[])
    check_close(expected, step(*arguments()), 1e-6)


class Counting(eqx.Module):
    """A layer with running statistics: a mean, a number of updates, and a flag whether there was one."""

    statistics: eqx.nn.StateIndex[Any]

    def __init__(self) -> None:
        self.statistics = eqx.nn.StateIndex((jnp.float32(0), jnp.int32(0), jnp.array(False)))

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        mean, updates, _ = state.get(self.statistics)
        return x, state.set(self.statistics, ((mean + x.mean()) / 2, updates + 1, jnp.array(True)))


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_one_update_of_state_a_step(reduce: Any) -> None:
    def loss(w: jax.Array, x: jax.Array, state: eqx.nn.State) -> Any:
        x, state = model(x * w, state)
        return x.sum(), state

    model, state = eqx.nn.make_with_state(Counting)()
    gradients = value_and_grad(loss, has_aux=True, batch_argnames="x")
    step = strand_interleave(gradients, microbatches=4, reduce=reduce, passes=[])
    x = jnp.arange(8.0)
    for _ in range(2):
        (_, state), _ = step(jnp.float32(1), x, state)
    mean, updates, any_update = state.get(model.statistics)
    np.testing.assert_allclose(mean, 0.75 * x.mean())
    assert updates == 2 and any_update
