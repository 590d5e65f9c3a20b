"""Context-parallel attention over all GPUs against whole attention on one GPU: its speed and its numbers.

    python benchmarks/models/ring_attention.py --seq 32768 --out DIR        # two or more GPUs

Both take cuDNN's kernels, forward and with gradients. The share of perfect scaling is the time of one GPU, divided by
the number of GPUs and by their time. The errors are those of the context-parallel results in bfloat16, each relative to
the largest magnitude of the whole attention's results.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dhelix.models import make_mesh
from dhelix.models.common.context_parallel import EXCHANGES, Context, Exchange
from dhelix.runtime.profiling.provenance import provenance

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama-8B


def whole(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def over_gpus(exchange: Exchange) -> Callable[..., jax.Array]:
    """Attention of global arrays whose sequence is split over all GPUs, in zigzag order."""
    count = len(jax.devices())
    context, spec = Context(count, exchange), PartitionSpec(None, "cp")

    def local(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return context.attention(query, key, value, None, "cudnn")

    mesh = make_mesh(1, 1, cp=count)
    return jax.shard_map(local, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)


def with_gradients(attention: Callable[..., jax.Array]) -> Callable[..., Any]:
    def both(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> Any:
        out, transpose = jax.vjp(attention, query, key, value)
        return out, *transpose(cotangent)

    return both


def timed(function: Callable[..., Any], arguments: tuple[jax.Array, ...], runs: int, each: int) -> tuple[float, Any]:
    """The median over `runs` of the mean milliseconds of `each` calls, and the results of one call."""
    compiled = jax.jit(function).lower(*arguments).compile()
    results = jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready([compiled(*arguments) for _ in range(each)])
        times.append((time.perf_counter() - start) / each)
    return 1e3 * statistics.median(times), results


def zigzag(seq: int, count: int) -> np.ndarray:
    """The positions of a sequence in the order in which the devices hold them."""
    chunks = np.arange(seq).reshape(2 * count, -1)
    return np.concatenate([chunks[[device, 2 * count - 1 - device]].ravel() for device in range(count)])


def error(found: jax.Array, expected: np.ndarray) -> float:
    difference = np.abs(np.asarray(found, np.float32) - expected)
    return float(difference.max() / np.abs(expected).max())


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seq", type=int, default=32768)
    made.add_argument("--runs", type=int, default=7)
    made.add_argument("--out", type=Path, default=Path("benchmark-output"))
    options = made.parse_args()
    devices, order = jax.devices(), zigzag(options.seq, len(jax.devices()))
    random = np.random.default_rng(0)
    heads = {"query": HEADS, "key": KV_HEADS, "value": KV_HEADS, "cotangent": HEADS}
    drawn = [random.standard_normal((1, options.seq, n, HEAD_DIM), np.float32) for n in heads.values()]
    one = tuple(jax.device_put(jnp.asarray(x, jnp.bfloat16), devices[0]) for x in drawn)
    split = NamedSharding(make_mesh(1, 1, cp=len(devices)), PartitionSpec(None, "cp"))
    each = tuple(jax.device_put(jnp.asarray(x[:, order], jnp.bfloat16), split) for x in drawn)
    rows = []
    for what, count, of in (("forward", 3, lambda f: f), ("forward and backward", 4, with_gradients)):
        run = functools.partial(timed, runs=options.runs, each=3)
        alone, results = run(of(whole), one[:count])
        expected = [np.asarray(x, np.float32)[:, order] for x in jax.tree.leaves(results)]
        for exchange in EXCHANGES:
            milliseconds, found = run(of(over_gpus(exchange)), each[:count])
            rows.append({
                "what": what,
                "keys and values": exchange,
                "one GPU, ms": alone,
                f"{len(devices)} GPUs, ms": milliseconds,
                "share of perfect scaling": alone / len(devices) / milliseconds,
                "largest error": max(error(*pair) for pair in zip(jax.tree.leaves(found), expected, strict=True)),
            })  # fmt: skip
            print(rows[-1], flush=True)
    on = provenance()
    shape = {"sequence": options.seq, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "runs": options.runs}
    facts = {"gpus": f"{len(devices)} x {on.gpu}", "driver": on.driver, "jax": on.jax, "nccl": on.nccl, "date": on.date}
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"on": facts, "shape": shape, "rows": rows}
    Path(options.out, "ring_attention.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
