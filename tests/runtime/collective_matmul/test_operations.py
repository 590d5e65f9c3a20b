"""Every form computes the same as the plain expression, and so do its derivatives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.profiles.collective_matmul.sites import KINDS
from dhelix.runtime.collective_matmul import all_gather_matmul
from dhelix.tests.runtime.collective_matmul.programs import (
    COLLECTIVE,
    FORMS,
    assert_close,
    fast_jit,
    mesh,
    normal,
    plain,
    specs,
    with_gradients,
)


@pytest.mark.parametrize("kind", KINDS)
def test_forms_and_their_derivatives_are_those_of_the_plain_expression(kind: str) -> None:
    """Over one of two mesh axes, with odd sizes and batch dimensions, one of which is sharded."""
    on, batch = mesh(dp=2, tp=4), ("dp", None)
    x, w, cotangent = normal(0, 4, 1, 24, 20), normal(1, 20, 12), normal(2, 4, 1, 24, 12)
    expected = with_gradients(lambda x, w: plain(kind, x, w, "tp"), kind, on, batch)(x, w, cotangent)
    for form in FORMS:
        actual = with_gradients(lambda x, w, f=form: COLLECTIVE[kind](x, w, "tp", f), kind, on, batch)(x, w, cotangent)
        assert_close(actual, expected, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_those_of_jax_when_replication_is_not_tracked(kind: str) -> None:
    on = mesh(tp=3)
    x, w, cotangent = normal(0, 12, 6), normal(1, 6, 9), normal(2, 12, 9)
    expected = with_gradients(lambda x, w: plain(kind, x, w, "tp"), kind, on, (), vma=False)(x, w, cotangent)
    for form in ("auto", "bidirectional_ring", "hybrid:2"):
        actual = with_gradients(lambda x, w, f=form: COLLECTIVE[kind](x, w, "tp", f), kind, on, (), vma=False)
        assert_close(actual(x, w, cotangent), expected, 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_several_weights_share_a_gather(form: str) -> None:
    on, columns = mesh(tp=4), (8, 4, 12)
    x, weights = normal(0, 1, 16, 6), [normal(i, 6, width) for i, width in enumerate(columns)]
    cotangents = [normal(9 + i, 1, 16, width) for i, width in enumerate(columns)]

    def both(x: jax.Array, weights: Any, cotangents: Any) -> Any:
        def shared(x: jax.Array, weights: Any) -> Any:
            return all_gather_matmul(x, weights, "tp", form)

        def apart(x: jax.Array, weights: Any) -> Any:
            return tuple(plain("all_gather_matmul", x, w, "tp") for w in weights)

        results = []
        for f in (shared, apart):
            y, pullback = jax.vjp(f, x, weights)
            results.append((y, *pullback(tuple(cotangents))))
        return results

    spec_x, spec_w, spec_y = specs("all_gather_matmul", (None,))
    outs = ((spec_y,) * 3, spec_x, [spec_w] * 3)
    mapped = jax.shard_map(both, mesh=on, in_specs=(spec_x, spec_w, spec_y), out_specs=[outs, outs])
    shared, apart = fast_jit(mapped)(x, weights, cotangents)
    assert_close(shared, apart, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_one_device_multiplies(kind: str) -> None:
    x, w, cotangent = normal(0, 6, 5), normal(1, 5, 7), normal(2, 6, 7)
    for form in FORMS:
        run = with_gradients(lambda x, w, f=form: COLLECTIVE[kind](x, w, "tp", f), kind, mesh(tp=1), ())
        assert_close(run(x, w, cotangent), (x @ w, cotangent @ w.T, x.T @ cotangent), 1e-6)


@settings(max_examples=12)
@given(
    kind=st.sampled_from(KINDS),
    form=st.sampled_from(["auto", *FORMS[1:]]),
    devices=st.sampled_from([2, 3, 5]),
    chunk=st.sampled_from([2, 4, 6]),
    batch=st.sampled_from([(), (2,), (1, 3)]),
    contraction=st.integers(1, 3),
    columns=st.integers(1, 3),
)
def test_any_shape(
    kind: str, form: str, devices: int, chunk: int, batch: tuple[int, ...], contraction: int, columns: int
) -> None:
    x = normal(0, *batch, chunk * devices, contraction * devices)
    w = normal(1, contraction * devices, columns * devices)
    spec_x, spec_w, spec_y = specs(kind, (None,) * len(batch))
    mapped = jax.shard_map(
        lambda x, w: COLLECTIVE[kind](x, w, "tp", form),
        mesh=mesh(tp=devices),
        in_specs=(spec_x, spec_w),
        out_specs=spec_y,
    )
    assert_close(fast_jit(mapped)(x, w), x @ w, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tuple_of_axes_is_served(kind: str) -> None:
    axes, x, w = ("dp", "tp"), normal(0, 16, 8), normal(1, 8, 8)
    spec_x, spec_w, spec_y = specs(kind, (), axes)
    mapped = jax.shard_map(
        lambda x, w: COLLECTIVE[kind](x, w, axes), mesh=mesh(dp=2, tp=4), in_specs=(spec_x, spec_w), out_specs=spec_y
    )
    assert_close(fast_jit(mapped)(x, w), x @ w, 1e-6)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *((kind, form) for kind in KINDS for form in ("ring", "bidirectional_ring")),
        # the other kinds need a reduce-scatter here
        *(("matmul_all_reduce", form) for form in ("monolithic", "hybrid")),
    ],
)
def test_a_batch_that_is_sharded_over_an_explicit_axis(kind: str, form: str) -> None:
    """A mesh with explicit axes, and a shard_map that leaves dp out. JAX 0.11 has no reduce-scatter there."""
    on = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    spec_x, spec_w, spec_y = specs(kind, (None,))
    mapped = jax.shard_map(
        lambda x, w: COLLECTIVE[kind](x, w, "tp", form),
        mesh=on,
        in_specs=(spec_x, spec_w),
        out_specs=spec_y,
        axis_names={"tp"},
    )
    x, w, cotangent = normal(0, 4, 24, 12), normal(1, 12, 8), normal(2, 4, 24, 8)

    def put(a: Any, spec: Any, batch: Any = "dp") -> Any:
        return jax.device_put(a, NamedSharding(on, P(batch, *spec[1:]) if batch else spec))

    def run(x: Any, w: Any, cotangent: Any) -> Any:
        y, pullback = jax.vjp(mapped, x, w)
        return y, *pullback(cotangent)

    y, dx, dw = fast_jit(run)(put(x, spec_x), put(w, spec_w, None), put(cotangent, spec_y))
    assert_close((y, dx, dw), (x @ w, cotangent @ w.T, np.einsum("brk,brc->kc", x, cotangent)), 1e-6)


@pytest.mark.parametrize(("dtype", "form", "tolerance"), [("bfloat16", "ring", 2e-2), ("float16", "hybrid", 3e-3)])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_keeps_its_type_and_accumulates_in_float32(
    kind: str, dtype: str, form: str, tolerance: float
) -> None:
    x, w, cotangent = (a.astype(dtype) for a in (normal(0, 8, 4096), normal(1, 4096, 4), normal(2, 8, 4)))
    wide = [np.asarray(a, np.float32) for a in (x, w, cotangent)]
    run = with_gradients(lambda x, w: COLLECTIVE[kind](x, w, "tp", form), kind, mesh(tp=2), ())
    actual = run(x, w, cotangent)
    assert all(a.dtype == dtype for a in actual)
    assert_close(actual, (wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2]), tolerance)
    # A sum in half precision would stop growing at 256 or 2048.
    ones = run(np.ones_like(x), np.ones_like(w), cotangent)[0]
    assert np.all(np.asarray(ones, np.float32) == 4096)


def test_operands_that_are_the_same_on_other_axes_have_their_cotangents_summed_there() -> None:
    """As with `lax.dot_general`: w is replicated over dp, so JAX sums its cotangent over dp."""
    x, w = normal(0, 8, 16, 4), normal(1, 4, 8)

    def loss(f: Any) -> Any:
        return jax.shard_map(
            lambda x, w: jax.lax.psum(jnp.sum(jnp.sin(f(x, w))), ("dp", "tp")),
            mesh=mesh(dp=2, tp=4),
            in_specs=(P("dp", "tp"), P(None, "tp")),
            out_specs=P(),
        )

    ours = fast_jit(jax.grad(loss(lambda x, w: all_gather_matmul(x, w, "tp", "ring")), (0, 1)))(x, w)
    assert_close(ours, jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), (0, 1))(x, w), 1e-5)
