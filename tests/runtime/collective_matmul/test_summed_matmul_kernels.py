"""Kernels of matmul + reduce-scatter and matmul + all-reduce: order of tiles, refusals, and compilation by XLA.

Benchmarks run them on GPUs, because the interpreter has no remote memory. `test_summed_matmul_interpreted.py` runs the
all-reduce on one block, which plays all devices.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul.sites import Site, Tiles
from dhelix.runtime.collective_matmul.kernels import matmul_all_reduce, matmul_reduce_scatter
from dhelix.runtime.collective_matmul.kernels.owned_tiles import SummedGemm
from dhelix.runtime.compiler import deviceless
from dhelix.tests.quick import slow_after, slow_but

deviceless.prepare_environment()

KERNELS = {"matmul_reduce_scatter": matmul_reduce_scatter, "matmul_all_reduce": matmul_all_reduce}
TILES = Tiles(128, 256, 64, 4, "M", 8)
CLUSTERS = dataclasses.replace(TILES, cluster=2)
DECODE = Tiles(64, 128, 64, 7, "N", 8)


def plan(
    kind: str, rows: int, columns: int, devices: int, tiles: Tiles | None = TILES, depth: int = 1024, **fields
) -> SummedGemm:
    site = Site(kind, rows, depth, columns, "bfloat16", devices)
    return dataclasses.replace(KERNELS[kind].plan_for(site, tiles), **fields)


def jobs(it: SummedGemm, me: int) -> list[tuple[int, int, int, int]]:
    """(turn, tile, row, column) in the order in which device `me` computes them."""
    numbers = jnp.arange(it.gemm.cluster_tiles, dtype=jnp.int32)
    columns = jax.vmap(lambda number: it.job(jnp.int32(me), number))(numbers)
    return list(zip(*(column.tolist() for column in columns), strict=True))


PLANS = [
    plan("matmul_reduce_scatter", 8192, 4096, 2, CLUSTERS),
    plan("matmul_reduce_scatter", 4096, 1536, 4, CLUSTERS),
    plan("matmul_reduce_scatter", 2048, 1344, 8),
    plan("matmul_reduce_scatter", 4096, 1024, 4, lead=1),
    plan("matmul_reduce_scatter", 4096, 1024, 4, dataclasses.replace(CLUSTERS, lead=10**6)),
    plan("matmul_all_reduce", 1024, 8192, 2, None),
    plan("matmul_all_reduce", 1024, 8192, 2, Tiles(128, 128, 64, 6, "M", 3)),
    plan("matmul_all_reduce", 1024, 8192, 4),
    plan("matmul_all_reduce", 2048, 8192, 4, None, depth=8192),
    plan("matmul_all_reduce", 128, 8192, 4),  # owners are by columns
    plan("matmul_all_reduce", 256, 8192, 8, DECODE),
]


@pytest.mark.parametrize(
    "it", slow_after(1, PLANS), ids=lambda it: f"{it.gemm.m}x{it.gemm.n} over {it.devices} lead {it.lead}"
)
def test_each_tile_comes_once_at_its_owner_and_own_ones_behind_those_of_others(it: SummedGemm):
    assert it.refusal() is None
    rows, columns = it.gemm.m // it.gemm.cluster_rows, it.gemm.column_tiles
    everything = [(row, column) for row in range(rows) for column in range(columns)]
    own_rows, own_columns = it.block
    for me in range(it.devices):
        order = jobs(it, me)
        assert sorted((row, column) for _, _, row, column in order) == everything
        for turn, _, row, column in order:
            owner = row // own_rows if it.by_rows else column // own_columns
            assert owner == (me + 1 + turn) % it.devices
    when = {(turn, tile): number for number, (turn, tile, _, _) in enumerate(order)}
    assert len(when) == it.devices * it.tiles
    for tile in range(it.tiles):  # at the same place in every device's order, so that no device waits for a later tile
        assert when[it.devices - 1, tile] > max(when[turn, tile] for turn in range(it.devices - 1))


@pytest.mark.parametrize("it", slow_after(1, PLANS), ids=lambda it: f"{it.gemm.m}x{it.gemm.n} over {it.devices}")
def test_sender_and_owner_agree_where_a_tile_lies(it: SummedGemm):
    sent, owned = {}, {}
    for me in range(it.devices):
        for turn, tile, row, column in jobs(it, me):
            owner = (me + 1 + turn) % it.devices
            if owner == me:
                owned[me, tile] = row, column
            else:
                assert sent.setdefault((owner, turn, tile), (row, column)) == (row, column)  # one sender for each slot
    assert len(sent) == it.devices * (it.devices - 1) * it.tiles
    assert all(owned[owner, tile] == place for (owner, _, tile), place in sent.items())


@pytest.mark.parametrize("it", PLANS, ids=lambda it: f"{it.gemm.m}x{it.gemm.n} over {it.devices} lead {it.lead}")
def test_every_peer_gets_a_part_that_is_sent_behind_the_meeting(it: SummedGemm):
    """A block whose first tile is its device's own does not wait for the rendezvous. So each peer must get a part from
    a block that waited, because a device that leaves relies on it.
    """
    order, own = [turn for turn, *_ in jobs(it, 0)], it.devices - 1
    waited = {turn for number, turn in enumerate(order) if order[number % it.gemm.clusters] != own}
    assert waited >= set(range(own))


@pytest.mark.parametrize("devices", slow_after(1, [2, 4, 8]))
def test_parts_have_a_round_of_tiles_to_arrive_and_no_cluster_has_but_own_ones(devices):
    it = plan("matmul_reduce_scatter", 16384, 16384, devices, dataclasses.replace(TILES, sms=40))
    order = jobs(it, 1)
    when = {(turn, tile): number for number, (turn, tile, _, _) in enumerate(order)}
    own = devices - 1
    waits = [when[own, tile] - when[turn, tile] for tile in range(it.tiles) for turn in range(own)]
    assert min(waits) >= it.gemm.clusters - devices
    for cluster in range(it.gemm.clusters):
        its = [turn == own for turn, *_ in order[cluster :: it.gemm.clusters]]
        assert 0 < sum(its) / len(its) < 0.6


def test_tiles_say_cluster_and_lead_or_leave_them_to_the_kernel():
    said = plan("matmul_reduce_scatter", 4096, 4096, 2, dataclasses.replace(CLUSTERS, lead=33))
    assert (said.gemm.cluster, said.own_behind) == (2, 33)
    left = plan("matmul_reduce_scatter", 4096, 4096, 2, None)
    assert (left.gemm.cluster, left.own_behind) == (1, 132)


@pytest.mark.parametrize(
    "rows, depth, devices, cut",
    [
        (1024, 4096, 2, (128, 128, 2, 33)),
        (1024, 2048, 8, (128, 128, 1, 33)),  # one row of tiles for each owner
        (1024, 14336, 2, (128, 256, 1, 33)),
        (64, 4096, 2, (64, 128, 1, 64)),
    ],
)
def test_all_reduce_has_large_tiles_of_deep_products_and_clusters_of_small_ones(rows, depth, devices, cut):
    it = plan("matmul_all_reduce", rows, 8192, devices, None, depth)
    assert it.refusal() is None
    assert (it.gemm.tiles.tile_m, it.gemm.tiles.tile_n, it.gemm.cluster, it.own_behind) == cut


def test_one_shot_has_every_tile_for_everybody():
    it = plan("matmul_all_reduce", 64, 8192, 4, None)
    assert (it.shots, it.gemm.tiles) == (1, DECODE)
    assert sorted(column for _, _, _, column in jobs(it, 3)) == list(range(64))
    assert it.staged_shape[0] == 4


@pytest.mark.parametrize(
    "rows, depth, columns, splits",
    slow_after(
        1,
        [
            (64, 14336, 2048, 4),
            (64, 2048, 2048, 1),  # not deep enough
            (64, 7168, 4096, 2),
            (64, 64 * 111, 4096, 1),  # an odd number of steps
            (64, 7168, 8192, 1),  # 64 blocks already use the full memory bandwidth
            (64, 14336, 8192, 2),
            (128, 14336, 8192, 1),  # a tile for each SM
            (16, 14336, 8192, 2),
        ],
        several=True,
    ),
)
def test_contractions_are_split_where_tiles_leave_sms_without_work(rows, depth, columns, splits):
    it = plan("matmul_all_reduce", rows, columns, 2, None, depth)
    assert (it.shots, it.gemm.splits, it.gemm.tiles.tile_m) == (1, splits, 64) and it.refusal() is None
    assert it.gemm.cluster_tiles <= it.gemm.clusters  # all run at once, so none waits for one that does not run
    shares = [tuple(map(int, it.gemm.tile_and_split(jnp.int32(n)))) for n in range(it.gemm.cluster_tiles)]
    assert sorted(shares) == [(tile, split) for tile in range(it.tiles) for split in range(splits)]
    assert it.gemm.steps * splits * 64 == depth
    places = [it.job(jnp.int32(0), jnp.int32(n)) for n in range(it.gemm.cluster_tiles)]
    assert {(int(p.row), int(p.column)) for p in places} == {
        (row, c) for row in range(it.block[0]) for c in range(it.block[1])
    }


@pytest.mark.parametrize(
    "kind, rows, splits, why",
    [
        ("matmul_all_reduce", 64, 3, "16 steps of the contraction do not divide by 3"),
        ("matmul_all_reduce", 64, 4, "256 tiles and splits are more than the"),
        ("matmul_all_reduce", 1024, 2, "that all devices send to all"),
        ("matmul_reduce_scatter", 1024, 2, "that all devices send to all"),
    ],
)
def test_splits_that_cannot_be_had(kind, rows, splits, why):
    it = plan(kind, rows, 8192, 2, dataclasses.replace(DECODE, splits=splits))
    assert why in (it.refusal() or "")


@pytest.mark.parametrize(
    "rows, devices, shots, filled", [(1, 2, 1, 64), (16, 4, 1, 64), (64, 2, 1, 64), (100, 2, 1, 128), (1, 8, 2, 64)]
)
def test_few_rows_are_filled_up(rows, devices, shots, filled):
    it = plan("matmul_all_reduce", rows, 8192, devices, None)
    assert (it.shots, it.gemm.m) == (shots, filled)
    assert matmul_all_reduce.supported(Site("matmul_all_reduce", rows, 1024, 8192, "bfloat16", devices)) is None


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize(
    "rows, depth, columns, dtype, devices, why",
    [
        (4096, 4096, 1536, "float32", 4, "neither bfloat16 nor float16"),
        (4096, 4096, 1536, "bfloat16", 1, "nothing to sum"),
        (4000, 4096, 1536, "bfloat16", 4, "4000"),
        (4096, 4096, 1500, "bfloat16", 4, "not a multiple"),
        (4096, 4000, 1536, "bfloat16", 4, "not a multiple"),
        (0, 4096, 1536, "bfloat16", 4, "not a multiple"),
        (64, 4096, 0, "bfloat16", 4, "not a multiple"),
    ],
)
def test_what_is_not_supported_is_said(kind, rows, depth, columns, dtype, devices, why):
    refusal = KERNELS[kind].supported(Site(kind, rows, depth, columns, dtype, devices))
    assert why in (refusal or "") and "\n" not in (refusal or "")


def test_rows_of_an_owner_are_whole_tiles():
    assert "not a multiple of 128 each" in (
        matmul_reduce_scatter.supported(Site("matmul_reduce_scatter", 192, 512, 512, "bfloat16", 2)) or ""
    )
    assert "not a multiple of 256 each" in (
        matmul_reduce_scatter.supported(Site("matmul_reduce_scatter", 256, 512, 512, "bfloat16", 2), CLUSTERS) or ""
    )
    assert "do not divide over 4" in (
        matmul_all_reduce.supported(Site("matmul_all_reduce", 8256, 512, 640, "bfloat16", 4)) or ""
    )


def test_an_own_tile_before_those_of_others_is_refused():
    assert "lead of 0" in (plan("matmul_reduce_scatter", 4096, 1024, 2, lead=0).refusal() or "")


@pytest.mark.parametrize("kind", KERNELS)
def test_another_kind_is_refused(kind):
    assert "is no" in (KERNELS[kind].supported(Site("all_gather_matmul", 4096, 4096, 1536, "bfloat16", 4)) or "")


def test_tiles_that_do_not_fit_into_shared_memory_are_refused():
    site = Site("matmul_reduce_scatter", 4096, 4096, 1536, "bfloat16", 4)
    assert "shared memory" in (matmul_reduce_scatter.supported(site, dataclasses.replace(TILES, steps=5)) or "")
    assert matmul_reduce_scatter.supported(site) is None


@pytest.mark.parametrize(
    "devices, steps, pieces",
    [(2, 3, (64, 4)), (2, 4, (64, 2)), (4, 4, (32, 4)), (4, 3, (64, 4)), (8, 4, (16, 8)), (8, 3, (32, 8))],
)
def test_a_warpgroup_has_a_slot_for_a_piece_of_each_device_as_wide_as_fits(devices, steps, pieces):
    gemm = plan("matmul_reduce_scatter", 8192, 1024, devices, dataclasses.replace(TILES, steps=steps)).gemm
    assert (gemm.store_columns, gemm.store_slots) == pieces


@pytest.mark.parametrize("depth", [2048, 8192])
@pytest.mark.parametrize("rows", [16, 64, 128, 1024, 2048])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_pieces_of_an_all_reduce_are_whole_cache_lines_on_2_4_and_8_devices(devices, rows, depth):
    it = plan("matmul_all_reduce", rows, 8192, devices, None, depth)
    assert it.refusal() is None
    assert all(width * 2 % 128 == 0 for width in (it.gemm.part[1], it.gemm.store_columns, it.staged_shape[-1]))
    assert it.gemm.part[1] % it.gemm.store_columns == 0 and it.gemm.store_slots >= (devices if it.shots == 2 else 2)


@pytest.mark.parametrize(
    "rows, depth, devices, cut",
    [
        (64, 4096, 4, (64, 128, 7)),
        (1024, 4096, 4, (128, 128, 4)),
        (1024, 8192, 4, (128, 256, 3)),
        (64, 4096, 8, (64, 128, 4)),
        (1024, 4096, 8, (128, 128, 3)),
        (1024, 8192, 8, (128, 128, 3)),
    ],
)
def test_eight_devices_take_fewer_steps_for_the_width_of_pieces(rows, depth, devices, cut):
    it = plan("matmul_all_reduce", rows, 8192, devices, None, depth)
    assert (it.gemm.tiles.tile_m, it.gemm.tiles.tile_n, it.gemm.tiles.steps) == cut
    assert it.registers == ((56, 224) if devices == 8 else (40, 232))


def test_more_devices_than_slots_are_refused():
    flat = plan("matmul_all_reduce", 128, 4096, 4)
    assert flat.shots == 1 and flat.refusal() is None
    assert "2 slots" in (dataclasses.replace(flat, shots=2).refusal() or "")
    assert "more than 8" in (plan("matmul_reduce_scatter", 16 * 128, 1024, 16).refusal() or "")


def lowered(kind: str, axes: dict[str, int], rows: int, columns: int = 1024, depth: int = 512):
    mesh, n = deviceless.mesh(axes), axes["tp"]
    kernel = getattr(KERNELS[kind], f"{kind}_kernel")
    out = P("tp") if kind == "matmul_reduce_scatter" else P()
    specs = P(None, "tp"), P("tp")
    step = jax.shard_map(lambda x, w: kernel(x, w, "tp"), mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((rows, depth * n), (depth * n, columns)), specs, strict=True)
    ]
    return jax.jit(step).lower(*arguments)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    "kind, axes, rows",
    [
        pytest.param("matmul_reduce_scatter", {"tp": 2}, 1024, marks=pytest.mark.slow),
        # LLVM's time grows with the square of the number of devices
        ("matmul_reduce_scatter", {"dp": 2, "tp": 2}, 1024),
        ("matmul_all_reduce", {"tp": 2, "dp": 2}, 1024),
        pytest.param("matmul_all_reduce", {"tp": 4}, 1024, marks=pytest.mark.slow),
        ("matmul_all_reduce", {"tp": 4}, 64),
    ],
)
def test_compiles_for_any_axis_of_the_mesh(kind, axes, rows):
    # with 8192, a block has several tiles and finishes one while it computes the next
    columns = 1024 if rows < 128 else 8192
    text = deviceless.compile(lowered(kind, axes, rows, columns)).as_text() or ""
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 1
    assert "all-reduce" not in text.replace("all_reduce", "") and "reduce-scatter" not in text


@pytest.mark.deviceless
@pytest.mark.parametrize("rows", slow_but([64], [16, 64]))
def test_compiles_with_splits(rows):
    compiled = deviceless.compile(lowered("matmul_all_reduce", {"tp": 4}, rows, 2048, 4096))
    assert (compiled.as_text() or "").count('custom_call_target="mosaic_gpu_v2"') == 1
    assert compiled.out_info.shape == (rows, 2048)


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize(
    "kind, devices",
    [("matmul_reduce_scatter", 2), ("matmul_reduce_scatter", 4), ("matmul_all_reduce", 4), ("matmul_all_reduce", 8)],
)
def test_registers_do_not_overflow(kind, devices, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    # sizes of no other test, several tiles per block
    deviceless.compile(lowered(kind, {"tp": devices}, 1152 * devices, 3072))
    said = capfd.readouterr()
    spilled = re.findall(r"(\d+) bytes spill stores", said.out + said.err)
    assert spilled and max(map(int, spilled)) < 100


@pytest.mark.parametrize("kind", KERNELS)
def test_sizes_that_do_not_fit_raise_one_line(kind):
    with pytest.raises(DhelixError, match="use another form") as error:
        lowered(kind, {"tp": 2}, rows=2000)
    assert "\n" not in str(error.value)
