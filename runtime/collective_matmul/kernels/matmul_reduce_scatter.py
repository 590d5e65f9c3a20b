"""GEMM and reduce-scatter in one Mosaic-GPU kernel for Hopper. It sends tiles to owners as soon as they are multiplied.

    out = this device's rows of  sum over devices of  x @ w        x [devices * m, k], w [k, n], out [m, n]

The kernel is `summed_matmul` with `shots = 2`. The owner of a tile is the device that keeps its rows. Tiles of other
devices' rows come first. TMA sends each tile to its owner while the next tile is multiplied. Own tiles come later. They
are added to the received parts, also while the next tile is multiplied. `summed_matmul` has the picture, and describes
legality and determinism.

Cost: max(GEMM, (devices - 1) / devices of the product over the link), plus sending the last wave. Staging memory has
the size of the received parts.
"""

from __future__ import annotations

from dataclasses import replace

import jax
from jax import lax

from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul.sites import Site, Tiles
from dhelix.runtime.collective_matmul.kernels import owned_tiles, summed_matmul
from dhelix.runtime.collective_matmul.kernels.owned_tiles import SummedGemm

_TILES = Tiles(128, 256, 64, 4, "M", 8)


def default_tiles(site: Site) -> Tiles:
    """Returns large tiles. Their blocks form no clusters, and a whole wave of each other device's tiles comes first.

    For 5 to 8 devices, the tiles have `steps = 3` instead of 4. So shared memory has room for wide pieces of all
    devices. These numbers were chosen by measurement (docs/research_log.md).
    """
    return replace(_TILES, steps=3) if site.axis_size >= owned_tiles.MANY_DEVICES else _TILES


def plan_for(site: Site, tiles: Tiles | None = None) -> SummedGemm:
    """Returns the kernel's plan for `site`."""
    tiles = tiles or default_tiles(site)
    return SummedGemm(owned_tiles.gemm_for(site, tiles), site.axis_size, scatter=True, lead=tiles.lead)


def supported(site: Site, tiles: Tiles | None = None) -> str | None:
    """Returns why this kernel cannot serve a site of kind "matmul_reduce_scatter"; None if it can."""
    if site.kind != "matmul_reduce_scatter":
        return f"{site.kind} is not matmul_reduce_scatter"
    return plan_for(site, tiles).refusal()


def matmul_reduce_scatter_kernel(x: jax.Array, w: jax.Array, axis_name: str, tiles: Tiles | None = None) -> jax.Array:
    """Computes this device's rows of the sum over devices of x @ w, inside `shard_map`.

    Args:
      x: [devices * m, k]; the contraction is split over the devices.
      w: [k, n], of x's dtype.
      axis_name: one axis of the mesh. Rows of the sum belong to devices in the order of this axis.
      tiles: tiles of the GEMM; None: `default_tiles`.

    Returns:
      The rows, [m, n] in x's dtype. The devices' parts are rounded to this dtype before they are summed in float32.

    Raises:
      DhelixError: `supported` refuses the sizes, dtype or tiles.
    """
    (m, k), (depth, n) = x.shape, w.shape
    if k != depth or x.dtype != w.dtype:
        raise DhelixError(f"matmul_reduce_scatter: x {x.dtype}{x.shape} and w {w.dtype}{w.shape} do not fit")
    plan = plan_for(Site("matmul_reduce_scatter", m, k, n, x.dtype.name, lax.axis_size(axis_name)), tiles)
    if refusal := plan.refusal():
        raise DhelixError(
            f"matmul_reduce_scatter has no Mosaic kernel here: {refusal}: use another form or other tiles"
        )
    return summed_matmul.summed_matmul(plan, axis_name, x, w, "matmul_reduce_scatter")
