"""The all-gather matmul kernel: each tile and each row exactly once, refusals, and compilation by XLA for GPUs.

Benchmarks run it on GPUs, because the interpreter has no remote memory.
"""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul.sites import Site, Tiles
from dhelix.runtime.collective_matmul.kernels import all_gather_matmul as kernel
from dhelix.runtime.collective_matmul.kernels.gathered_rows import GatheredGemm, Transfer
from dhelix.runtime.compiler import deviceless
from dhelix.tests.quick import slow_after

deviceless.prepare_environment()

TILES = Tiles(128, 256, 64, 4, "M", 8)
SITE = Site("all_gather_matmul", 4096, 4096, 1536, "bfloat16", 4)


def plan(rows=4096, columns=1536, depth=4096, devices=4, tiles=TILES, transfer=None):
    site = Site("all_gather_matmul", rows, depth, columns, "bfloat16", devices)
    return GatheredGemm(kernel._gemm(site, tiles), transfer or Transfer(), devices)


@pytest.mark.parametrize("devices", slow_after(2, [2, 4, 8]))
@pytest.mark.parametrize("group", [1, 3, 8])
def test_each_tile_of_the_result_comes_once_own_rows_first(devices, group):
    it = plan(devices=devices, tiles=Tiles(128, 256, 64, 4, "M", group))
    rows, columns = it.gemm.m // it.gemm.cluster_rows, it.gemm.column_tiles
    me = devices - 1
    order = jax.vmap(it.order(jnp.int32(me)))(jnp.arange(it.gemm.cluster_tiles, dtype=jnp.int32))
    tiles = [(int(row), int(column)) for row, column in zip(order.row, order.column, strict=True)]
    assert sorted(tiles) == [(row, column) for row in range(rows) for column in range(columns)]
    own = {row // (rows // devices) == me for row, _ in tiles[: len(tiles) // devices]}
    assert own == {True}


def test_rows_of_the_others_come_in_turn():
    it = plan(rows=8192, columns=256, tiles=Tiles(128, 256, 64, 4, "M", 1))
    order = jax.vmap(it.order(jnp.int32(1)))(jnp.arange(it.gemm.cluster_tiles, dtype=jnp.int32))
    sources = [int(row) // 8 for row in order.row]
    assert sources == [1] * 8 + [2, 3, 0] * 8


def pieces(it):
    """(source, row tile, chunk, row, column) of each piece, in transfer order."""
    numbers = jnp.arange(it.batches * it.transfer.batch, dtype=jnp.int32)
    return list(zip(*(part.tolist() for part in jax.vmap(it.piece)(numbers)), strict=True))


TRANSFERS = [
    Transfer(),
    Transfer(chunks=4),
    Transfer(chunks=2, rows=16, columns=128, stages=2, batch=1),
    Transfer(chunks=2, batch=4),
]


@pytest.mark.parametrize("devices", slow_after(2, [2, 4]))
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_pieces_cover_all_rows_and_fill_each_counter(transfer, devices):
    it = plan(rows=1024 * devices, depth=1024, devices=devices, transfer=transfer)
    every = [
        (source, row, column)
        for source in range(devices)
        for row in range(0, 1024, transfer.rows)
        for column in range(0, 1024, transfer.columns)
    ]
    assert sorted((source, row, column) for source, _, _, row, column in pieces(it)) == every
    counted = collections.Counter((source, row_tile, chunk) for source, row_tile, chunk, _, _ in pieces(it))
    assert set(counted.values()) == {it.chunk_batches * transfer.batch}
    assert len(counted) == devices * it.row_tiles * transfer.chunks
    for _, row_tile, chunk, row, column in pieces(it):
        assert (row_tile, chunk) == (row // 128, column // (1024 // transfer.chunks))


def test_a_batch_belongs_to_one_counter():
    it = plan(rows=2048, depth=1024, devices=2, transfer=Transfer(batch=4, chunks=2))
    counters = [piece[:3] for piece in pieces(it)]
    assert all(len(set(counters[i : i + 4])) == 1 for i in range(0, len(counters), 4))


def test_rows_are_pulled_from_all_others_in_turn_and_own_ones_last():
    it = plan(rows=4096, depth=1024, devices=4)
    sources = [source for source, *_ in pieces(it)][:: it.chunk_pieces]
    assert sources == [0, 1, 2] * 8 + [3] * 8


def site(rows, depth, columns, devices=2):
    return Site("all_gather_matmul", rows, depth, columns, "bfloat16", devices)


@pytest.mark.parametrize(
    "place, columns, chunks",
    [
        (site(8192, 4096, 3584), 256, 1),
        (site(16384, 4096, 1536), 256, 1),
        (site(4096, 8192, 2560), 256, 4),
        (site(2048, 4096, 3072), 192, 8),
        (site(2048, 1280, 3072), 192, 1),  # 5 pieces along k
        (site(2048, 1536, 3072), 192, 2),
    ],
)
def test_default_tiles_need_the_fewest_rounds_and_more_chunks_the_fewer_own_ones(place, columns, chunks):
    tiles = kernel.default_tiles(place)
    assert (tiles.tile_n, tiles.chunks) == (columns, chunks)
    assert kernel.supported(place) is None


def test_tiles_say_how_many_chunks_or_leave_it_to_the_kernel():
    place = site(2048, 4096, 3072)
    assert kernel._plan(place, dataclasses.replace(TILES, chunks=2)).transfer == Transfer(chunks=2)
    assert kernel._plan(place, TILES).transfer == Transfer(chunks=8)
    assert "are summed over devices" in (kernel.supported(place, dataclasses.replace(TILES, splits=2)) or "")


@pytest.mark.parametrize(
    "site, why",
    [
        (Site("all_gather_matmul", 4096, 4096, 1536, "float32", 4), "neither bfloat16 nor float16"),
        (Site("all_gather_matmul", 4096, 4096, 1536, "bfloat16", 1), "nothing to gather"),
        (Site("all_gather_matmul", 4000, 4096, 1536, "bfloat16", 4), "not a multiple of 256"),
        (Site("all_gather_matmul", 4096, 4096, 1500, "bfloat16", 4), "not a multiple"),
        (Site("all_gather_matmul", 0, 4096, 1536, "bfloat16", 4), "not a multiple"),
        (Site("all_gather_matmul", 4096, 4000, 1536, "bfloat16", 4), "pieces"),
        (Site("matmul_all_reduce", 4096, 4096, 1536, "bfloat16", 4), "not all_gather_matmul"),
    ],
)
def test_what_is_not_supported_is_said(site, why):
    assert why in (kernel.supported(site) or "")


def test_tiles_that_do_not_fit_into_shared_memory_are_refused():
    assert "shared memory" in (kernel.supported(SITE, Tiles(128, 256, 64, 5, "M", 8)) or "")
    assert kernel.supported(SITE) is None


def lowered(axes, name, rows=2048, tiles=None):
    mesh = deviceless.mesh(axes)
    call = functools.partial(kernel.all_gather_matmul_kernel, axis_name=name, tiles=tiles)
    specs = P(name), P(None, name)
    step = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(P(None, name), P()), check_vma=False)
    shapes = (rows, 1024), (1024, 512 * axes[name])
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    return jax.jit(step).lower(*arguments)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    "axes, name, tiles",
    [
        pytest.param({"tp": 2}, "tp", None, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, "tp", dataclasses.replace(TILES, chunks=1), marks=pytest.mark.slow),
        ({"tp": 2, "dp": 2}, "tp", None),
        pytest.param({"dp": 2, "tp": 4}, "tp", None, marks=pytest.mark.slow),
        pytest.param({"tp": 8}, "tp", None, marks=pytest.mark.slow),
    ],
)
def test_compiles_for_any_axis_of_the_mesh(axes, name, tiles):
    text = deviceless.compile(lowered(axes, name, tiles=tiles)).as_text() or ""
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 1
    assert "all-gather" not in text


def test_sizes_that_do_not_fit_raise_one_line():
    with pytest.raises(DhelixError, match="use another form") as error:
        lowered({"tp": 2}, "tp", rows=2000)
    assert "\n" not in str(error.value)
