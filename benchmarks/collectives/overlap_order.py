"""Measures on one GPU how overlap depends on the order of operations inside a fused kernel (DistFuse, figure 4).

    python benchmarks/collectives/overlap_order.py --out benchmarks/results/overlap_order_h200.json

Two independent operations run in one Mosaic-GPU kernel for Hopper, with two blocks on each streaming multiprocessor
(section 3.2). TensorOps is a run of wgmma instructions on operands in shared memory. LdOps is a run of loads from
global memory. The numbers of instructions are chosen so that each operation alone takes the same time. There are six
ways to run them:

    tensor, loads     one of them alone                     block 0  TTTT      block 1  TTTT
    case 1            TensorOps before LdOps                block 0  TTTTLLLL  block 1  TTTTLLLL
    case 2            LdOps before TensorOps                block 0  LLLLTTTT  block 1  LLLLTTTT
    alternating       one block of an SM in either order    block 0  TTTTLLLL  block 1  LLLLTTTT
    split             a warpgroup for each operation        block 0  TTTT      block 1  TTTT
                                                                     LLLL               LLLL

The hidden share is the fraction of the shorter operation that is hidden. It is 1 if both together take as long as the
longer one alone, and 0 if they take as long as one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from dhelix.runtime.profiling.provenance import provenance

ALONE = ("tensor", "loads")
TOGETHER = ("case 1", "case 2", "alternating", "split")
_ROWS, _COLUMNS, _DEPTH = 64, 128, 64  # sizes of one step's product
_PIECE = (16, 256)  # elements that a warpgroup loads at once: 8 KiB
_PIECES = 2  # loads in one step
_STEP_BYTES = 2 * _PIECES * _PIECE[0] * _PIECE[1]
_MOST = 6e12  # bytes per second, more than any GPU loads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of results")
    parser.add_argument("--us", type=float, default=300.0, help="what each operation alone shall take")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit("overlap_order.py runs on a Hopper GPU, and JAX has none here")
    record = measure(arguments.us, arguments.rounds)
    print(table(record))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1) + os.linesep)


def measure(us: float, rounds: int) -> dict[str, Any]:
    """Measures all six ways. Returns median microseconds of `rounds` turns, hidden shares, and the provenance."""
    sms = jax.devices()[0].core_count
    most_steps = round(us * 1e-6 * _MOST / (2 * sms * _STEP_BYTES))
    data = jax.random.normal(jax.random.key(0), (2 * sms * _PIECES * most_steps, *_PIECE), jnp.bfloat16)
    ways = {name: program(name, sms) for name in (*ALONE, *TOGETHER)}
    steps = {"tensor": 500, "loads": most_steps}
    for _ in range(3):  # adjust the steps until both take `us` alone
        took = {name: seconds(ways[name], data, steps) * 1e6 for name in ALONE}
        steps = {name: max(1, round(steps[name] * us / took[name])) for name in ALONE}
        steps["loads"] = min(steps["loads"], most_steps)
    turns = [{name: seconds(way, data, steps) * 1e6 for name, way in ways.items()} for _ in range(rounds)]
    times = {name: statistics.median(turn[name] for turn in turns) for name in ways}
    flops = 2 * sms * steps["tensor"] * 2 * _ROWS * _COLUMNS * _DEPTH
    loaded = 2 * sms * steps["loads"] * _STEP_BYTES
    return {
        "on": asdict(provenance()),
        "steps": steps,
        "teraflops": flops / times["tensor"] * 1e-6,
        "gigabytes_per_second": loaded / times["loads"] * 1e-3,
        "us": times,
        "spread_us": {name: max(t[name] for t in turns) - min(t[name] for t in turns) for name in ways},
        "hidden": {name: hidden(times, name) for name in TOGETHER},
    }


def hidden(times: dict[str, float], name: str) -> float:
    """The fraction of the shorter operation that is hidden if both run in the way `name`."""
    alone = [times[each] for each in ALONE]
    return (sum(alone) - times[name]) / min(alone)


def table(record: dict[str, Any]) -> str:
    lines = [f"{'':12}{'us':>8}{'hidden':>8}"]
    for name, us in record["us"].items():
        share = f"{record['hidden'][name]:8.2f}" if name in record["hidden"] else ""
        lines.append(f"{name:12}{us:8.1f}{share}")
    return "\n".join(lines)


def seconds(run: Callable[..., Any], data: jax.Array, steps: dict[str, int], calls: int = 20) -> float:
    """Seconds of one call, averaged over `calls` in a row."""
    counts = jnp.asarray([steps["tensor"], steps["loads"]], jnp.int32)
    jax.block_until_ready(run(data, counts))
    start = time.perf_counter()
    jax.block_until_ready([run(data, counts) for _ in range(calls)])
    return (time.perf_counter() - start) / calls


def program(name: str, sms: int) -> Callable[..., Any]:
    """The jitted kernel for one way: (data [n, 16, 256], numbers of steps [2]) -> results of both operations.

    Args:
      name: one of ALONE or TOGETHER.
      sms: streaming multiprocessors of the GPU.
    """
    blocks, layout = 2 * sms, plgpu.Layout.WG_STRIDED(_PIECE, vec_size=8)

    def overlap_order(data: Any, steps: Any, products: Any, sums: Any, a: Any, b: Any, ready: Any) -> None:
        block, group = lax.axis_index("block"), lax.axis_index("group")

        def tensor_ops() -> None:
            for piece in range(_ROWS // _PIECE[0]):  # not zeros, which would save power
                rows = pl.ds(piece * _PIECE[0], _PIECE[0])
                plgpu.copy_gmem_to_smem(data.at[piece, :, pl.ds(0, _DEPTH)], a.at[rows], ready)
                plgpu.copy_gmem_to_smem(data.at[piece, :, pl.ds(_DEPTH, _COLUMNS)], b.at[rows], ready)
            plgpu.barrier_wait(ready)

            def multiply(total: Any) -> jax.Array:
                @pl.loop(0, steps[0])
                def _(step: jax.Array) -> None:
                    plgpu.wgmma(total, a, b)
                    plgpu.wgmma_wait(1)

                return total[...]

            total = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((_ROWS, _COLUMNS), jnp.float32))
            products.at[block][...] = total

        def load_ops() -> None:
            def add(step: jax.Array, total: jax.Array) -> jax.Array:
                first = (block + step * blocks) * _PIECES
                pieces = [plgpu.load(data.at[first + i], layout=layout, optimized=False) for i in range(_PIECES)]
                for piece in pieces:
                    total += piece.astype(jnp.float32)
                return total

            zeros = plgpu.layout_cast(jnp.zeros(_PIECE, jnp.float32), layout)
            sums.at[block][...] = lax.fori_loop(0, steps[1], add, zeros)

        first_on_sm = block < sms
        if name == "split":
            pl.when(group == 0)(tensor_ops)
            pl.when(group == 1)(load_ops)
        elif name == "alternating":
            pl.when(first_on_sm)(tensor_ops)
            load_ops()
            pl.when(block >= sms)(tensor_ops)
        else:
            for operation in {
                "tensor": [tensor_ops],
                "loads": [load_ops],
                "case 1": [tensor_ops, load_ops],
                "case 2": [load_ops, tensor_ops],
            }[name]:
                operation()

    made: Any = plgpu  # these classes are abstract to type checkers
    swizzled = made.TilingTransform((8, 64)), made.SwizzleTransform(128)
    call = plgpu.kernel(
        overlap_order,
        out_type=(
            jax.ShapeDtypeStruct((blocks, _ROWS, _COLUMNS), jnp.float32),
            jax.ShapeDtypeStruct((blocks, *_PIECE), jnp.float32),
        ),
        scratch_types=[
            plgpu.SMEM((_ROWS, _DEPTH), jnp.bfloat16, transforms=swizzled),
            plgpu.SMEM((_DEPTH, _COLUMNS), jnp.bfloat16, transforms=swizzled),
            plgpu.Barrier(num_arrivals=2 * _ROWS // _PIECE[0]),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=2 if name == "split" else 1,
        thread_name="group",
    )
    return jax.jit(call)


if __name__ == "__main__":
    main()
