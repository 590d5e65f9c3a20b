"""Seconds until the first step is done, with and without the decorator, with a cold and a warm compilation cache.

    python benchmarks/strands/first_step.py --out results.json              # on all GPUs, with two CPU cores

The step: Llama-8B shapes, 8 layers, sequence 4096, 4 micro-batches, TP over all GPUs. Each row is a new process. In
rows `off` (`DHELIX=off`), XLA alone compiles the same micro-batched step. The first process of each kind finds an empty
compilation cache; later ones find what it stored. A row has the seconds from the call of the step to its end, for the
first and the second step. The second step shows the time without compilation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_CORES = 2
_KINDS = ("off", "on")


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", help="JSON file")
    made.add_argument("--warm", type=int, default=2, help="processes of a kind that find a warm cache")
    made.add_argument("--preset", default="llama-8b")
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--seq", type=int, default=4096)
    made.add_argument("--child", help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.child:
        print(json.dumps(first_step(arguments)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1 + arguments.warm):
            for kind in _KINDS if number % 2 else reversed(_KINDS):
                row = {"dhelix": kind, "cache": "warm" if number else "cold"}
                rows.append(row | _process(kind, Path(folder) / kind, arguments))
                print(rows[-1], flush=True)
                if arguments.out:
                    Path(arguments.out).write_text(json.dumps(rows, indent=1) + "\n")


def _process(kind: str, cache: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    step = [f"--{name}={getattr(arguments, name)}" for name in ("preset", "layers", "seq")]
    command = [sys.executable, __file__, f"--child={cache}", *step]
    done = subprocess.run(command, env={**os.environ, "DHELIX": kind}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


def _cores() -> list[int]:
    """The first CPU cores, one hardware thread of each."""
    found: dict[str, int] = {}
    for number in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        found.setdefault(siblings.read_text() if siblings.is_file() else str(number), number)
    return list(found.values())[:_CORES]


def first_step(arguments: argparse.Namespace) -> dict[str, Any]:
    """Times the first two steps; runs in a new process."""
    os.sched_setaffinity(0, _cores())
    from itertools import islice

    import jax

    from dhelix.launch.train import trainer
    from dhelix.launch.train.options import Options
    from dhelix.passes.framework.headline import headline

    jax.config.update("jax_compilation_cache_dir", arguments.child)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    model = {"preset": arguments.preset, "layers": arguments.layers, "seq": arguments.seq}
    options = Options(**model, microbatches=4, mesh=f"dp=1,tp={jax.device_count()}")
    run = trainer.prepare(options)
    trainer.start(run)
    state, seconds = run.state, []
    jax.block_until_ready(state)
    for tokens in islice(run.batches.after(0), 2):
        start = time.perf_counter()
        state, metrics = run.step(state, tokens)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    said = headline(run.step.report(state, tokens))
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}, {_CORES} cores, jax {jax.__version__}"
    return {"first": seconds[0], "second": seconds[1], "said": said, "device": device}


if __name__ == "__main__":
    main()
