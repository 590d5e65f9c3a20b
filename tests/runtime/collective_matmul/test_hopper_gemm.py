"""The GEMM that the Mosaic-GPU kernels share, under Pallas's GPU interpreter with its race detector."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dhelix.profiles.collective_matmul import Tiles
from dhelix.runtime.collective_matmul.kernels import gemm_tiles, hopper_gemm
from dhelix.runtime.collective_matmul.kernels.gemm_tiles import GROUP, MEMORY_GROUP, Gemm, Place, Tile


def multiply(gemm: Gemm, x: jax.Array, w: jax.Array, some_at_once: bool = False) -> jax.Array:
    """x @ w; of three tiles one is stored at once, from its sums, if `some_at_once`."""
    tile_m = gemm.tiles.tile_m
    place = gemm_tiles.banded(gemm.m // gemm.cluster_rows, gemm.column_tiles, gemm.tiles.group)

    def order(number: jax.Array) -> Tile:
        return Tile(*place(number))

    def kernel(x: Any, w: Any, out: Any, buffers: Any) -> None:
        def load_rows(tile: Tile, step: jax.Array, destination: Any, barrier: Any) -> None:
            rows = x.at[pl.ds(tile.row * tile_m + tile.first, destination.shape[0]), pl.ds(step * 64, 64)]
            plgpu.copy_gmem_to_smem(rows, destination, barrier)

        def store(place: Place, slot: Any, _: int) -> None:
            rows, columns = slot.shape
            plgpu.copy_smem_to_gmem(slot, out.at[pl.ds(place.row, rows), pl.ds(place.column, columns)])

        @pl.when(lax.axis_index(GROUP) == MEMORY_GROUP)
        def _() -> None:
            @plgpu.warp_map
            def _(warp: jax.Array) -> None:
                pl.when(warp == 0)(lambda: hopper_gemm.load_tiles(gemm, buffers, order, load_rows, w))

        @pl.when(lax.axis_index(GROUP) < MEMORY_GROUP)
        def _() -> None:
            if not some_at_once:
                return hopper_gemm.multiply_tiles(gemm, buffers, order, store)
            slots = buffers["out"].at[lax.axis_index(GROUP)]

            def later(place: Place) -> jax.Array:
                return lax.rem(place.number, jnp.int32(3)) != 1

            def at_once(place: Place, sums: jax.Array) -> None:
                @pl.when(~later(place))
                def _() -> None:
                    for number, _ in enumerate(gemm.pieces(gemm.part)):
                        piece = hopper_gemm.piece_of(gemm, sums, number)
                        hopper_gemm.store_piece(gemm, slots, piece, number, gemm.part, store, place)

            def told(place: Place) -> None:
                pl.when(later(place))(lambda: plgpu.wait_smem_to_gmem(0))

            hopper_gemm.multiply_tiles(gemm, buffers, order, store, told, at_once, later)

    out = jax.ShapeDtypeStruct((gemm.m, gemm.n), gemm.dtype)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        return plgpu.kernel(kernel, out_type=out, scratch_types=dict(buffers=gemm.buffers()), **gemm.launch())(x, w)


@pytest.mark.parametrize(
    "cluster, tiles",
    [
        (1, Tiles(64, 128, 64, 2, "N", 2, 1)),
        (2, Tiles(128, 64, 64, 3, "M", 1, 4)),
        (1, Tiles(128, 128, 64, 2, "M", 2, 3)),
    ],
    ids=["one block, wide N", "clusters, wide M", "a tile cut in two"],
)
def test_product_with_tail_of_columns_and_blocks_of_several_tiles(cluster, tiles):
    gemm = Gemm(2 * cluster * tiles.tile_m, tiles.tile_n + 64, 192, "bfloat16", tiles, cluster)
    check(gemm)


@pytest.mark.parametrize(
    "gemm, some_at_once",
    [
        (Gemm(512, 192, 64, "bfloat16", Tiles(128, 128, 64, 2, "M", 2, 1), 1), False),
        (Gemm(384, 320, 128, "bfloat16", Tiles(128, 192, 64, 2, "M", 2, 1), 1, halves=False), True),
        (Gemm(384, 320, 640, "bfloat16", Tiles(128, 256, 64, 2, "M", 2, 1), 1, store_slots=4, halves=False), True),
        (Gemm(512, 256, 192, "bfloat16", Tiles(128, 256, 64, 2, "M", 2, 3), 1, store_slots=3), False),
        (Gemm(128, 128, 128, "bfloat16", Tiles(128, 128, 64, 2, "M", 2, 3), 1), False),
        (Gemm(256, 256, 192, "bfloat16", Tiles(64, 256, 64, 2, "N", 2, 3), 1), False),
    ],
    ids=[
        "one step, more pieces", "slots do not go round, some at once", "many steps, some at once",
        "a half behind three slots", "fewer tiles than blocks", "64 rows side by side are not cut",
    ],
)  # fmt: skip
def test_a_tile_is_stored_beside_the_next_one(gemm: Gemm, some_at_once: bool) -> None:
    check(gemm, some_at_once)


def check(gemm: Gemm, some_at_once: bool = False) -> None:
    assert gemm.refusal() is None
    x = jax.random.normal(jax.random.key(0), (gemm.m, gemm.k), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (gemm.k, gemm.n), jnp.bfloat16)
    expected = np.asarray(x, np.float32) @ np.asarray(w, np.float32)
    np.testing.assert_allclose(
        np.asarray(multiply(gemm, x, w, some_at_once), np.float32), expected, rtol=2**-8, atol=1e-3
    )


@pytest.mark.parametrize("sms, whole, rounds", [(132, 132, 2.56), (96, 144, 3.56), (80, 160, 4.0), (64, 160, 5.0)])
def test_the_last_round_is_cut_in_two_where_that_shortens_it(sms, whole, rounds):
    gemm = Gemm(4096, 2560, 8192, "bfloat16", Tiles(128, 256, 64, 4, "M", 8, sms))
    assert gemm.cluster_tiles == 160
    assert (gemm.whole_tiles, gemm.rounds) == (whole, rounds)


def test_tiles_whose_halves_no_warpgroup_can_multiply_stay_whole():
    gemm = Gemm(4096, 2560, 8192, "bfloat16", Tiles(128, 192, 64, 4, "M", 8, 180))
    assert gemm.whole_tiles == gemm.cluster_tiles


def test_bands_go_down_the_rows_first():
    place = jax.vmap(gemm_tiles.banded(5, 3, 2))
    rows, columns = place(jnp.arange(15))
    assert rows.tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 4, 4, 4]
    assert columns.tolist() == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2, 0, 1, 2]


@pytest.mark.parametrize(
    "tiles, why",
    [
        (Tiles(96, 256, 64, 4, "M", 8), "64 rows"),
        (Tiles(128, 1024, 64, 2, "N", 8), "to 256 columns"),
        (Tiles(128, 256, 32, 4, "M", 8), "swizzle"),
        (Tiles(192, 256, 64, 3, "N", 8), "registers"),
        (Tiles(128, 256, 64, 1, "M", 8), "2 steps"),
        (Tiles(128, 256, 64, 5, "M", 8), "shared memory"),
    ],
)
def test_tiles_that_cannot_be_had_are_refused(tiles, why):
    assert why in (Gemm(4096, 1536, 4096, "bfloat16", tiles).refusal() or "")
