"""GEMM and all-reduce in one Mosaic-GPU kernel for Hopper (DistFuse): tiles leave as soon as they are multiplied.

    out = sum over devices of  x @ w        x [m, k], w [k, n], out [m, n], whole on all devices

Prefill: as `matmul_reduce_scatter`, and the owner stores what it has summed into all devices' results at once.
Decode, where the product is one wave of tiles and little data: every device sends its tiles to all, which saves a hop.
`summed_matmul` has the picture, legality and determinism.

Cost: max(GEMM, 2 (devices - 1) / devices of the product over the link), what the last wave of tiles sends, and about
ten microseconds. Small tiles shorten that last wave, large ones multiply faster: `default_tiles`.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul.sites import H200_SMS, Site, Tiles
from dhelix.runtime.collective_matmul.kernels import owned_tiles, summed_matmul
from dhelix.runtime.collective_matmul.kernels.owned_tiles import SummedGemm

_LARGE = Tiles(128, 256, 64, 3, "M", 8, cluster=1, lead=H200_SMS // 4)
_SMALL = Tiles(128, 128, 64, 4, "M", 8, cluster=2, lead=H200_SMS // 2 // 2)
_DECODE = Tiles(64, 128, 64, 7, "N", 8)
_LARGE_DEPTH = 8192  # of the contraction on a device: from here what large tiles save exceeds what the last wave sends
_SPLIT_DEPTH, _VERY_DEEP, _MOST_SPLITS = 4096, 14336, 4
_READING = 64  # blocks that read w as fast as the memory gives it
_ONE_SHOT_BYTES = 4 << 20  # that a device sends: up to here latency is more than this takes


def default_tiles(site: Site) -> Tiles:
    """Large tiles where the product is deep, small ones where it is not, flat ones where 128 rows do not divide or one
    shot is enough; of these, several blocks share a contraction where that is faster (`splits_for`).

    Large ones in three steps, which leaves room for all pieces of a tile in shared memory, in single blocks and a
    quarter of a wave first; of small ones half a wave first, in clusters of two where rows divide so. On 2 H200s
    (2026-11-22), in microseconds, when a tile was stored before the next one was multiplied:

        rows x k x columns      psum            128x128                   128x256               64x128
                                behind a GEMM   lead 66    lead 33        4 steps    3 steps
        1024 x  4096 x 8192     179             158        145            153        154
        1024 x 14336 x 8192     385             402                       382        366
          another run:          436                                                  400, single blocks 363
          64 x  4096 x 8192     47                                                              49
          64 x 14336 x 8192     85                                                              94

    Today's kernel, on another machine (2 H200s, 2026-11-22):

        rows x k x columns      psum            128x128, lead 33           128x256, 4 steps
                                behind a GEMM   clusters of 2    blocks    a wave first    clusters of 2    lead 66
        1024 x  4096 x 8192     191             147              160       152             151              148
        1024 x 14336 x 8192     450             418              445       418             423              427

    The defaults on a third one: 148 of 186, 408 of 426, and 46 of 42 with 64 rows.

    All of these by small tiles in six steps. Four leave shared memory for pieces of 64 columns, 128 bytes, of four
    devices. One H200, without links (2026-11-23, `own_tiles.py`), one of as many rounds of tiles as devices
    an own one:

        rows x k x columns      devices    cuBLAS    128x128, 6 steps    5      4      128x256
        1024 x  4096 x 8192     2          110       122                 122    118    108
        1024 x 14336 x 8192     2          372       402                 420    385    360
        1024 x  2048 x 8192     4          56        68                  68     66     55
        1024 x  7168 x 8192     4          186       232                 214    202    182
        4096 x  7168 x 8192     4          738       917                 858    782
        2048 x  3584 x 8192     8          185       273                        213
    """
    if shots_for(site, _DECODE) == 1:
        splits = splits_for(site, _DECODE)
        return _DECODE if splits == 1 else replace(_DECODE, splits=splits)
    if site.rows % _LARGE.tile_m:
        return _DECODE
    tiles = _LARGE if site.contraction >= _LARGE_DEPTH else _SMALL
    return replace(tiles, cluster=1) if site.rows % (_owners(site, tiles) * 2 * tiles.tile_m) else tiles


def shots_for(site: Site, tiles: Tiles) -> int:
    """1 if the product is one wave of tiles and all devices' copies of it are soon sent, else 2."""
    sent = 2 * site.rows * site.columns * (site.axis_size - 1)
    return 1 if _blocks(site, tiles) <= H200_SMS and sent <= _ONE_SHOT_BYTES else 2


