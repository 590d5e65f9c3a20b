"""The kernel of matmul + all-reduce with two shots in Pallas' interpreter, for 8 devices.

The interpreter has no remote memory and no counters, so one block plays all devices, one after the other. It does so
twice: at the second time, all parts that a device waits for have been sent. What remains of the kernel is its own code:
order of the tiles, owners, places in staging memory and in the results, pieces, and additions.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dhelix.profiles.collective_matmul.sites import Site
from dhelix.runtime.collective_matmul.kernels import hopper_gemm, matmul_all_reduce, opaque, summed_matmul
from dhelix.runtime.collective_matmul.kernels.owned_tiles import SummedGemm

AXIS = "tp"


class Memory:
    """An array in the global memory of one device: a part of `arrays`, which has all devices' arrays."""

    def __init__(self, arrays: Any, device: Any) -> None:
        self.arrays, self.device = arrays, device

    @property
    def at(self) -> Memory:
        return self

    def __getitem__(self, place: Any) -> Any:
        return self.arrays.at[(self.device, *place)]


class Replaced:
    """A module with other values of some of its names."""

    def __init__(self, module: Any, **others: Any) -> None:
        self.__dict__.update(others, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def all_reduced(plan: SummedGemm, x: jax.Array, w: jax.Array, monkeypatch: pytest.MonkeyPatch) -> jax.Array:
    """The results of all devices for their operands, `x [devices, m, k]` and `w [devices, k, n]`."""
    devices = plan.devices
    buffers = dict(buffers=plan.gemm.buffers(), loaded=plgpu.Barrier(num_arrivals=devices - 1, num_barriers=2))

    def kernel(x: Any, w: Any, out: Any, staged: Any, **scratch: Any) -> None:
        @pl.loop(0, 2 * devices)
        def _(turn: jax.Array) -> None:
            me = lax.rem(turn, jnp.int32(devices))

            def axis_index(axis: str) -> jax.Array:
                return me if axis == AXIS else lax.axis_index(axis)

            monkeypatch.setattr(summed_matmul, "lax", Replaced(lax, axis_index=axis_index))
            own = [Memory(arrays, me) for arrays in (x, out, staged)]
            summed_matmul._kernel(plan, AXIS, own[0], w.at[me], *own[1:], None, **scratch)

    def nothing(*_: Any, **__: Any) -> None:
        return None

    counters = dict(get_global=MagicMock(), semaphore_signal=nothing, semaphore_wait=nothing)
    remote = dict(remote_ref=lambda memory, device: Memory(memory.arrays, device[AXIS]))
    monkeypatch.setattr(summed_matmul, "pl", Replaced(pl, **counters))
    monkeypatch.setattr(summed_matmul, "plgpu", Replaced(plgpu, **remote))
    monkeypatch.setattr(summed_matmul, "Meeting", lambda *_: SimpleNamespace(meet=nothing, wait=nothing))
    for module, name in ((opaque, "part"), (opaque, "scalars"), (hopper_gemm, "fence_proxies")):
        monkeypatch.setattr(module, name, lambda *values: values[0] if values else None)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        return plgpu.kernel(
            kernel,
            out_type=[
                jax.ShapeDtypeStruct((devices, *shape), x.dtype) for shape in (plan.out_shape, plan.staged_shape)
            ],
            scratch_types=buffers,
            **plan.gemm.launch(),
        )(x, w)[0]


@pytest.mark.parametrize(
    "rows, columns, owners",
    [
        (1024, 128, "rows"),
        pytest.param(64, 2048, "columns", marks=pytest.mark.slow),  # an own part is added beside the next tile, too
    ],
)
def test_eight_devices_get_the_plain_sum_bit_by_bit(rows: int, columns: int, owners: str, monkeypatch) -> None:
    site = Site("matmul_all_reduce", rows, 128, columns, "bfloat16", 8)
    tiles = matmul_all_reduce._SMALL_OF_MANY if owners == "rows" else matmul_all_reduce._FLAT_OF_MANY
    monkeypatch.setattr(matmul_all_reduce, "_ONE_SHOT_BYTES", 0)
    plan = matmul_all_reduce.plan_for(site, dataclasses.replace(tiles, cluster=1, sms=1, lead=1))
    assert plan.refusal() is None and (plan.shots, plan.by_rows, plan.gemm.store_columns) == (2, owners == "rows", 64)
    random = np.random.default_rng(0)
    # Sums of these integers are exact in float32, so only the roundings of parts and of the sum matter.
    x, w = (random.integers(-9, 10, shape).astype(jnp.bfloat16) for shape in ((8, rows, 128), (8, 128, columns)))
    parts = (np.asarray(x, np.float32) @ np.asarray(w, np.float32)).astype(jnp.bfloat16)
    expected = parts.astype(np.float32).sum(0).astype(jnp.bfloat16)
    for found in all_reduced(plan, jnp.asarray(x), jnp.asarray(w), monkeypatch):
        np.testing.assert_array_equal(np.asarray(found), expected)
