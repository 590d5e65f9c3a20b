"""The all-gather matmul kernel: each tile and each row exactly once, what it refuses, that XLA compiles it for GPUs.

Its run on GPUs is in benchmarks; the interpreter knows no remote memory.
"""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul import Site, Tiles
from dhelix.runtime import deviceless
from dhelix.runtime.collective_matmul.kernels import all_gather_matmul as kernel
from dhelix.runtime.collective_matmul.kernels.all_gather_matmul import Push

deviceless.prepare_environment()

TILES = Tiles(128, 256, 64, 4, "M", 8)
SITE = Site("all_gather_matmul", 4096, 4096, 1536, "bfloat16", 4)


def plan(rows=4096, columns=1536, depth=4096, devices=4, tiles=TILES, push=None):
    return kernel._plan(rows, columns, depth, "bfloat16", devices, tiles, push or Push())


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_each_tile_of_the_result_comes_once_own_rows_first(devices, group):
    it = plan(devices=devices, tiles=Tiles(128, 256, 64, 4, "M", group))
    rows, columns = it.gemm.m // it.gemm.cluster_rows, it.gemm.column_tiles
    me = devices - 1
    order = jax.vmap(it.order(jnp.int32(me)))(jnp.arange(it.gemm.cluster_tiles, dtype=jnp.int32))
    tiles = [(int(row), int(column)) for row, column in zip(*order, strict=True)]
    assert sorted(tiles) == [(row, column) for row in range(rows) for column in range(columns)]
    own = {row // (rows // devices) == me for row, _ in tiles[: len(tiles) // devices]}
    assert own == {True}


def test_rows_of_the_others_come_in_turn():
    it = plan(rows=8192, columns=256, tiles=Tiles(128, 256, 64, 4, "M", 1))
    order = jax.vmap(it.order(jnp.int32(1)))(jnp.arange(it.gemm.cluster_tiles, dtype=jnp.int32))
    sources = [int(row) // 8 for row in order.row]
    assert sources == [1] * 8 + [2, 3, 0] * 8


@pytest.mark.parametrize("push", [Push(), Push(chunks=4, window=4), Push(rows=8, columns=128, chunks=2, window=3)])
def test_pieces_cover_the_rows_and_fill_each_counter(push):
    it = plan(rows=2048, depth=1024, devices=2, push=push)
    pieces = list(zip(*(part.tolist() for part in jax.vmap(it.piece)(jnp.arange(it.pieces))), strict=True))
    every = [(row, column) for row in range(0, 1024, push.rows) for column in range(0, 1024, push.columns)]
    assert sorted((row, column) for _, _, row, column in pieces) == every
    counted = collections.Counter((row_tile, chunk) for row_tile, chunk, _, _ in pieces)
    assert set(counted.values()) == {it.chunk_pieces} and len(counted) == it.row_tiles * push.chunks
    for row_tile, chunk, row, column in pieces:
        assert (row_tile, chunk) == (row // 128, column // (1024 // push.chunks))


@pytest.mark.parametrize(
    "site, why",
    [
        (Site("all_gather_matmul", 4096, 4096, 1536, "float32", 4), "neither bfloat16 nor float16"),
        (Site("all_gather_matmul", 4096, 4096, 1536, "bfloat16", 1), "nothing to gather"),
        (Site("all_gather_matmul", 4000, 4096, 1536, "bfloat16", 4), "no multiple of 256"),
        (Site("all_gather_matmul", 4096, 4096, 1500, "bfloat16", 4), "no multiple"),
        (Site("all_gather_matmul", 0, 4096, 1536, "bfloat16", 4), "no multiple"),
        (Site("all_gather_matmul", 4096, 4000, 1536, "bfloat16", 4), "pieces"),
        (Site("matmul_all_reduce", 4096, 4096, 1536, "bfloat16", 4), "no all_gather_matmul"),
    ],
)
def test_what_is_not_supported_is_said(site, why):
    assert why in (kernel.supported(site) or "")


def test_tiles_that_do_not_fit_into_shared_memory_are_refused():
    assert "shared memory" in (kernel.supported(SITE, Tiles(128, 256, 64, 5, "M", 8)) or "")
    assert kernel.supported(SITE) is None


def lowered(axes, name, rows=2048, push=None):
    mesh = deviceless.mesh(axes)
    call = functools.partial(kernel.all_gather_matmul_kernel, axis_name=name, push=push)
    specs = P(name), P(None, name)
    step = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(P(None, name), P()), check_vma=False)
    shapes = (rows, 1024), (1024, 512 * axes[name])
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    return jax.jit(step).lower(*arguments)


@pytest.mark.deviceless
@pytest.mark.parametrize("axes, name", [({"tp": 2}, "tp"), ({"dp": 2, "tp": 4}, "tp"), ({"tp": 2, "dp": 2}, "tp")])
def test_compiles_for_any_axis_of_the_mesh(axes, name):
    text = deviceless.compile(lowered(axes, name, push=Push(chunks=2))).as_text() or ""
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 1
    assert "all-gather" not in text


def test_sizes_that_do_not_fit_raise_one_line():
    with pytest.raises(DhelixError, match="take another form") as error:
        lowered({"tp": 2}, "tp", rows=2000)
    assert "\n" not in str(error.value)
