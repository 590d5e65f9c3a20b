"""GEMM and all-reduce in one Mosaic-GPU kernel for Hopper (DistFuse): it sends tiles as soon as they are multiplied.

    out = sum over devices of  x @ w        x [m, k], w [k, n], out [m, n], whole on all devices

The kernel has two ways to send tiles. With two shots (as in prefill), it works like `matmul_reduce_scatter`, but the
owner of a tile stores the sum into the results of all devices. With one shot (as in decode), every device sends its
tiles to all devices, which saves a hop. One shot is used if the product is one wave of tiles (at most one tile per SM)
and little data. `summed_matmul` has the picture, and describes legality and determinism.

Cost: max(GEMM, 2 (devices - 1) / devices of the product over the link), plus sending the last wave of tiles. Small
tiles shorten the last wave, and large tiles multiply faster; `default_tiles` chooses.
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
_SMALL_OF_MANY, _FLAT_OF_MANY = replace(_SMALL, steps=3), replace(_DECODE, steps=4)  # two shots, 5 to 8 devices
_LARGE_DEPTH = 8192  # from this contraction on, large tiles save more time than their longer last wave costs
_SPLIT_DEPTH, _VERY_DEEP, _MOST_SPLITS = 4096, 14336, 4
_READING = 64  # number of blocks that saturate the memory when they read w
_ONE_SHOT_BYTES = 4 << 20  # if a device sends at most this many bytes, latency dominates


def default_tiles(site: Site) -> Tiles:
    """Returns tiles for a site: large, small or flat ones.

    - Flat tiles have 64 rows. They are chosen if one shot is enough, or if the rows are not a multiple of 128. With one
      shot, several blocks share a contraction if this is faster (`splits_for`).
    - Large tiles are chosen for long contractions. They have `steps = 3`, so that all pieces of a tile have room in
      shared memory. Their blocks form no clusters. A quarter of a wave of each other device's tiles comes first.
    - Small tiles are chosen otherwise. They have `steps = 4`, so that pieces have 64 columns (128 bytes). They form
      clusters of two blocks if the rows are divisible. Half a wave of each other device's tiles comes first.
    - For 5 to 8 devices, large tiles are never chosen, and with two shots the others have fewer steps. So pieces have
      64 columns there, too. Narrower pieces would be stored into the peers' results in parts of cache lines.

    All these numbers were chosen by measurement (docs/research_log.md, `benchmarks/collective_matmul/own_tiles.py`),
    except the steps for 5 to 8 devices: these are the most that fit for 8.
    """
    if shots_for(site, _DECODE) == 1:
        splits = splits_for(site, _DECODE)
        return _DECODE if splits == 1 else replace(_DECODE, splits=splits)
    many = site.axis_size >= owned_tiles.MANY_DEVICES
    if site.rows % _LARGE.tile_m:
        return _FLAT_OF_MANY if many else _DECODE
    tiles = _SMALL_OF_MANY if many else _LARGE if site.contraction >= _LARGE_DEPTH else _SMALL
    return replace(tiles, cluster=1) if site.rows % (_owners(site, tiles) * 2 * tiles.tile_m) else tiles


def shots_for(site: Site, tiles: Tiles) -> int:
    """The number of shots: 1 if the product is one wave of tiles and is small enough to send to all devices, else 2."""
    sent = 2 * site.rows * site.columns * (site.axis_size - 1)
    return 1 if _blocks(site, tiles) <= H200_SMS and sent <= _ONE_SHOT_BYTES else 2


def _blocks(site: Site, tiles: Tiles) -> int:
    return -(-site.rows // tiles.tile_m) * -(-site.columns // tiles.tile_n)


def splits_for(site: Site, tiles: Tiles) -> int:
    """Number of blocks that share the contraction of a flat tile. It is 1 unless the tiles leave SMs without work.

    A single block cannot saturate the memory when it reads w, but `_READING` blocks can. So if there are fewer column
    tiles, contractions are split until `_READING` blocks read. A split has a fixed cost, so contractions below
    `_SPLIT_DEPTH` are not split. Contractions of `_VERY_DEEP` or more are split at least in two if SMs are left. The
    limits were chosen by measurement (docs/research_log.md, `benchmarks/collective_matmul/own_tiles.py`).
    """
    column_tiles, steps = max(-(-site.columns // tiles.tile_n), 1), site.contraction // tiles.tile_k
    if site.contraction < _SPLIT_DEPTH:
        return 1
    reading = max(_READING // column_tiles, 2 if site.contraction >= _VERY_DEEP else 1)
    most = min(reading, H200_SMS // max(_blocks(site, tiles), 1))
    return max(n for n in (1, 2, _MOST_SPLITS) if n <= max(most, 1) and steps % n == 0)


def plan_for(site: Site, tiles: Tiles | None = None) -> SummedGemm:
    """Returns the kernel's plan for `site`.

    Each owner has a block of rows if the rows are divisible, else a block of columns. If there are few rows, as in
    decode, they are padded, because the GEMM has tiles of 64 rows or more.
    """
    filled = replace(site, rows=-(-site.rows // _DECODE.tile_m) * _DECODE.tile_m)
    is_decode = site.rows < _LARGE.tile_m or shots_for(filled, tiles or _DECODE) == 1
    site = filled if is_decode else site
    tiles = tiles or default_tiles(site)
    shots = shots_for(site, tiles)
    gemm = owned_tiles.gemm_for(site, tiles, shots)
    return SummedGemm(gemm, site.axis_size, scatter=False, shots=shots, lead=tiles.lead)


def _owners(site: Site, tiles: Tiles) -> int:
    """Number of owners along the rows: 1 if all devices own all rows, or if owners have blocks of columns."""
    return 1 if shots_for(site, tiles) == 1 or site.rows % (site.axis_size * tiles.tile_m) else site.axis_size


def supported(site: Site, tiles: Tiles | None = None) -> str | None:
    """Returns why this kernel cannot serve a site of kind "matmul_all_reduce"; None if it can."""
    if site.kind != "matmul_all_reduce":
        return f"{site.kind} is not matmul_all_reduce"
    return plan_for(site, tiles).refusal()


def matmul_all_reduce_kernel(x: jax.Array, w: jax.Array, axis_name: str, tiles: Tiles | None = None) -> jax.Array:
    """Computes the sum over devices of x @ w, inside `shard_map`.

    Args:
      x: [m, k]; the contraction is split over the devices.
      w: [k, n], of x's dtype.
      axis_name: one axis of the mesh.
      tiles: tiles of the GEMM; None: `default_tiles`.

    Returns:
      The sum, [m, n] in x's dtype, with the same bits on all devices. The devices' parts are rounded to this dtype
      before they are summed in float32.

    Raises:
      DhelixError: `supported` refuses the sizes, dtype or tiles.
    """
    (m, k), (depth, n) = x.shape, w.shape
    if k != depth or x.dtype != w.dtype:
        raise DhelixError(f"matmul_all_reduce: x {x.dtype}{x.shape} and w {w.dtype}{w.shape} do not fit")
    plan = plan_for(Site("matmul_all_reduce", m, k, n, x.dtype.name, lax.axis_size(axis_name)), tiles)
    if refusal := plan.refusal():
        raise DhelixError(f"matmul_all_reduce has no Mosaic kernel here: {refusal}: use another form or other tiles")
    if plan.gemm.m > m:
        x = jnp.pad(x, ((0, plan.gemm.m - m), (0, 0)))
    out = summed_matmul.summed_matmul(plan, axis_name, x, w, "matmul_all_reduce")
    return out if plan.gemm.m == m else out[:m]
