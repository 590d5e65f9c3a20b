"""The tile-wise all-reduce: its errors, and its compilation for GPUs. The benchmark runs it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.benchmarks.inference.tile_all_reduce import shots_for, tile_all_reduce
from dhelix.errors import DhelixError
from dhelix.runtime.compiler import deviceless

deviceless.prepare_environment()


def lowered(devices: int, shape: tuple[int, ...], dtype=jnp.bfloat16, **options):
    mesh = deviceless.mesh({"dp": 1, "tp": devices})
    step = jax.shard_map(
        lambda x: tile_all_reduce(x, "tp", **options), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    return jax.jit(step).lower(jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P())))


@pytest.mark.deviceless
@pytest.mark.parametrize("devices, shots", [(2, 1), (2, 2), (4, 2), (8, 1)])
def test_compiles(devices, shots):
    text = deviceless.compile(lowered(devices, (4, 64, 1024), shots=shots)).as_text() or ""
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 1


@pytest.mark.parametrize(
    "shape, dtype", [((1024, 8), jnp.bfloat16), ((4096, 256), jnp.float32), ((0, 8192), jnp.bfloat16)]
)
def test_what_does_not_fit_is_said_in_one_line(shape, dtype):
    with pytest.raises(DhelixError, match=r"jax\.lax\.psum") as error:
        lowered(8, shape, dtype, shots=2)
    assert "\n" not in str(error.value)


def test_reading_everything_pays_for_two_devices_and_little_data():
    assert [shots_for(1 << 23, 2, 2), shots_for(1 << 18, 2, 8), shots_for(1 << 23, 2, 4)] == [1, 1, 2]
