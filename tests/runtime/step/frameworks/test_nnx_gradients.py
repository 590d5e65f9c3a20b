"""`dhelix.value_and_grad` of NNX objects equals `nnx.value_and_grad`, also over micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dhelix.errors import DhelixError
from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.quick import slow_after
from dhelix.tests.runtime.step.frameworks.nnx_training import COUNT, ROWS, WIDTH, batch, loss, objects


def _linear() -> nnx.Linear:
    return nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))


def _squares(model: nnx.Linear, batch: jax.Array) -> jax.Array:
    return jnp.mean(model(batch) ** 2)


def _close(expected: Any, actual: Any) -> None:
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), expected, actual)


def _split(function: Callable[..., Any]) -> Callable[..., Any]:
    return strand_interleave(function, microbatches=COUNT, passes=[])


WRT = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("bias")))
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[[], tuple[Any, ...]]]] = {
    "one model": (_squares, {}, lambda: (_linear(), batch())),
    "some variables": (_squares, {"argnums": WRT}, lambda: (_linear(), batch())),
    "a second model": (
        lambda model, teacher, x: jnp.mean((model(x) - teacher(x)) ** 2),
        {},
        lambda: (_linear(), nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1)), batch()),
    ),
    "two models": (
        lambda one, other, x: jnp.mean((one(x) * other(x)) ** 2),
        {"argnums": (0, 1)},
        lambda: (_linear(), nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1)), batch()),
    ),
    "in a tree": (
        lambda models, x: jnp.mean((models["a"](x) * models["scale"]) ** 2),
        {},
        lambda: ({"a": _linear(), "scale": jnp.float32(2)}, batch()),
    ),
    "auxiliary outputs": (
        lambda model, x: (_squares(model, x), {"rows": x.sum(axis=1), "mean": x.mean(), "count": x.shape[0]}),
        {"has_aux": True},
        lambda: (_linear(), batch()),
    ),
}


@pytest.mark.parametrize("name", slow_after(1, CASES))
def test_gradients_are_nnxs(name: str) -> None:
    function, options, arguments = CASES[name]
    expected = nnx.value_and_grad(function, **options)(*arguments())
    _close(expected, value_and_grad(function, **options)(*arguments()))
    _close(expected, _split(value_and_grad(function, **options))(*arguments()))


def test_what_the_loss_changes_goes_from_one_micro_batch_to_the_next() -> None:
    model, reference = objects()[0], objects()[0]
    _split(value_and_grad(loss))(model, batch())
    plain = nnx.jit(nnx.value_and_grad(loss))
    for rows in batch().reshape(ROWS // COUNT, COUNT, WIDTH).swapaxes(0, 1):
        plain(reference, rows)
    _close(nnx.state(reference, nnx.BatchStat), nnx.state(model, nnx.BatchStat))
    assert model.dropout.rngs.count[...] == COUNT


@pytest.mark.filterwarnings("ignore:.*sow:DeprecationWarning")
def test_sown_values_are_those_of_the_whole_batch() -> None:
    class Sowing(nnx.Module):
        def __init__(self) -> None:
            self.linear = _linear()

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.linear(x)
            self.sow(nnx.Intermediate, "hidden", x)
            return x

    model: Any = Sowing()
    reference = Sowing()
    for _ in range(2):  # the second call appends
        _split(value_and_grad(_squares))(model, batch())
        nnx.value_and_grad(_squares)(reference, batch())
    _close(nnx.state(reference), nnx.state(model))
    assert [x.shape for x in model.hidden.get_value()] == [(ROWS, WIDTH)] * 2


def test_the_loss_may_change_the_graph_and_return_objects() -> None:
    def changing(model: Any, x: jax.Array) -> Any:
        model.calls = 1
        model.last = model.first
        return loss(model, x), (model.first, nnx.Param(x.mean()))

    model = objects()[0]
    model.eval()
    (_, (first, mean)), _ = _split(value_and_grad(changing, has_aux=True))(model, batch())
    assert model.calls == 1 and first is model.first is model.last
    np.testing.assert_allclose(mean[...], batch().mean(), rtol=1e-5, atol=1e-7)


def test_keyword_arguments_are_the_same_for_all() -> None:
    def function(model: nnx.Linear, x: jax.Array, *, teacher: nnx.Linear, scale: jax.Array) -> jax.Array:
        return jnp.mean((model(x) - teacher(x)) ** 2) * scale

    teacher = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))
    named = {"teacher": teacher, "scale": jnp.float32(3)}
    expected = nnx.value_and_grad(lambda model, x: function(model, x, **named))(_linear(), batch())
    _close(expected, _split(value_and_grad(function))(_linear(), batch(), **named))


class Remat(nnx.Module):
    """Layers whose transformation replaces all variables' values by equal ones; some variables are differentiated."""

    def __init__(self) -> None:
        self.linear = nnx.LoRA(WIDTH, 2, WIDTH, base_module=_linear(), rngs=nnx.Rngs(1))

    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


@pytest.mark.parametrize("which", [nnx.Param, nnx.LoRAParam])
def test_variables_that_come_back_from_a_transformation(which: Any) -> None:
    argnums = nnx.DiffState(0, which)
    model, reference = Remat(), Remat()
    for each in model, reference:
        each.linear.lora_b[...] = jnp.full((2, WIDTH), 0.1)
    expected = nnx.value_and_grad(_squares, argnums=argnums)(reference, batch())
    _close(expected, _split(value_and_grad(_squares, argnums=argnums))(model, batch()))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(reference), nnx.state(model))


def test_verification_names_variables() -> None:
    mean = value_and_grad(lambda model, x: jnp.mean(model(x)))  # zero here, but its gradients are not
    step = strand_interleave(mean, microbatches=COUNT, passes=[], verify=True, reduce="sum")
    with pytest.raises(DhelixError, match=r"gradient\['\w+'\] differs .* use reduce="):
        step(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.zeros), batch())


def test_without_a_batch() -> None:
    data = batch()
    with pytest.raises(DhelixError, match="found no batch to split"):
        _split(value_and_grad(lambda model: _squares(model, data)))(_linear())
