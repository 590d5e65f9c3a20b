"""Products whose contraction several blocks share (split-K), summed before anything is done about them.

    blocks of a tile    split 0                 split 1                 split 2
    multiply            x[:, :k/3] @ w[:k/3]    x[:, k/3:2k/3] @ ...    ...
    then                wait for the others     -> partials, signal     -> partials, signal
                        add 1, then 2
                        round, and go on as if all of k had been multiplied here; the others are done

Where a product has fewer tiles than there are SMs, as in decode, most of its time goes into reading w, and SMs without
a tile read nothing. With S splits S times as many read. Partial sums stay in float32 and on their device; they are
added in the order of k, so results are deterministic.

Legality: all blocks of a tile run at once, so that none waits for one that has no SM: no more tiles times splits than
blocks run (`Gemm.refusal`).

Cost: S - 1 tiles of float32 written and read through L2 for each tile, and one signal, behind the last step.
DistFuse section 3: "split-K when there are no more tiles than SMs".
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
    """Of one warpgroup that multiplies; nothing but a way through where nothing is split.

    Attributes:
      partials: in global memory, of `partials_shape`; None where nothing is split.
      stored: counters of this device beside it, by tile and warpgroup: splits that have stored their sums.
    """

    gemm: Gemm
    partials: Any = None
    stored: Any = None

    def complete(self, number: jax.Array, sums: jax.Array) -> jax.Array:
        """The sums over all of k, in the block of split 0, from each block's own; in others they mean nothing.

        `number`: what the order of tiles is asked for.
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
    """Inside a kernel with `outputs` among its results, which come as `partials`."""
    if gemm.splits == 1:
        return SplitSums(gemm)
    return SplitSums(gemm, partials[0], pl.get_global(plgpu.SemaphoreType.REGULAR(_shape(gemm)[:2])))


def outputs(gemm: Gemm) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What a kernel needs as one more result, if anything."""
    return () if gemm.splits == 1 else (jax.ShapeDtypeStruct(_shape(gemm), jnp.float32),)


def _shape(gemm: Gemm) -> tuple[int, ...]:
    """[block's tile, warpgroup, split but the first, row, column]"""
    return gemm.cluster_tiles // gemm.splits * gemm.cluster, 2, gemm.splits - 1, *gemm.part
