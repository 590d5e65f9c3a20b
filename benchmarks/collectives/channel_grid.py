"""Measures contention on GPUs: overlaps under a grid of channels and chunks, and how well the channel model fits.

    NCCL_P2P_DISABLE=1 python benchmarks/collectives/channel_grid.py --out benchmarks/results/channel_grid_no_p2p.json

The overlaps are those of Lagom's section 3.2, 3.3 and 4.3, for the GPUs at hand:

    ffn          an all-reduce of 32 MiB beside a feed-forward layer (figure 3)
    h plot       2 all-reduces of 32 MiB beside 7 matrix products (figure 5)
    pattern 1    an all-gather of a Phi-2 layer's weights beside the products of the layer before (FSDP, forward)
    pattern 2    a reduce-scatter and an all-gather of them beside the products of a backward pass (FSDP)

All collectives of an overlap start with its computation (`early_starts.py`).

Chunks follow from the size of NCCL's buffers, which a process reads once: ring and Simple move half of a buffer at a
time. So each chunk has a process of its own, and the tuner plugin sets channels in it. With several collectives, one of
them also has other channels than the rest. The channel model is then fitted, and its errors on settings that it was not
fitted to are reported (`channel_fits.py`). This needs no GPU, so a result file can be fitted again:

    python benchmarks/collectives/channel_grid.py --refit --out benchmarks/results/channel_grid_no_p2p.json

From NCCL 2.30 on, a plugin also sets the chunk of each call. With `--own_chunks`, one process measures all chunks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.benchmarks.collectives.channel_fits import fitted, markdown
from dhelix.benchmarks.collectives.early_starts import EarlyStarts
from dhelix.profiles.channels.nccl_setting import NcclSetting
from dhelix.profiles.hardware import gpu_name
from dhelix.runtime.processes.launch_settings import link_of, target_of
from dhelix.runtime.profiling.provenance import provenance
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.runtime.tuning import plugin
from dhelix.runtime.tuning.trials import StepTrials

CHANNELS = (1, 2, 4, 8, 16, 24)
BUFFERS = (262144, 1048576, 4194304, 8388608)
"""Sizes of NCCL's buffers in bytes; the third is NCCL's own."""

MIB = 1 << 20
ROWS, HIDDEN, PHI_2 = 4096, 4096, 2560
ROUNDS = 4

type Program = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]


def programs(mesh: Mesh) -> dict[str, Program]:
    """The overlaps as functions for `jax.jit`, and their arguments."""
    n = mesh.size

    def array(spec: P, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def chain(x: jax.Array, w: jax.Array, count: int) -> jax.Array:
        for _ in range(count):
            x = jnp.tanh(x @ w)
        return x

    def reduced(*parts: jax.Array) -> list[jax.Array]:
        return [lax.psum(part, "x") for part in parts]

    def ffn(x: jax.Array, w: jax.Array, a: jax.Array) -> tuple[Any, ...]:
        return chain(x, w, 3), reduced(a)

    def h_plot(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array) -> tuple[Any, ...]:
        return chain(x, w, 7), reduced(a, b)

    def forward(x: jax.Array, w: jax.Array, part: jax.Array) -> tuple[Any, ...]:
        return chain(x, w, 12), lax.all_gather(part, "x", tiled=True)

    def backward(x: jax.Array, w: jax.Array, gradient: jax.Array, part: jax.Array) -> tuple[Any, ...]:
        scattered = lax.psum_scatter(gradient, "x", tiled=True)
        return chain(x, w, 24), scattered, lax.all_gather(part, "x", tiled=True)

    def rounds(overlap: Callable[..., tuple[Any, ...]]) -> Callable[..., jax.Array]:
        """Several overlaps, one after the other: each waits for all results of the one before."""

        def one(_: jax.Array, operands: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            results = jax.tree.leaves(overlap(*operands))
            seen = jnp.sum(jnp.stack([result.ravel()[0].astype(jnp.float32) for result in results])) * 1e-6
            return tuple(o.at[(0,) * o.ndim].add(seen.astype(o.dtype)) for o in operands)

        return lambda *operands: lax.fori_loop(0, ROUNDS, one, operands)

    weights = 12 * PHI_2 * PHI_2
    whole, part = array(P("x"), n * weights), array(P("x"), weights)  # the parts of all devices, one after the other
    x, w = array(P("x"), n * ROWS, HIDDEN), array(P(), HIDDEN, HIDDEN)
    y, v = array(P("x"), n * ROWS, PHI_2), array(P(), PHI_2, PHI_2)
    message = array(P("x"), n * 16 * MIB)
    shapes = {
        "ffn": (ffn, (x, w, message)),
        "h plot": (h_plot, (x, w, message, message)),
        "pattern 1": (forward, (y, v, part)),
        "pattern 2": (backward, (y, v, whole, part)),
    }
    found: dict[str, Program] = {}
    for name, (overlap, arguments) in shapes.items():
        specs = tuple(argument.sharding.spec for argument in arguments)
        mapped = jax.shard_map(rounds(overlap), mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
        mapped.__name__ = name.replace(" ", "_")  # type: ignore[attr-defined]
        found[name] = mapped, arguments
    return found


def measure(name: str, program: Program, chunk: int, own: Sequence[int]) -> dict[str, Any]:
    """The times of an overlap under all channels, with the chunk of this process, or with each of `own`."""
    function, shapes = program
    arguments = tuple(jax.device_put(np.full(s.shape, 0.01, s.dtype), s.sharding) for s in shapes)
    target = target_of(gpu_name(jax.devices()[0].device_kind), link_of(os.environ), len(jax.devices()))
    step = strand_interleave(function, passes=(EarlyStarts(),), strict=True)
    trials = StepTrials(step.lower(*shapes), arguments, target)
    if trials.surprise:
        raise SystemExit(f"{name}: {trials.surprise}")
    (body, *_) = trials.bodies()
    rows = []
    for size, channels in itertools.product(own or (0,), settings(len(body.collectives))):
        chosen = {
            identity: NcclSetting("ring", "simple", each, size)
            for identity, each in zip(body.collectives, channels, strict=True)
        }
        times = trials.times([body], chosen)[body.fingerprint]
        rows.append({"channels": list(channels), "chunk": size or chunk, **asdict(times)})
    waves = [wave if math.isfinite(wave) else None for wave in body.overlap.waves]
    alone = asdict(body.default)
    return {"overlap": name, "volumes": body.overlap.volumes, "waves": waves, "sms": body.overlap.sms,
            "collectives": [list(identity) for identity in body.collectives], "default": alone,
            "rows": rows}  # fmt: skip


def settings(collectives: int) -> list[tuple[int, ...]]:
    """Channels of each collective: equal ones, and one that differs from the others."""
    equal = [(channels,) * collectives for channels in CHANNELS]
    apart = [
        tuple(channels if j == one else CHANNELS[0] for j in range(collectives))
        for one in range(collectives)
        for channels in CHANNELS[1:]
    ]
    return [*equal, *(apart if collectives > 1 else ())]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--overlaps", default="", help="names, separated by commas; all if not given")
    parser.add_argument("--refit", action="store_true", help="fit the model again to what the file holds; needs no GPU")
    parser.add_argument("--measure_only", action="store_true", help="leave the fits to --refit")
    parser.add_argument("--own_chunks", action="store_true", help="let the plugin set chunks; needs NCCL 2.30")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        plugin.install()
        every = programs(Mesh(np.array(jax.devices()), ("x",)))
        names = [name for name in options.overlaps.split(",") if name] or list(every)
        own = [buffer // 2 for buffer in BUFFERS] if options.own_chunks else []
        parts = [measure(name, every[name], options.worker // 2, own) for name in names]
        print(json.dumps({"on": asdict(provenance()), "parts": parts}))
        return
    if options.refit:
        record = json.loads(options.out.read_text())
        _write(options.out, record["on"], record["parts"])
        return
    found: dict[str, list[Any]] = {}
    for buffer in BUFFERS[-1:] if options.own_chunks else BUFFERS:
        command = [sys.executable, __file__, f"--worker={buffer}", f"--overlaps={options.overlaps}", "--out=-"]
        command += ["--own_chunks"] if options.own_chunks else []
        environment = {**os.environ, "NCCL_BUFFSIZE": str(buffer)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(f"buffers of {buffer} bytes: {done.stderr.strip()[-800:]}", file=sys.stderr, flush=True)
            continue
        record = json.loads(done.stdout.splitlines()[-1])
        for part in record["parts"]:
            found.setdefault(part["overlap"], []).append(part)
        options.out.write_text(json.dumps({"on": record["on"], "parts": found}, indent=1) + "\n")
    if found and not options.measure_only:
        _write(options.out, record["on"], found)


def _write(path: Path, on: dict[str, Any], parts: dict[str, list[Any]]) -> None:
    """Writes a result file with the fits of its parts, and prints their tables."""
    fits = {name: fitted(each) for name, each in parts.items()}
    path.write_text(json.dumps({"on": on, "parts": parts, "fits": fits}, indent=1) + "\n")
    print(markdown({"fits": fits}))


if __name__ == "__main__":
    main()
