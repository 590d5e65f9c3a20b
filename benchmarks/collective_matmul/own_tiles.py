"""Measures on one GPU how much longer a GEMM takes if it adds other devices' partial sums to some of its tiles.

    python benchmarks/collective_matmul/own_tiles.py --out DIR
    python benchmarks/collective_matmul/own_tiles.py --shapes 8192x1024x4096 \\
        --tiles 128x256x64,steps=3,wide=M,group=8 --devices 8
    python benchmarks/collective_matmul/own_tiles.py --shapes 64x2048x8192 \\
        --tiles 64x128x64,steps=7,wide=N,group=8 --splits 2,4

The kernels of `runtime/collective_matmul/kernels` compute two kinds of tiles of a product. A device sends the tiles of
other devices away. To its *own tiles*, it adds the partial sums that other devices have sent. On several GPUs, a time
also depends on the link, the clocks and the progress of the other devices. So this benchmark runs only `hopper_gemm`
and `held_parts`, on one GPU. For n devices, every n-th round of tiles consists of own tiles. The partial sums are read
from this GPU's memory without waiting, and have arbitrary values.

The following programs take turns, in loops like those of `programs.py`: cuBLAS (XLA without Triton), the GEMM without
own tiles, and the GEMM with own tiles for each number of devices. Times are medians in microseconds. Results with own
tiles are wrong, because the partial sums are arbitrary. Results without own tiles are compared with cuBLAS's. With
--splits there are no own tiles; instead, several blocks share the contraction of a tile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from dhelix.benchmarks.collective_matmul import programs as programs
from dhelix.benchmarks.collective_matmul.programs import AXIS, Program
from dhelix.benchmarks.collective_matmul.run import Turn, iterations
from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul.sites import Site, Tiles
from dhelix.runtime.collective_matmul.kernels import (
    gemm_tiles,
    hopper_gemm,
    matmul_all_reduce,
    matmul_reduce_scatter,
    opaque,
    split_sums,
)
from dhelix.runtime.collective_matmul.kernels.gemm_tiles import GROUP, MEMORY_GROUP, Gemm, Place, Tile
from dhelix.runtime.collective_matmul.kernels.held_parts import Adding, Held, Storing
from dhelix.runtime.processes.launch_settings import without_graphs
from dhelix.runtime.profiling.provenance import provenance

SHAPES = "16384x2048x4096,8192x2048x8192,8192x3584x4096,8192x1024x4096"
_TURN_MS = 12.0


def site_of(shape: str, devices: int) -> Site:
    """The site of a local product, given as rows x contraction x columns. Raises DhelixError for other text."""
    try:
        m, k, n = map(int, shape.split("x"))
    except ValueError:
        raise DhelixError(f"{shape!r} is no shape: write rows, contraction and columns as 8192x2048x4096") from None
    return Site("matmul_reduce_scatter", m, k, n, "bfloat16", devices)


def program(site: Site, tiles: Tiles | None) -> Program:
    """x @ w as one device of `site` computes it. With one device, all tiles are only stored, without sums.

    Raises:
      DhelixError: there is no kernel for this product.
    """
    plan = matmul_reduce_scatter.plan_for(site, tiles)
    gemm = plan.gemm
    reason = gemm.refusal() if site.axis_size == 1 else plan.refusal()
    if reason:
        raise DhelixError(f"{site.key}: {reason}")
    m, _, n = site.sizes
    staged = jax.ShapeDtypeStruct(plan.staged_shape, site.dtype)
    sources = site.axis_size - 1

    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        out = jax.ShapeDtypeStruct((m, n), x.dtype)
        outputs = [out, staged] if sources else [out, *split_sums.outputs(gemm)]
        barrier = plgpu.Barrier(num_arrivals=max(1, sources), num_barriers=2)

        def kernel(x: Any, w: Any, out: Any, *others: Any, buffers: Any, loaded: Any) -> None:
            _kernel(gemm, sources, x, w, out, *others, buffers=buffers, loaded=loaded)

        scratch = dict(buffers=gemm.buffers(), loaded=barrier)
        return plgpu.kernel(kernel, out_type=outputs, scratch_types=scratch, **gemm.launch())(x, w)[0]

    return Program(f"own tiles of {site.axis_size}", ("x", "w"), (m, n), call)


def _kernel(gemm: Gemm, sources: int, x: Any, w: Any, out: Any, *others: Any, buffers: Any, loaded: Any) -> None:
    group, tile_m = lax.axis_index(GROUP), gemm.tiles.tile_m
    place = gemm_tiles.banded(gemm.m // gemm.cluster_rows, gemm.column_tiles, gemm.tiles.group)

    def order(number: jax.Array) -> Tile:
        return Tile(*place(gemm.tile_and_split(number)[0]))

    def load_rows(tile: Tile, step: jax.Array, destination: Any, barrier: Any) -> None:
        rows = pl.ds(tile.row * tile_m, tile_m), pl.ds(step * gemm.tiles.tile_k, gemm.tiles.tile_k)
        plgpu.copy_gmem_to_smem(x.at[rows], destination, barrier)

    @pl.when(group == MEMORY_GROUP)
    def _() -> None:
        plgpu.set_max_registers(gemm_tiles.MEMORY_REGISTERS, action="decrease")

        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            pl.when(warp == 0)(lambda: hopper_gemm.load_tiles(gemm, buffers, order, load_rows, w))

    @pl.when(group < MEMORY_GROUP)
    def _() -> None:
        plgpu.set_max_registers(gemm_tiles.COMPUTE_REGISTERS, action="increase")
        slots = buffers["out"].at[group]

        def store(place: Place, slot: Any, _: int) -> None:
            rows, columns = slot.shape
            plgpu.copy_smem_to_gmem(slot, out.at[pl.ds(place.row, rows), pl.ds(place.column, columns)])

        storing = Storing(gemm, slots, store)
        if gemm.splits > 1:
            sums = split_sums.of_kernel(gemm, others)

            def store_sum(held: Held) -> None:
                pl.when(gemm.tile_and_split(held.place.number)[1] == 0)(lambda: storing.finish(held))

            return hopper_gemm.multiply_tiles(gemm, buffers, order, storing.behind, store_sum, sums.complete)
        if not sources:
            return hopper_gemm.multiply_tiles(gemm, buffers, order, storing.behind, storing.finish)

        def is_own(place: Place) -> jax.Array:
            round_ = lax.div(place.number, jnp.int32(gemm.clusters))
            return lax.rem(round_, jnp.int32(sources + 1)) == sources

        def adding(place: Place) -> Adding:
            def there(source: int, number: int) -> Any:
                return others[0].at[source, lax.rem(place.number, jnp.int32(others[0].shape[1])), group, number]

            return Adding(gemm, slots, store, loaded.at[group], there, sources)

        def behind(held: Held, turn: int) -> None:
            held = Held(held.part, opaque.scalars(held.place))

            @pl.when(~is_own(held.place))
            def _() -> None:
                storing.behind(held, turn)
                if turn == len(gemm.turn_steps) - 1:
                    plgpu.wait_smem_to_gmem(0)

            pl.when(is_own(held.place))(lambda: adding(held.place).behind(held, turn))

        def finish(held: Held) -> None:
            pl.when(~is_own(held.place))(lambda: storing.finish(held))
            pl.when(is_own(held.place))(lambda: adding(held.place).finish(held))

        hopper_gemm.multiply_tiles(gemm, buffers, order, behind, finish)


def variants(shape: str, devices: list[int], splits: list[int], tiles: Tiles | None) -> dict[str, Program]:
    """The compared programs by name: cuBLAS, the GEMM alone, and the GEMM with own tiles or splits."""
    m, _, n = site_of(shape, 1).sizes
    made = {"cuBLAS": Program("cuBLAS", ("x", "w"), (m, n), jnp.dot), "no own tiles": program(site_of(shape, 1), tiles)}
    if splits:
        cut = tiles or matmul_all_reduce.default_tiles(site_of(shape, 4))
        return made | {f"{n} splits": program(site_of(shape, 1), replace(cut, splits=n)) for n in splits}
    return made | {f"1 of {n}": program(site_of(shape, n), tiles) for n in devices}


def measure(shape: str, made: Mapping[str, Program], rounds: int) -> dict[str, list[float]]:
    """Microseconds of one product in each round, by program.

    Raises:
      DhelixError: a result that should be right differs from cuBLAS's.
    """
    site, mesh = site_of(shape, 1), Mesh(np.array(jax.devices()[:1]), (AXIS,))
    count, operands = iterations(site, _TURN_MS), programs.operands(site, mesh)
    options = {"xla_gpu_enable_triton_gemm": False} if mesh.devices.flat[0].platform != "cpu" else {}
    turns = {}
    for name, it in made.items():
        loop = programs.lowered(it, site, mesh, count).compile(compiler_options=options)
        turns[name] = Turn(loop, *programs.arguments(it, site, mesh, operands))
    for turn in turns.values():
        turn.run()
    expected = turns["cuBLAS"].out.astype(jnp.float32)
    right = [name for name in turns if name == "no own tiles" or "splits" in name]
    if not all(programs.difference(expected, turns[name].out) <= programs.tolerance(site) for name in right):
        raise DhelixError(f"{shape}: the kernel's result is not cuBLAS's")
    us: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            us[name].append(1e6 * turn.run() / count)
    return us


def table(found: Mapping[str, Mapping[str, list[float]]]) -> str:
    """A Markdown table of medians in microseconds."""
    names = list(next(iter(found.values()), {}))
    lines = [f"| M x K x N | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for shape, us in found.items():
        lines.append(f"| {shape} | {' | '.join(f'{statistics.median(us[name]):.0f}' for name in names)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="of the local product, separated by commas")
    parser.add_argument("--devices", default="2,4,8", help="separated by commas")
    parser.add_argument("--splits", default="", help="blocks that share a contraction, separated by commas")
    parser.add_argument("--tiles", type=Tiles.parse, help="such as 128x256x64,steps=4,wide=M,group=8")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    arguments = parser.parse_args()
    devices, splits = ([int(n) for n in given.split(",") if n] for given in (arguments.devices, arguments.splits))
    found: dict[str, dict[str, list[float]]] = {}
    try:
        made = {shape: variants(shape, devices, splits, arguments.tiles) for shape in arguments.shapes.split(",")}
        without_graphs(os.environ)  # CUDA graphs must not hold these kernels
        if jax.devices()[0].platform not in ("gpu", "cuda"):
            raise DhelixError("there is no GPU: kernels need one of NVIDIA's Hopper GPUs")
        for shape, its in made.items():
            found[shape] = measure(shape, its, arguments.rounds)
            print(table({shape: found[shape]}), flush=True)
    except DhelixError as error:
        sys.exit(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "own_tiles.json"
    path.write_text(json.dumps({"on": asdict(provenance()), "us": found}, indent=1) + "\n")
    print(f"{table(found)}\n\nresults in {path}")


if __name__ == "__main__":
    main()
