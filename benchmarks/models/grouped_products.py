"""Grouped products of tokamax against batched products over rows of fixed capacity, at the sizes of Phi-MoE's experts.

    python benchmarks/models/grouped_products.py --out DIR         # needs tokamax 0.0.17 and one Hopper GPU

A batched product computes all rows of an expert, also the empty ones. A grouped product computes the rows that tokens
take. Both multiply the same tokens here: a balanced load, and one whose largest expert has twice the mean.
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
import tokamax  # pyright: ignore[reportMissingImports]

from dhelix.runtime.profiling.provenance import provenance

EXPERTS, TOKENS, CAPACITY, HIDDEN, FFN = 8, 8192, 1280, 4096, 6400  # of one device: EP 2, S 4096, capacity factor 1.25
LOADS = {"balanced": [1024] * 8, "unbalanced": [2048, 1536, 1280, 1024, 832, 640, 512, 320]}


def batched(rows: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.einsum("erh,ehf->erf", rows, weights)


def with_gradients(forward: Callable[..., jax.Array]) -> Callable[..., Any]:
    def loss(rows: jax.Array, weights: jax.Array, *more: jax.Array) -> jax.Array:
        return jnp.sum(forward(rows, weights, *more).astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1))


def milliseconds(function: Callable[..., Any], *arguments: jax.Array, runs: int = 9, each: int = 10) -> float:
    """The median over `runs` of the mean time of `each` calls."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready([compiled(*arguments) for _ in range(each)][-1])
        times.append((time.perf_counter() - start) / each)
    return 1e3 * statistics.median(times)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path("benchmark-output"))
    out = made.parse_args().out
    random = np.random.default_rng(0)
    draw = functools.partial(random.standard_normal, dtype=np.float32)
    weights = jnp.asarray(draw((EXPERTS, HIDDEN, FFN)), jnp.bfloat16)
    full = jnp.asarray(draw((EXPERTS, CAPACITY, HIDDEN)), jnp.bfloat16)
    tokens = jnp.asarray(draw((TOKENS, HIDDEN)), jnp.bfloat16)
    found: dict[str, dict[str, float]] = {}

    def add(kind: str, load: str, forward: Callable[..., jax.Array], *arguments: jax.Array) -> None:
        times = {"forward, ms": forward, "gradients, ms": with_gradients(forward)}
        found[f"{kind}, {load}"] = {name: milliseconds(function, *arguments) for name, function in times.items()}

    add("batched", "capacity factor 1.25", batched, full, weights)
    for load, sizes in LOADS.items():
        forward = functools.partial(tokamax.ragged_dot, implementation="mosaic")
        add("tokamax", load, forward, tokens, weights, jnp.asarray(sizes, jnp.int32))
    on = provenance()
    report = {
        "on": {"gpu": on.gpu, "driver": on.driver, "jax": on.jax, "date": on.date},
        "products of the experts of one GPU": found,
    }
    out.mkdir(parents=True, exist_ok=True)
    Path(out, "grouped_products.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
