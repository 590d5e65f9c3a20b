"""GEMM and reduce-scatter in one Mosaic-GPU kernel for Hopper: a tile goes to its owner as soon as it is multiplied.

    out = this device's rows of  sum over devices of  x @ w        x [devices * m, k], w [k, n], out [m, n]

The kernel is `summed_matmul`'s with two shots: tiles of other devices' rows first, each sent to its owner by TMA while
the next one is multiplied; own tiles behind, to which what came in is added then, too. Its module has the picture,
legality and determinism.

Cost: max(GEMM, (devices - 1) / devices of the product over the link) and about ten microseconds; and as many bytes of
staging memory as come in.
"""

from __future__ import annotations

from dataclasses import replace

import jax
from jax import lax

from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul.sites import Site, Tiles
from dhelix.runtime.collective_matmul.kernels import owned_tiles, summed_matmul
from dhelix.runtime.collective_matmul.kernels.owned_tiles import SummedGemm

_TILES, _MANY_DEVICES = Tiles(128, 256, 64, 4, "M", 8), 5


def default_tiles(site: Site) -> Tiles:
    """Large tiles in single blocks, a whole wave of other devices' tiles first; in three steps for 5 to 8 devices, so
    that pieces of all have room.

    On 2 H200s (2026-11-22), in microseconds; another machine than below:

        rows x k x columns      GEMM    psum_scatter    as here    clusters of 2    own parts added at once
        16384 x 2048 x 4096     416     379             482        483              505
         8192 x 4096 x 8192     808     398             874        869              890
         8192 x 7168 x 4096     694     232             742        738
         2048 x 2048 x 4096      55      58              80         82

    The first one with something left out (475 whole, GEMM 419; 16 tiles for each SM, of 15.5): sends to the other GPU
    464, those and the waits 456, all communication and sums 446. Three steps 476, a lead of two waves 483.

    What own parts cost, on one H200 without links, 8192 x 2048 x 8192 (GEMM 406, no own parts 409): parts of one other
    device 420, of three 429; of seven 496 in three steps, 544 in four, whose pieces are but 16 columns wide.
    """
    return replace(_TILES, steps=3) if site.axis_size >= _MANY_DEVICES else _TILES


def plan_for(site: Site, tiles: Tiles | None = None) -> SummedGemm:
    """How the kernel would do `site`."""
    tiles = tiles or default_tiles(site)
    return SummedGemm(owned_tiles.gemm_for(site, tiles), site.axis_size, scatter=True, lead=tiles.lead)


def supported(site: Site, tiles: Tiles | None = None) -> str | None:
    """Why this kernel cannot serve a site of kind "matmul_reduce_scatter", None if it can."""
    if site.kind != "matmul_reduce_scatter":
        return f"{site.kind} is no matmul_reduce_scatter"
    return plan_for(site, tiles).refusal()


def matmul_reduce_scatter_kernel(x: jax.Array, w: jax.Array, axis_name: str, tiles: Tiles | None = None) -> jax.Array:
    """This device's rows of x @ w summed over the devices, inside `shard_map`.

    Args:
      x: [devices * m, k], of a contraction that is split over the devices.
      w: [k, n], of x's dtype.
      axis_name: one axis of the mesh, in the order of the rows.
      tiles: of the GEMM; None is `default_tiles`.

    Returns:
      [m, n] in x's dtype; the devices' parts are rounded to it before they are summed in float32.

    Raises:
      DhelixError: sizes, dtype or tiles that `supported` refuses.
    """
    (m, k), (depth, n) = x.shape, w.shape
    if k != depth or x.dtype != w.dtype:
        raise DhelixError(f"matmul_reduce_scatter: x {x.dtype}{x.shape} and w {w.dtype}{w.shape} do not fit")
    plan = plan_for(Site("matmul_reduce_scatter", m, k, n, x.dtype.name, lax.axis_size(axis_name)), tiles)
    if refusal := plan.refusal():
        raise DhelixError(f"matmul_reduce_scatter has no Mosaic kernel here: {refusal}: take another form or tiles")
    return summed_matmul.summed_matmul(plan, axis_name, x, w, "matmul_reduce_scatter")
