"""Completes products whose contraction several blocks share (split-K). Sums are complete before a tile is rounded.

    blocks of a tile    split 0                 split 1                 split 2
    multiply            x[:, :k/3] @ w[:k/3]    x[:, k/3:2k/3] @ ...    ...
    then                wait for the others     -> partials, signal     -> partials, signal
                        add 1, then 2
                        round, and go on as if all of k had been multiplied here; the others are done

If a product has fewer tiles than there are SMs, as in decode, reading w dominates, and SMs without a tile read nothing.
With S splits, S times as many SMs read. Partial sums stay in float32 on their device. They are added in the order of k,
so results are deterministic.

Legality: all blocks of a tile must be resident at once, because split 0 waits for the others. So the number of tiles
times splits must not exceed the number of running blocks (`Gemm.refusal`).

Cost: for each tile, S - 1 float32 tiles are written and read through L2 after the last step. Each needs one signal.
Source: DistFuse, section 3, "split-K when there are no more tiles than SMs".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from dhelix.runtime.collective_matmul.kernels.gemm_tiles import GROUP, RANK, Gemm


@dataclass(frozen=True)
class SplitSums:
    """Completes the sums of one compute warpgroup. If nothing is split, sums stay as they are.

    Attributes:
      gemm: the GEMM.
      partials: the other splits' partial sums in global memory, with the shape `_shape`; None if nothing is split.
      stored: counters of this device by tile and warpgroup: the number of splits that have stored their sums.
    """

    gemm: Gemm
    partials: Any = None
    stored: Any = None

    def complete(self, number: jax.Array, sums: jax.Array) -> jax.Array:
        """Completes a block's sums to the sums over all of k. Only the result of split 0 is meaningful.

        Args:
          number: the tile's number, as in `Gemm.tile_and_split`.
          sums: the block's sums over its split.
        """
        gemm = self.gemm
        if gemm.splits == 1:
            return sums
        tile, split = gemm.tile_and_split(number)
        place = tile * gemm.cluster + lax.axis_index(RANK), lax.axis_index(GROUP)

        @pl.when(split > 0)
        def _() -> None:
            self.partials.at[(*place, split - 1)][...] = sums
            plgpu.semaphore_signal(self.stored.at[place], memory_scope="gpu")

        @pl.when(split == 0)
        def _() -> None:
            plgpu.semaphore_wait(self.stored.at[place], gemm.splits - 1, decrement=False, memory_scope="gpu")

        for other in range(gemm.splits - 1):
            partial = self.partials.at[(*place, other)]
            sums += plgpu.load(partial, layout=plgpu.Layout.WGMMA, optimized=False)
        return sums


def of_kernel(gemm: Gemm, partials: tuple[Any, ...]) -> SplitSums:
    """The `SplitSums` of the current warpgroup in a kernel.

    `partials` are the kernel's references to the results that `outputs(gemm)` describes.
    """
    if gemm.splits == 1:
        return SplitSums(gemm)
    return SplitSums(gemm, partials[0], pl.get_global(plgpu.SemaphoreType.REGULAR(_shape(gemm)[:2])))


def outputs(gemm: Gemm) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The additional results that a kernel needs: one if contractions are split, otherwise none."""
    return () if gemm.splits == 1 else (jax.ShapeDtypeStruct(_shape(gemm), jnp.float32),)


def _shape(gemm: Gemm) -> tuple[int, ...]:
    """Shape of the partial sums: [block's tile, warpgroup, split except the first, row, column]."""
    return gemm.cluster_tiles // gemm.splits * gemm.cluster, 2, gemm.splits - 1, *gemm.part
