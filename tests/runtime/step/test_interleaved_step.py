"""Operations of JAX and Python on the result of `jax.jit`, applied to a decorated step."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhelix.errors import DhelixError
from dhelix.runtime.step.frameworks import argument_keys
from dhelix.runtime.step.interleaved_step import InterleavedStep
from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.runtime.steps import batch, squared_error, weights


@strand_interleave(microbatches=4, passes=[])
def sgd(w: jax.Array, data: Any) -> tuple[jax.Array, jax.Array]:
    """One step of SGD."""
    loss, gradients = value_and_grad(squared_error)(w, data)
    return w - gradients, loss


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def test_shapes_and_jaxprs() -> None:
    arguments = weights(), batch()
    expected = jax.eval_shape(jax.jit(sgd.__wrapped__), *arguments)
    assert _abstract(sgd.eval_shape(*arguments)) == _abstract(expected)
    assert _abstract(jax.eval_shape(sgd, *arguments)) == _abstract(expected)
    assert "scan" in str(sgd.trace(*arguments).jaxpr) and "scan" in str(jax.make_jaxpr(sgd)(*arguments))


def test_export() -> None:
    assert isinstance(sgd, jax.stages.Wrapped)
    exported = jax.export.export(sgd)(weights(), batch())
    assert exported.fun_name == "sgd"
    for want, got in zip(sgd(weights(), batch()), exported.call(weights(), batch()), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_clear_cache_frees_programs() -> None:
    step = strand_interleave(sgd.__wrapped__, microbatches=4, passes=[])
    first = step(weights(), batch())[1]
    programs = [weakref.ref(one) for one in set(step._specializations.values())]
    step.clear_cache()
    gc.collect()
    assert programs and not any(one() for one in programs)
    np.testing.assert_array_equal(step(weights(), batch())[1], first)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))])
def test_copies_are_the_step_itself(how: Any) -> None:
    assert how({"step": sgd})["step"] is sgd


def test_shapes_instead_of_arrays_are_one_error() -> None:
    shapes: Any = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    with pytest.raises(DhelixError, match=r"sgd is called with shapes instead of arrays: call its report\(\)"):
        sgd(shapes, None)


def test_it_says_what_it_is() -> None:
    assert sgd.__name__ == "sgd" and sgd.__doc__ == "One step of SGD."
    assert list(inspect.signature(sgd).parameters) == ["w", "data"]


def test_partial_functions() -> None:
    def step(rate: float, w: jax.Array, data: Any) -> Any:
        loss, gradients = value_and_grad(squared_error)(w, data)
        return w - rate * gradients, loss

    outer = functools.partial(sgd, weights())
    inner = strand_interleave(functools.partial(step, 1.0), microbatches=4, passes=[])
    np.testing.assert_array_equal(outer(batch())[0], inner(weights(), batch())[0])
    assert inner.__name__ == "step" and inner.report(weights(), batch()).module.startswith("jit_step")
    assert list(inspect.signature(inner).parameters) == ["w", "data"]


class Trainer:
    rate = 1.0

    @functools.partial(strand_interleave, microbatches=4, passes=[], static_argnums=0)
    def method(self, w: jax.Array, data: Any) -> Any:
        return self(w, data)

    @classmethod
    @functools.partial(strand_interleave, microbatches=4, passes=[], static_argnums=0)
    def of_class(cls, w: jax.Array, data: Any) -> Any:
        return cls()(w, data)

    @staticmethod
    @strand_interleave(microbatches=4, passes=[])
    def static(w: jax.Array, data: Any) -> Any:
        return Trainer()(w, data)

    def __call__(self, w: jax.Array, data: Any) -> Any:
        loss, gradients = value_and_grad(squared_error)(w, data)
        return w - self.rate * gradients, loss


def test_methods_and_callable_objects() -> None:
    trainer = Trainer()
    arguments = weights(), batch()
    of_object = strand_interleave(trainer, microbatches=4, passes=[])
    bound = strand_interleave(trainer.__call__, microbatches=4, passes=[])
    for step in (trainer.method, trainer.of_class, trainer.static, Trainer.static, of_object, bound):
        assert step.eval_shape(*arguments)[1].shape == ()
        np.testing.assert_array_equal(step(*arguments)[0], sgd(*arguments)[0])
    assert of_object.__name__ == "Trainer" and isinstance(Trainer.method, InterleavedStep)
    method = copy.deepcopy(trainer.method)
    assert list(inspect.signature(method).parameters) == ["w", "data"]
    assert method.trace(*arguments).jaxpr and not method.report(*arguments).changed
    method.clear_cache()
    assert not Trainer.method._specializations
    assert jnp.isfinite(method(*arguments)[1])


def test_shardings_that_lay_an_array_out_alike_are_one_program() -> None:
    """JAX reports shardings of results without mesh axes of one device, so the keys leave them out, too."""
    mesh = jax.make_mesh((2, 1), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def place(*spec: str | None) -> object:
        return argument_keys.place(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))

    assert place(None, "tp") == place() == place("tp", None)
    assert place("dp") == place("dp", "tp") != place(None, "dp") != place()
