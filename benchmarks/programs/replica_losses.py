"""Times steps with replicated parameters under several losses, with XLA alone and with dhelix.

    python benchmarks/programs/replica_losses.py --out results.json              # in this process's launch setting

For most of these losses, the gradient of a layer's weight is more than one matrix product. The model has eight layers
of two matrices (width 4096, hidden 8192, sequence 2048, bfloat16, rematerialized, SGD, four micro-batches). XLA's
partitioner makes the data parallelism over all GPUs. For each loss, three programs take turns: XLA's with default
options, XLA's with pipelined collectives, and dhelix's. Times are medians of the timed steps. The losses of the first
and the last step are recorded, too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix import strand_interleave, value_and_grad
from dhelix.passes.framework.headline import headline

_WIDTH, _HIDDEN, _LAYERS, _LENGTH, _MICROBATCHES = 4096, 8192, 8, 2048, 4
_PIPELINED = {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in ("all_gather", "all_reduce")}


def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None


def layers(x: jax.Array, w: Any) -> jax.Array:
    return jax.lax.scan(jax.checkpoint(layer), x, w)[0]


def mean_square(x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def plain(w: Any, x: jax.Array) -> jax.Array:
    return mean_square(layers(x, w))


def decayed(w: Any, x: jax.Array) -> jax.Array:
    return plain(w, x) + 1e-4 * sum(mean_square(leaf) * leaf.size for leaf in jax.tree.leaves(w))


def twice(w: Any, x: jax.Array) -> jax.Array:
    return mean_square(layers(layers(x, w), w))


def grouped(w: Any, x: jax.Array) -> jax.Array:
    groups = jax.tree.map(lambda leaf: leaf.reshape(_LAYERS // 2, 2, *leaf.shape[1:]), w)
    return mean_square(jax.lax.scan(jax.checkpoint(lambda x, w: (layers(x, w), None)), x, groups)[0])


def positive(w: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(x[:, :, 0] > 0)


LOSSES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "mean": (plain, {}),
    "weighted mean": (plain, {"weights": positive}),
    "weight decay in the loss": (decayed, {}),
    "layers applied twice": (twice, {}),
    "checkpointed groups of two layers": (grouped, {}),
}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", help="JSON file")
    made.add_argument("--rounds", type=int, default=4, help="in which each program takes three steps")
    arguments = made.parse_args()
    mesh = Mesh(np.array(jax.devices()), "dp")
    found = {"device": jax.devices()[0].device_kind, "gpus": mesh.size, "jax": jax.__version__, "link": _link()}
    found["losses"] = {name: compare(mesh, *LOSSES[name], arguments.rounds) for name in LOSSES}
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n")


def _link() -> str:
    return "no-p2p" if os.environ.get("NCCL_P2P_DISABLE") == "1" else "nvlink"


def compare(mesh: Mesh, loss: Callable[..., Any], options: dict[str, Any], rounds: int) -> dict[str, Any]:
    def step(w: Any, x: jax.Array) -> Any:
        value, grads = value_and_grad(loss, **options)(w, x)
        return jax.tree.map(lambda p, g: p - (0.01 * g).astype(p.dtype), w, grads), value

    made = {"microbatches": _MICROBATCHES, "reduce": "weighted" if options else "mean", "donate_argnums": 0}
    programs = {
        "plain": strand_interleave(step, passes=(), **made),
        "plain, pipelined collectives": strand_interleave(step, passes=(), compiler_options=_PIPELINED, **made),
        "strands": strand_interleave(step, **made),
    }
    random = np.random.default_rng(0)

    def weights(*size: int) -> jax.Array:
        found = (0.01 * random.standard_normal(size, dtype=np.float32)).astype(jnp.bfloat16)
        return jax.device_put(found, NamedSharding(mesh, P()))

    w = {"up": weights(_LAYERS, _WIDTH, _HIDDEN), "down": weights(_LAYERS, _HIDDEN, _WIDTH)}
    rows = random.standard_normal((2 * _MICROBATCHES * mesh.size, _LENGTH, _WIDTH), dtype=np.float32)
    x = jax.device_put(rows.astype(jnp.bfloat16), NamedSharding(mesh, P("dp")))
    states = {name: jax.tree.map(jnp.copy, w) for name in programs}
    times: dict[str, list[float]] = {name: [] for name in programs}
    losses: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(1 + rounds):
        for name, run in programs.items():
            for _ in range(3 if number else 1):  # round 0 compiles
                start = time.perf_counter()
                states[name], value = run(states[name], x)
                jax.block_until_ready(states[name])
                times[name] += [time.perf_counter() - start] if number else []
                losses[name].append(float(value))
    report = programs["strands"].report(states["strands"], x)
    medians = {name: float(np.median(seconds)) for name, seconds in times.items()}
    best = min(seconds for name, seconds in medians.items() if name != "strands")
    print({name: f"{1e3 * seconds:.1f} ms" for name, seconds in medians.items()}, f"{best / medians['strands']:.3f} x")
    print("\n  ".join(headline(report)), flush=True)
    return {
        "seconds": times,
        "medians": medians,
        "faster": best / medians["strands"],
        "losses": {name: [values[0], values[-1]] for name, values in losses.items()},
        "headline": headline(report),
    }


if __name__ == "__main__":
    main()
