"""Finds NCCL's fastest setting for a link: times of collectives, alone and next to matrix products.

    NCCL_P2P_DISABLE=1 CUDA_DEVICE_MAX_CONNECTIONS=1 python benchmarks/collectives/nccl_settings.py --out DIR  # all
    NCCL_P2P_DISABLE=1 python benchmarks/collectives/nccl_settings.py --settings "small buffers; locality 1" --out DIR

NCCL reads its settings once, so each setting runs in a new process. The environment variables of the setting are added
to this process's environment. All GPUs of the machine take part. Arrays are bf16 with hidden size 4096, as in a layer
of 8192 tokens. The script times these operations:

- an all-gather whose result has 64 MiB on each GPU;
- a reduce-scatter whose operand has 64 MiB on each GPU;
- a collective-permute and an all-to-all of 32 MiB;
- two matrix products on each GPU;
- the all-gather, and the reduce-scatter, beside these products: the time until both are done.

Each operation is a loop of 16 iterations in one program. Each iteration depends on a row of the previous result. Times
are medians of five calls, per iteration.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.benchmarks.strands.variants import chosen
from dhelix.errors import DhelixError
from dhelix.profiles import profile
from dhelix.runtime.profiling.provenance import provenance

_SMALL = profile.SETTINGS["small-buffers"].environment
_COPIES = {"NCCL_SHM_USE_CUDA_MEMCPY": "1"}


def _small(**others: int) -> dict[str, str]:
    return {**_SMALL, **{f"NCCL_{name}": str(value) for name, value in others.items()}}


SETTINGS: Mapping[str, Mapping[str, str]] = {
    "as started": {},
    "small buffers": _SMALL,
    "locality 1": _small(SHM_LOCALITY=1),
    "128 KiB": _small(BUFFSIZE=131072),
    "512 KiB": _small(BUFFSIZE=524288),
    "128 KiB, 32 channels": _small(BUFFSIZE=131072, MIN_NCHANNELS=32),
    "512 KiB, 8 channels": _small(BUFFSIZE=524288, MIN_NCHANNELS=8),
    "24 channels": _small(MIN_NCHANNELS=24),
    "32 channels": _small(MIN_NCHANNELS=32),
    "64 KiB, 32 channels": _small(BUFFSIZE=65536, MIN_NCHANNELS=32),
    "256 threads": _small(NTHREADS=256),
    "sender copies": {**_COPIES, "NCCL_SHM_MEMCPY_MODE": "1"},
    "both copy": {**_COPIES, "NCCL_SHM_MEMCPY_MODE": "3"},
    "both copy, 8 channels": {**_COPIES, "NCCL_SHM_MEMCPY_MODE": "3", **_small(BUFFSIZE=4194304, MIN_NCHANNELS=8)},
    "both copy, 8 MiB, 4 channels": {
        **_COPIES, "NCCL_SHM_MEMCPY_MODE": "3", **_small(BUFFSIZE=8388608, MIN_NCHANNELS=4)
    },
    "LL128": _small() | {"NCCL_PROTO": "LL128"},
    "chunks of 512 KiB": {"NCCL_P2P_PCI_CHUNKSIZE": "524288"},
}  # fmt: skip
"""Settings to try for GPUs that communicate through host memory. In "copies" and "copy" settings, copy engines copy."""

ROWS, WIDTH, ROUNDS, CALLS = 8192, 4096, 16, 5


def measure(rows: int = ROWS, width: int = WIDTH) -> dict[str, float]:
    """Microseconds of each operation on all devices of this process."""
    n = len(jax.devices())
    mesh = Mesh(jax.devices(), ("x",))

    def array(height: int, spec: P, value: float = 1.0) -> jax.Array:
        return jax.device_put(jnp.full((height, width), value, jnp.bfloat16), NamedSharding(mesh, spec))

    whole, part, half = array(n * rows, P("x")), array(rows, P("x")), array(n * rows // 2, P("x"))
    x, w = array(rows, P()), array(width, P(), 0.01)

    def products(operand: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        return x.at[0, 0].set(operand[0, 0]) @ w @ w

    def gather(operand: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.all_gather(operand, "x", tiled=True)

    def scatter(operand: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum_scatter(operand, "x", tiled=True)

    def permute(operand: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.ppermute(operand, "x", [(i, (i + 1) % n) for i in range(n)])

    def exchange(operand: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.all_to_all(operand, "x", 0, 0, tiled=True)

    def both(one: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
        return lambda *operands: (one(*operands), products(*operands))

    def timed(operation: Callable[..., Any], operand: jax.Array) -> float:
        def body(operand: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
            def one_round(_: jax.Array, operand: jax.Array) -> jax.Array:
                results = jax.tree.leaves(operation(operand, x, w))
                return operand.at[0].add(sum(result[0] * 0.001 for result in results))

            return lax.fori_loop(0, ROUNDS, one_round, operand)[:1]

        run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"), check_vma=False))
        jax.block_until_ready(run(operand, x, w))
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            jax.block_until_ready(run(operand, x, w))
            times.append((time.perf_counter() - start) / ROUNDS)
        return round(1e6 * statistics.median(times), 1)

    return {
        "all-gather": timed(gather, part),
        "reduce-scatter": timed(scatter, whole),
        "collective-permute": timed(permute, half),
        "all-to-all": timed(exchange, half),
        "products": timed(products, part),
        "all-gather beside products": timed(both(gather), part),
        "reduce-scatter beside products": timed(both(scatter), whole),
    }


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """A Markdown table in microseconds."""
    names = list(next(iter(found.values()), {}))
    lines = [f"| setting | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(f'{times[n]:.0f}' for n in names)} |" for name, times in found.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default="; ".join(SETTINGS), help="separated by `;`")
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps({"on": asdict(provenance()), "us": measure()}))
        return
    try:
        names = chosen(arguments.settings, SETTINGS, "setting")
    except DhelixError as error:
        sys.exit(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, float]] = {}
    for name in names:
        command = [sys.executable, __file__, "--worker"]
        done = subprocess.run(command, env={**os.environ, **SETTINGS[name]}, capture_output=True, text=True)
        if done.returncode:
            print(f"{name}: {done.stderr.strip()[-500:]}", file=sys.stderr, flush=True)
            continue
        record = json.loads(done.stdout.splitlines()[-1])
        found[name] = record["us"]
        results = {"on": record["on"], "us": found}
        (arguments.out / "nccl_settings.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
