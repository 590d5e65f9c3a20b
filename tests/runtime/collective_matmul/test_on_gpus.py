"""Mosaic kernels on real GPUs: devices that begin at different times give the same bits in each call.

    XLA_FLAGS=--xla_gpu_enable_command_buffer= .venv/bin/pytest -m gpu tests/runtime/collective_matmul

Needs two or more GPUs of one host with peer-to-peer memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from dhelix.profiles.collective_matmul.sites import Form
from dhelix.tests.runtime.collective_matmul.programs import COLLECTIVE, plain, specs

pytestmark = pytest.mark.gpu

OPERANDS = 3
"""Operands that calls use in turn, so that a stale result of the call before is wrong."""
CALLS = 400
LONGEST_WAIT = 60
"""In rounds of an empty loop."""


def gpus() -> Mesh:
    devices = jax.devices("cuda")
    if len(devices) < 2:
        pytest.fail("needs two GPUs or more")
    return Mesh(np.array(devices), ("tp",), axis_types=(AxisType.Auto,))


def operands(kind: str, on: Mesh, m: int, k: int, n: int) -> tuple[jax.Array, jax.Array]:
    """OPERANDS arrays x, and w; `m`, `k` and `n` are sizes per device."""
    devices = on.size

    def make() -> tuple[jax.Array, jax.Array]:
        one, other = jax.random.split(jax.random.fold_in(jax.random.key(0), lax.axis_index("tp")))
        rows = m // devices if kind == "all_gather_matmul" else m
        x = jax.random.normal(one, (OPERANDS, rows, k), jnp.bfloat16)
        return x, jax.random.normal(other, (k, n), jnp.bfloat16) * k**-0.5

    spec_x, spec_w, _ = specs(kind)
    return jax.jit(jax.shard_map(make, mesh=on, in_specs=(), out_specs=(P(None, *spec_x), spec_w), check_vma=False))()


def wait(trips: jax.Array, until: jax.Array) -> jax.Array:
    """Returns `until` after `trips` rounds of a loop whose end the host has to check."""
    rounds = lax.fori_loop(0, trips, lambda i, at: lax.optimization_barrier(at + i), jnp.int32(0))
    return lax.optimization_barrier((until, rounds))[0]


def bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint16)


def of_each(kind: str, on: Mesh, function: Callable[..., jax.Array]) -> Any:
    """Jits (OPERANDS arrays x, w) -> a result of `function` for each x."""
    spec_x, spec_w, spec_y = specs(kind)

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.stack([function(x[i], w) for i in range(OPERANDS)])

    ins, outs = (P(None, *spec_x), spec_w), P(None, *spec_y)
    return jax.jit(jax.shard_map(local, mesh=on, in_specs=ins, out_specs=outs, check_vma=False))


def differences(kind: str, on: Mesh, function: Callable[..., jax.Array]) -> Any:
    """Jits (OPERANDS arrays x, w, expected results, seed) -> how many of CALLS gave other bits, on each device."""
    spec_x, spec_w, spec_y = specs(kind)

    def local(x: jax.Array, w: jax.Array, expected: jax.Array, seed: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), lax.axis_index("tp"))

        def body(i: jax.Array, wrong: jax.Array) -> jax.Array:
            trips = jax.random.randint(jax.random.fold_in(key, i), (), 0, LONGEST_WAIT)
            result = function(wait(trips, x[i % OPERANDS]), w)
            return wrong + (bits(result) != bits(expected[i % OPERANDS])).any().astype(jnp.int32)

        return lax.fori_loop(0, CALLS, body, jnp.int32(0))[None]

    ins = (P(None, *spec_x), spec_w, P(None, *spec_y), P())
    return jax.jit(jax.shard_map(local, mesh=on, in_specs=ins, out_specs=P("tp"), check_vma=False))


@pytest.mark.parametrize(
    ("kind", "m", "k", "n"),
    [
        ("matmul_reduce_scatter", 2048, 2048, 4096),
        ("matmul_reduce_scatter", 4096, 7168, 4096),
        ("matmul_reduce_scatter", 16384, 2048, 4096),
        ("all_gather_matmul", 2048, 4096, 3072),
        ("all_gather_matmul", 8192, 4096, 14336),
        ("matmul_all_reduce", 64, 4096, 8192),
        ("matmul_all_reduce", 64, 14336, 8192),  # blocks share contractions
        ("matmul_all_reduce", 16, 4096, 2048),  # likewise, and rows are padded
        ("matmul_all_reduce", 1024, 4096, 8192),
    ],
)
def test_devices_that_begin_apart_compute_the_same(kind, m, k, n):
    on = gpus()
    kernel = functools.partial(COLLECTIVE[kind], axis_name="tp", form=Form("mosaic"))
    x, w = operands(kind, on, m, k, n)
    expected = of_each(kind, on, kernel)(x, w)
    right = of_each(kind, on, functools.partial(plain, kind, axis="tp"))(x.astype(jnp.float32), w.astype(jnp.float32))
    assert float(jnp.abs(expected - right).max() / jnp.abs(right).max()) < 2**-6
    compare = differences(kind, on, kernel)
    for seed in range(3):
        wrong = np.asarray(compare(x, w, expected, seed))
        assert not wrong.any(), f"of {CALLS} calls {wrong} gave other bits"