def _blocks(site: Site, tiles: Tiles) -> int:
    return -(-site.rows // tiles.tile_m) * -(-site.columns // tiles.tile_n)


def splits_for(site: Site, tiles: Tiles) -> int:
    """Blocks that share the contraction of a tile of 64 rows by 128 columns, where tiles leave SMs without work.

    A block reads w at some 85 GB/s, so tiles of 64 columns beside each other keep the memory busy: where there are
    fewer, contractions are split until as many blocks read. It costs some 4 us, so not below a depth of 4096; of very
    deep ones the rest of the SMs has its share, too. On an H200 (2026-11-23, `own_tiles.py`), in
    microseconds of the GEMM alone:

        rows x k x columns      cuBLAS   1 split    2       4       8       chosen
          64 x  4096 x 2048      21       19        18      16      18      4
          64 x 14336 x 2048      24       54        40      30      34      4
          64 x  2048 x 4096      18       13        16      16              1
          64 x  7168 x 4096      22       34        25      30              2
          64 x  3584 x 8192      22       22        25                      1
          64 x  7168 x 8192      35       37        38                      1
          64 x 14336 x 8192      62       82        65                      2
         128 x  7168 x 4096      25       31        25                      2       41 by tiles of 128x128
         128 x  7168 x 8192      36       38                                1       45
    """
    column_tiles, steps = max(-(-site.columns // tiles.tile_n), 1), site.contraction // tiles.tile_k
    if site.contraction < _SPLIT_DEPTH:
        return 1
    reading = max(_READING // column_tiles, 2 if site.contraction >= _VERY_DEEP else 1)
    most = min(reading, H200_SMS // max(_blocks(site, tiles), 1))
    return max(n for n in (1, 2, _MOST_SPLITS) if n <= max(most, 1) and steps % n == 0)


def plan_for(site: Site, tiles: Tiles | None = None) -> SummedGemm:
    """How the kernel would do `site`: owners by rows if these divide into tiles, else by columns.

    Few rows, as in decode, are filled up with rows that count for nothing: the GEMM has tiles of no less than 64.
    """
    filled = replace(site, rows=-(-site.rows // _DECODE.tile_m) * _DECODE.tile_m)
    is_decode = site.rows < _LARGE.tile_m or shots_for(filled, tiles or _DECODE) == 1
    site = filled if is_decode else site
    tiles = tiles or default_tiles(site)
    shots = shots_for(site, tiles)
    gemm = owned_tiles.gemm_for(site, tiles, shots)
    return SummedGemm(gemm, site.axis_size, scatter=False, shots=shots, lead=tiles.lead)


def _owners(site: Site, tiles: Tiles) -> int:
    """Of blocks of rows one above the other."""
    return 1 if shots_for(site, tiles) == 1 or site.rows % (site.axis_size * tiles.tile_m) else site.axis_size


def supported(site: Site, tiles: Tiles | None = None) -> str | None:
    """Why this kernel cannot serve a site of kind "matmul_all_reduce", None if it can."""
    if site.kind != "matmul_all_reduce":
        return f"{site.kind} is no matmul_all_reduce"
    return plan_for(site, tiles).refusal()


def matmul_all_reduce_kernel(x: jax.Array, w: jax.Array, axis_name: str, tiles: Tiles | None = None) -> jax.Array:
    """x @ w summed over the devices, inside `shard_map`.

    Args:
      x: [m, k], of a contraction that is split over the devices.
      w: [k, n], of x's dtype.
      axis_name: one axis of the mesh.
      tiles: of the GEMM; None is `default_tiles`.

    Returns:
      [m, n] in x's dtype, the same bits on all devices; parts are rounded to it before they are summed in float32.

    Raises:
      DhelixError: sizes, dtype or tiles that `supported` refuses.
    """
    (m, k), (depth, n) = x.shape, w.shape
    if k != depth or x.dtype != w.dtype:
        raise DhelixError(f"matmul_all_reduce: x {x.dtype}{x.shape} and w {w.dtype}{w.shape} do not fit")
    plan = plan_for(Site("matmul_all_reduce", m, k, n, x.dtype.name, lax.axis_size(axis_name)), tiles)
    if refusal := plan.refusal():
        raise DhelixError(f"matmul_all_reduce has no Mosaic kernel here: {refusal}: take another form or tiles")
    if plan.gemm.m > m:
        x = jnp.pad(x, ((0, plan.gemm.m - m), (0, 0)))
    out = summed_matmul.summed_matmul(plan, axis_name, x, w, "matmul_all_reduce")
    return out if plan.gemm.m == m else out[:m]
