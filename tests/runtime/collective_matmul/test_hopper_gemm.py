"""The GEMM that the Mosaic-GPU kernels share, under Pallas's GPU interpreter with its race detector."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dhelix.profiles.collective_matmul.sites import Tiles
from dhelix.runtime.collective_matmul.kernels import gemm_tiles, hopper_gemm, opaque
from dhelix.runtime.collective_matmul.kernels.gemm_tiles import GROUP, MEMORY_GROUP, Gemm, Place, Tile
from dhelix.runtime.collective_matmul.kernels.held_parts import Adding, Held, Storing


def multiply(gemm: Gemm, x: jax.Array, w: jax.Array, staged: jax.Array | None = None) -> jax.Array:
    """x @ w, and in every third tile the sum with `staged`: [source, tile, warpgroup, piece, row, column]."""
    tile_m = gemm.tiles.tile_m
    place = gemm_tiles.banded(gemm.m // gemm.cluster_rows, gemm.column_tiles, gemm.tiles.group)
    sources = 0 if staged is None else staged.shape[0]

    def order(number: jax.Array) -> Tile:
        return Tile(*place(number))

    def kernel(x: Any, w: Any, staged: Any, out: Any, buffers: Any, loaded: Any) -> None:
        group = lax.axis_index(GROUP)

        def load_rows(tile: Tile, step: jax.Array, destination: Any, barrier: Any) -> None:
            rows = x.at[pl.ds(tile.row * tile_m + tile.first, destination.shape[0]), pl.ds(step * 64, 64)]
            plgpu.copy_gmem_to_smem(rows, destination, barrier)

        def store(place: Place, slot: Any, _: int) -> None:
            rows, columns = slot.shape
            plgpu.copy_smem_to_gmem(slot, out.at[pl.ds(place.row, rows), pl.ds(place.column, columns)])

        @pl.when(group == MEMORY_GROUP)
        def _() -> None:
            @plgpu.warp_map
            def _(warp: jax.Array) -> None:
                pl.when(warp == 0)(lambda: hopper_gemm.load_tiles(gemm, buffers, order, load_rows, w))

        @pl.when(group < MEMORY_GROUP)
        def _() -> None:
            slots = buffers["out"].at[group]
            storing = Storing(gemm, slots, store)
            if not sources:
                return hopper_gemm.multiply_tiles(gemm, buffers, order, storing.behind, storing.finish)

            def adding(held: Held) -> Adding:
                def there(source: int, number: int) -> Any:
                    return staged.at[source, held.place.number, group, number]

                return Adding(gemm, slots, store, loaded.at[group], there, sources)

            def behind(held: Held, turn: int) -> None:
                own = lax.rem(held.place.number, jnp.int32(3)) == 1

                @pl.when(~own)
                def _() -> None:
                    storing.behind(held, turn)
                    if turn == len(gemm.turn_steps) - 1:
                        plgpu.wait_smem_to_gmem(0)

                pl.when(own)(lambda: adding(held).behind(held, turn))

            def finish(held: Held) -> None:
                own = lax.rem(held.place.number, jnp.int32(3)) == 1
                pl.when(~own)(lambda: storing.finish(held))
                pl.when(own)(lambda: adding(held).finish(held))

            hopper_gemm.multiply_tiles(gemm, buffers, order, behind, finish)

    out = jax.ShapeDtypeStruct((gemm.m, gemm.n), gemm.dtype)
    scratch = dict(buffers=gemm.buffers(), loaded=plgpu.Barrier(num_arrivals=max(1, sources), num_barriers=2))
    staged = jnp.zeros(1) if staged is None else staged
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        return plgpu.kernel(kernel, out_type=out, scratch_types=scratch, **gemm.launch())(x, w, staged)


@pytest.mark.parametrize(
    "cluster, tiles",
    [
        (1, Tiles(64, 128, 64, 2, "N", 2, 1)),
        (2, Tiles(128, 64, 64, 3, "M", 1, 4)),
        pytest.param(1, Tiles(128, 128, 64, 2, "M", 2, 3), marks=pytest.mark.slow),
    ],
    ids=["one block, wide N", "clusters, wide M", "a tile cut in two"],
)
def test_product_with_tail_of_columns_and_blocks_of_several_tiles(cluster, tiles):
    gemm = Gemm(2 * cluster * tiles.tile_m, tiles.tile_n + 64, 192, "bfloat16", tiles, cluster)
    check(gemm)


@pytest.mark.parametrize(
    "gemm",
    [
        pytest.param(Gemm(512, 192, 64, "bfloat16", Tiles(128, 128, 64, 2, "M", 2, 1), 1), marks=pytest.mark.slow),
        pytest.param(
            Gemm(384, 320, 128, "bfloat16", Tiles(128, 192, 64, 2, "M", 2, 1), 1, halves=False),
            marks=pytest.mark.slow,
        ),
        Gemm(512, 256, 192, "bfloat16", Tiles(128, 256, 64, 2, "M", 2, 3), 1, store_slots=3),
        Gemm(128, 128, 128, "bfloat16", Tiles(128, 128, 64, 2, "M", 2, 3), 1),
        pytest.param(Gemm(256, 256, 192, "bfloat16", Tiles(64, 256, 64, 2, "N", 2, 3), 1), marks=pytest.mark.slow),
    ],
    ids=[
        "one step, more pieces", "slots do not go round", "a half behind three slots", "fewer tiles than blocks",
        "64 rows side by side are not cut",
    ],
)  # fmt: skip
def test_a_tile_is_stored_beside_the_next_one(gemm: Gemm) -> None:
    check(gemm)


@pytest.mark.parametrize(
    "gemm, sources",
    [
        (Gemm(512, 192, 64, "bfloat16", Tiles(128, 128, 64, 2, "M", 2, 1), 1, halves=False), 1),
        pytest.param(
            Gemm(384, 320, 640, "bfloat16", Tiles(128, 256, 64, 2, "M", 2, 1), 1, 32, 4, halves=False),
            3,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Gemm(768, 320, 192, "bfloat16", Tiles(128, 128, 64, 2, "M", 2, 2), 2, 64, 3, halves=False),
            1,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one step", "many steps, three sources", "clusters, more slots than it takes"],
)
def test_parts_of_others_are_added_beside_the_next_tile(gemm: Gemm, sources: int, monkeypatch) -> None:
    monkeypatch.setattr(opaque, "part", lambda part: part)  # the interpreter does not support inline code
    pieces = len(gemm.pieces(gemm.part))
    shape = (sources, gemm.cluster_tiles, 2, pieces, gemm_tiles.PIECE_ROWS, gemm.store_columns)
    check(gemm, jax.random.normal(jax.random.key(2), shape, jnp.bfloat16))


def check(gemm: Gemm, staged: jax.Array | None = None) -> None:
    assert gemm.refusal() is None
    x = jax.random.normal(jax.random.key(0), (gemm.m, gemm.k), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (gemm.k, gemm.n), jnp.bfloat16)
    expected = np.asarray(x, np.float32) @ np.asarray(w, np.float32)
    if staged is not None:
        expected = expected.astype(jnp.bfloat16).astype(np.float32) + added(gemm, np.asarray(staged, np.float32))
    roundings = 1 if staged is None else 2  # a sum is rounded twice, and may be smaller than its summands
    np.testing.assert_allclose(
        np.asarray(multiply(gemm, x, w, staged), np.float32),
        expected,
        rtol=roundings * 2**-8,
        atol=1e-3 if staged is None else 2**-9 * float(np.abs(expected).max()),
    )


def added(gemm: Gemm, staged: np.ndarray) -> np.ndarray:
    """The parts in `staged` at their places in the result. All blocks of a cluster get the same parts."""
    total = np.zeros((gemm.m, gemm.column_tiles * gemm.tiles.tile_n), np.float32)
    place = gemm_tiles.banded(gemm.m // gemm.cluster_rows, gemm.column_tiles, gemm.tiles.group)
    rows, columns = gemm.part
    for number in range(1, gemm.cluster_tiles, 3):
        row, column = (int(value) for value in place(jnp.int32(number)))
        for rank, group in itertools.product(range(gemm.cluster), range(2)):
            first_row = (row * gemm.cluster + rank) * gemm.tiles.tile_m + (
                group * rows if gemm.tiles.wide == "M" else 0
            )
            first_column = column * gemm.tiles.tile_n
            for piece, (i, j) in enumerate(gemm.pieces((rows, columns))):
                at = (
                    slice(first_row + i, first_row + i + 64),
                    slice(first_column + j, first_column + j + gemm.store_columns),
                )
                total[at] += staged[:, number, group, piece].sum(0)
    return total[:, : gemm.n]


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
