"""Measures how long a GPU keeps its full clock: times of single products after a rest, for bursts of several lengths.

    python benchmarks/collectives/bursts.py > bursts.txt

A GPU's power is limited, and dense products need more than the limit. The script shows when the GPU slows down, by how
much, and how long a rest must be to restore its clock. `dhelix profile` measures products accordingly
(docs/design/profiling.md). Products are 8192 x 4096 x 7168 and back, in bf16. Their power depends on the numbers, so
two kinds of numbers are measured.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dhelix.runtime.profiling.traces import executions

_ROWS, _WIDTH, _FFN = 8192, 4096, 7168
_LONG = 400  # pairs of products, about half a second
_EDGES_MS = (0, 2, 4, 6, 8, 10, 15, 20, 30, 40, 60, 80, 120, 160, 240, 320, 400, 500)
_BURSTS = ((4, 20), (4, 50), (8, 20), (8, 50), (8, 100), (16, 50), (16, 100), (32, 100), (32, 200), (64, 200))
_REPEATS = 12
_SHORTEST = 3e-4  # seconds; shorter events are not products


def products(pairs: int) -> Callable[..., jax.Array]:
    """A jitted chain of `pairs` pairs of products."""

    def chain(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return lax.scan(lambda y, _: ((y @ up) @ down, None), x, None, length=pairs)[0]

    chain.__name__ = f"products{pairs}"
    return jax.jit(chain)


def times(run: Callable[[], Any], pairs: int) -> list[tuple[float, float]]:
    """Starts and durations, in seconds, of all products on the first GPU while `run` runs."""
    found = executions.record(run, f"jit_products{pairs}")
    return [(e.start, e.seconds) for e in found[min(found)] if e.seconds > _SHORTEST]


def show(numbers: str, arguments: tuple[jax.Array, ...]) -> None:
    chain = products(_LONG)
    jax.block_until_ready(chain(*arguments))
    time.sleep(2.0)
    found = times(lambda: jax.block_until_ready(chain(*arguments)), _LONG)
    for low, high in itertools.pairwise(_EDGES_MS):
        some = [seconds for start, seconds in found if low <= 1e3 * (start - found[0][0]) < high]
        if some:
            print(f"{numbers}, {low} to {high} ms after a rest: {1e6 * statistics.median(some):.1f} us", flush=True)
    for pairs, rest_ms in _BURSTS:
        chain = products(pairs)
        jax.block_until_ready(chain(*arguments))

        def bursts(chain: Callable[..., jax.Array] = chain, rest_ms: int = rest_ms) -> None:
            for _ in range(_REPEATS):
                jax.block_until_ready(chain(*arguments))
                time.sleep(rest_ms / 1e3)

        seconds = [seconds for _, seconds in times(bursts, pairs)]
        told = f"{numbers}, bursts of {2 * pairs} products, {rest_ms} ms of rest"
        print(f"{told}: {1e6 * statistics.median(seconds):.1f} us, longest {1e6 * max(seconds):.1f}", flush=True)


def main() -> None:
    def matrix(seed: int, rows: int, columns: int, normal: float) -> jax.Array:
        key = jax.random.key(seed)
        if normal:
            return (normal * jax.random.normal(key, (rows, columns))).astype(jnp.bfloat16)
        return jax.random.uniform(key, (rows, columns), minval=-0.125, maxval=0.125).astype(jnp.bfloat16)

    for numbers, normal in (("between -1/8 and 1/8", 0.0), ("normal", 0.02)):
        sizes = ((_ROWS, _WIDTH), (_WIDTH, _FFN), (_FFN, _WIDTH))
        show(numbers, tuple(matrix(seed, *size, normal) for seed, size in enumerate(sizes)))


if __name__ == "__main__":
    main()
