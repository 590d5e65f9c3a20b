"""GEMM and reduce-scatter in one Mosaic-GPU kernel for Hopper: a tile goes to its owner as soon as it is multiplied.

    out = this device's rows of  sum over devices of  x @ w        x [devices * m, k], w [k, n], out [m, n]

The kernel is `summed_matmul`'s with two shots: tiles of other devices' rows first, each sent to its owner by TMA while
the next one is multiplied; own tiles behind, to which what came in is added in the epilogue, in float32. Its module has
the picture, legality and determinism.

Cost: max(GEMM, (devices - 1) / devices of the product over the link) and about ten microseconds; and as many bytes of
staging memory as come in.
"""

from __future__ import annotations

import jax
from jax import lax

from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul import Site, Tiles
from dhelix.runtime.collective_matmul.kernels import summed_matmul
from dhelix.runtime.collective_matmul.kernels.summed_matmul import Plan

DEFAULT_TILES = Tiles(128, 256, 64, 4, "M", 8)
"""In single blocks, a whole wave of other devices' tiles first. On 2 H200s (2026-11-22), in microseconds:

    rows x k x columns      GEMM    psum_scatter    stored beside the next tile                          at once
                                                    as here    clusters of 2    half a wave    128x192    as here
    16384 x 2048 x 4096     388     350             442        473              503            511        519
     8192 x 7168 x 4096     727     215             709        765              770            781        756
     2048 x 2048 x 4096      52      57              72         74               85             79         84

Without any communication the first one takes 439 us beside a GEMM of 391, in another run: what is left there is the
GEMM's.
"""


def plan_for(site: Site, tiles: Tiles | None = None) -> Plan:
    """How the kernel would do `site`."""
    tiles = tiles or DEFAULT_TILES
    return Plan(summed_matmul.gemm_for(site, tiles), site.axis_size, scatter=True, lead=tiles.lead)


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
      tiles: of the GEMM; None is DEFAULT_TILES.

    Returns:
      [m, n] in x's dtype; what other devices add is rounded to it before it is summed in float32.

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
