"""Outputs of micro-batches are combined to the type that `jax.value_and_grad` gives, each kind by its own rule."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.linen import fp8_ops
from flax.nnx import bridge
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError
from dhelix.runtime.pipeline.fold import Fold
from dhelix.runtime.step.microbatches.value_and_grad import microbatching, value_and_grad
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.runtime.step.gradient_checks import (
    ROWS,
    WIDTH,
    assert_close,
    assert_same_types,
    mean_square,
    normal,
    split,
)

FP8 = "_overwrite_with_gradient"
W, X = normal(WIDTH, WIDTH), normal(ROWS, WIDTH)


def test_weak_types_stay_weak_so_that_the_next_step_is_the_same_program() -> None:
    def loss(params: Any, x: jax.Array) -> Any:
        y = (x @ params["w"].astype(jnp.bfloat16)) * params["scale"]
        return jnp.mean(y.astype(jnp.float32) ** 2), (params["scale"] * 2, y.dtype == jnp.bfloat16 and 1)

    params = {"w": W, "scale": 1.0}
    expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, X.astype(jnp.bfloat16))
    actual = split(value_and_grad(loss, has_aux=True))(params, X.astype(jnp.bfloat16))
    assert actual[1]["scale"].weak_type
    assert_same_types(expected, actual)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float4_e2m1fn"])
def test_narrow_floats_add_up_in_float32(name: str) -> None:
    """A sum of 64 ones in the narrow type itself would stop growing early."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(x @ w.astype(jnp.float32)) / len(x)

    w, x = jnp.ones((2, 2), name), jnp.ones((64, 2))
    actual = split(value_and_grad(loss), 64)(w, x)
    assert_close(jax.jit(jax.value_and_grad(loss))(w, x), actual)
    assert actual[1].dtype == jnp.dtype(name) and (actual[1].astype(jnp.float32) == 1).all()


def test_gradients_of_integers_are_float0() -> None:
    params = {"w": W, "step": jnp.int32(3), "mask": jnp.ones(4, bool), "key": jax.random.key(0)}
    options: Any = {"allow_int": True}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return mean_square(params["w"], x)

    expected = jax.jit(jax.value_and_grad(loss, **options))(params, X)
    actual = split(value_and_grad(loss, **options))(params, X)
    assert actual[1]["step"].dtype == jax.dtypes.float0
    assert_close(expected, actual)
    with pytest.raises(TypeError, match="set allow_int to True"):
        split(value_and_grad(loss))(params, X)


@pytest.mark.parametrize("reduce", ["mean", "weighted"])
def test_complex_sums(reduce: str) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ w) ** 2)

    weights: Any = {"weights": lambda w, x: len(x)} if reduce == "weighted" else {}
    w, x = W + 1j * W.T, X - 2j
    expected = jax.value_and_grad(loss, holomorphic=True)(w, x)
    assert_close(expected, split(value_and_grad(loss, 0, False, True, **weights), reduce=reduce)(w, x))


def test_verify_compares_what_is_comparable() -> None:
    """Works with parameters without gradients, and with gradients that are still unreduced."""

    def step(params: Any, x: jax.Array) -> Any:
        reduced = {**params, "w": reshard(params["w"], P(reduced=frozenset({"dp"})))}
        value, grads = value_and_grad(lambda p, x: layers(p["w"], x), allow_int=True)(reduced, x)
        return params["w"] - 0.1 * reshard(grads["w"], P()), value

    with jax.set_mesh(explicit()):
        x = jax.device_put(normal(32, WIDTH), NamedSharding(explicit(), P("dp", None)))
        params = {"w": 0.3 * normal(2, WIDTH, WIDTH), "step": jnp.int32(1)}
        strand_interleave(step, microbatches=4, verify=True)(params, x)
        with pytest.raises(DhelixError, match="differs by"):
            strand_interleave(step, microbatches=4, verify=True, reduce="sum")(params, x)


def test_keywords_of_jax_by_position() -> None:
    with pytest.raises(NotImplementedError, match="reduce_axes"):
        value_and_grad(mean_square, 0, False, False, False, ("data",))
    with pytest.raises(TypeError, match="Expected a callable value"):
        value_and_grad(3)  # type: ignore[arg-type]


# Axis types.


def explicit() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)


def layers(w: jax.Array, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(jnp.einsum("bd,de->be", x, w, out_sharding=P("dp", None))), None

    return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("reduce", ["mean", "sum", "weighted"])
def test_gradients_stay_unreduced_until_the_user_reduces_them(reduce: str, dtype: Any) -> None:
    """The step has two strands, and one all-reduce of the gradients after the loop."""
    weights: Any = {"weights": lambda w, x: jnp.sum(jnp.ones(len(x)))} if reduce == "weighted" else {}

    def step(w: jax.Array, x: jax.Array) -> Any:
        value, grads = value_and_grad(layers, reduce=reduce, **weights)(reshard(w, P(reduced=frozenset({"dp"}))), x)
        assert jax.typeof(grads).sharding.spec.unreduced == {"dp"}
        return w - 0.1 * reshard(grads, P()), value

    with jax.set_mesh(explicit()):
        w = jax.device_put(0.3 * normal(4, WIDTH, WIDTH, dtype=dtype), NamedSharding(explicit(), P()))
        x = jax.device_put(normal(32, WIDTH, dtype=dtype), NamedSharding(explicit(), P("dp", None)))
        ours = strand_interleave(step, microbatches=4, strict=True)
        actual, factor = ours(w, x), 4 if reduce == "sum" else 1
        value, grads = jax.jit(jax.value_and_grad(lambda w, x: factor * layers(w, x)))(w, x)
        assert_close((w - 0.1 * grads, value), actual, tolerance=1e-5 if dtype == jnp.float32 else 0.04)
        assert ours.report(w, x)["strand-duplication"].changed
        text = ours.lower(w, x).compile().as_text() or ""
    loops, _, entry = text.rpartition("ENTRY")
    assert re.search(r"\[4,8,8\]\S* all-reduce\(", entry)
    assert not re.search(r"\[(4,)?8,8\]\S* (all-reduce|reduce-scatter)\(", loops)


# Flax's collections.


def apply(model: linen.Module, variables: Any, x: jax.Array, **options: Any) -> Any:
    return model.apply(variables, x, **options)


class Fp8Model(linen.Module):
    dtype: Any = jnp.float32
    operation: Any = fp8_ops.Fp8DirectDotGeneralOp

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = linen.Dense(WIDTH, use_bias=False, dtype=self.dtype, dot_general_cls=self.operation)
        return x + jnp.tanh(linen.Dense(WIDTH, dtype=self.dtype)(x) + layer(x))


def uneven_rows(dtype: Any = jnp.float32) -> jax.Array:
    return X.at[1::4].multiply(20).astype(dtype)  # the rows of one micro-batch are large


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("operation", [fp8_ops.Fp8DotGeneralOp, fp8_ops.Fp8DirectDotGeneralOp])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fp8_histories_and_scales_are_those_of_the_whole_batch(operation: Any, dtype: Any) -> None:
    model, x = Fp8Model(dtype, operation), uneven_rows(dtype)

    def three_steps(function: Any) -> Any:
        def steps(variables: Any, x: jax.Array) -> Any:
            for _ in range(3):
                _, grads = function(lambda v, x: jnp.sum(apply(model, v, x).astype(jnp.float32) ** 2))(variables, x)
                variables = {"params": variables["params"], FP8: grads[FP8]}
            return variables[FP8]

        return steps

    variables = model.init(jax.random.key(0), x)
    expected = jax.jit(three_steps(jax.value_and_grad))(variables, x)
    assert_close(expected, split(three_steps(value_and_grad), reduce="sum")(variables, x), tolerance=1e-5)


def test_fp8_input_history_is_the_same_for_every_reduction() -> None:
    """A micro-batch of padding alone may have the loss 0/0, whose gradients' history is NaN."""
    model = Fp8Model()
    x = uneven_rows().at[3::4].set(0)

    def loss(variables: Any, x: jax.Array) -> jax.Array:
        rows = jnp.abs(x).sum(axis=1)
        return jnp.sum(apply(model, variables, x)) * rows.sum() / rows.sum()

    variables = model.init(jax.random.key(0), x)
    weighted = value_and_grad(loss, weights=lambda v, x: jnp.sum(jnp.abs(x)), reduce="weighted")
    expected = jax.jit(jax.grad(loss))(variables, x)[FP8]["Dense_0"]["Fp8DirectDotGeneralOp_0"]
    for function in (value_and_grad(loss, reduce="mean"), value_and_grad(loss, reduce="sum"), weighted):
        actual = split(function)(variables, x)[1][FP8]["Dense_0"]["Fp8DirectDotGeneralOp_0"]
        assert_close(expected["input_amax_history"], actual["input_amax_history"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(actual))


def test_types_with_an_addition_of_their_own() -> None:
    """Flax's fp8 state of a layer that is applied twice, whose type adds by taking the maximum."""

    class Twice(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            layer = linen.Dense(WIDTH, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
            return layer(jnp.tanh(layer(x)))

    def convert(tree: Any, dtype: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.convert_element_type(x, dtype), tree)

    def step(function: Any) -> Any:
        def run(variables: Any, x: jax.Array) -> Any:
            state = convert(variables[FP8], fp8_ops.fp32_max_grad)
            gradients = function(lambda state, x: jnp.sum(apply(model, {**variables, FP8: state}, x)), allow_int=True)
            return convert(gradients(state, x)[1], jnp.float32)

        return run

    model, x = Twice(), uneven_rows()
    variables = model.init(jax.random.key(0), x)
    assert_close(jax.jit(step(jax.value_and_grad))(variables, x), split(step(value_and_grad))(variables, x))


def test_fp8_state_of_nnx_is_recognised_by_the_type_of_its_variables() -> None:
    layer = linen.Dense(WIDTH, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
    model = bridge.ToNNX(layer, rngs=nnx.Rngs(0)).lazy_init(X)
    graph, params, rest = nnx.split(model, lambda _, variable: not isinstance(variable, nnx.RngState), ...)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(nnx.merge(graph, params, rest, copy=True)(x) ** 2)

    expected = jax.jit(jax.value_and_grad(loss))(params, uneven_rows())
    assert_close(expected, split(value_and_grad(loss), reduce="sum")(params, uneven_rows()))


def test_a_pipeline_refuses_what_overwrites_parameters() -> None:
    with (
        microbatching(2, "mean", Fold(2)),
        pytest.raises(DhelixError, match=r"\['_overwrite_with_gradient'\]\['amax'\]"),
    ):
        value_and_grad(lambda p, x: jnp.sum(x))({FP8: {"amax": jnp.ones(2)}}, X)
    with microbatching(2, "mean", Fold(2)), pytest.raises(DhelixError, match="holomorphic=True is not supported"):
        value_and_grad(lambda p, x: jnp.sum(x), holomorphic=True)(W, X)


@pytest.mark.parametrize(
    ("framework", "reduce"),
    [
        ("linen", "mean"),
        pytest.param("linen", "sum", marks=pytest.mark.slow),
        pytest.param("linen", "weighted", marks=pytest.mark.slow),
        pytest.param("nnx", "mean", marks=pytest.mark.slow),
        ("nnx", "sum"),
        ("nnx", "weighted"),
    ],
)
def test_running_statistics_are_the_mean_of_those_of_the_micro_batches(framework: str, reduce: str) -> None:
    """Flax averages the statistics of devices, too. The running mean is the whole batch's, for any reduction."""
    weights: Any = {"weights": lambda p, x: len(x)} if reduce == "weighted" else {}
    loss, params = _linen_batch_norm() if framework == "linen" else _nnx_batch_norm()
    (_, actual), _ = split(value_and_grad(loss, has_aux=True, **weights), reduce=reduce)(params, uneven_rows())
    each = [jax.jit(loss)(params, uneven_rows()[m::4])[1] for m in range(4)]
    expected = jax.tree.map(lambda *parts: sum(parts) / 4, *each)
    assert_close(expected, actual, tolerance=1e-5)
    whole = jax.tree.leaves(jax.jit(loss)(params, uneven_rows())[1])[0]
    np.testing.assert_allclose(jax.tree.leaves(actual)[0], whole, atol=1e-5)


def _linen_batch_norm() -> Any:
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.BatchNorm(use_running_average=False, momentum=0.9)(linen.Dense(WIDTH)(x))

    variables = Model().init(jax.random.key(0), X)

    def loss(params: Any, x: jax.Array) -> Any:
        collections = {"params": params, "batch_stats": variables["batch_stats"]}
        y, updates = apply(Model(), collections, x, mutable=["batch_stats"])
        return jnp.mean(y**3), updates

    return loss, variables["params"]


def _nnx_batch_norm() -> Any:
    graph, params, statistics = nnx.split(nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, x: jax.Array) -> Any:
        model = nnx.merge(graph, params, statistics, copy=True)
        return jnp.mean(model(x) ** 3), nnx.state(model, nnx.BatchStat)

    return loss, params
