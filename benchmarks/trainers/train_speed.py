"""Tokens per second of `dhelix train`, beside those of its step alone and of the benchmark's step, on the same GPUs.

    python benchmarks/trainers/train_speed.py --out train_speed.json                    # two GPUs
    python benchmarks/trainers/train_speed.py --cases tiny --out train_speed.json       # two CPU devices

Each case is a process of its own. In it, three things are timed, the first one before and after the second:

    step        the step that `dhelix train` compiled, called again and again with one batch
    train       `dhelix train` itself, from the end of one step to that of the next, with reading, metrics and progress
    benchmark   the step of `benchmarks/strands`, whose optimizer neither clips nor masks, under the same passes

The rows are tokens of a file, drawn at random and mapped into memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dhelix.benchmarks.strands.processes import environment
from dhelix.benchmarks.strands.variants import SETTINGS
from dhelix.launch.train.data import token_files
from dhelix.launch.train.data.documents import Documents

_LLAMA = ("--preset=llama-8b", "--layers=8", "--seq=8192", "--vocab=32000", "--mesh=tp=2", "--microbatches=4")
_DOCUMENT = 1500  # tokens of a document, on average, in the case with masks


@dataclasses.dataclass(frozen=True)
class Case:
    """Flags of `dhelix train`, a launch setting of `benchmarks/strands`, and whether rows hold several documents."""

    flags: tuple[str, ...]
    setting: str = "default"
    masked: bool = False


CASES = {
    "plain, NVLink": Case((*_LLAMA, "--plain")),
    "strands, NVLink": Case(_LLAMA),
    "strands, no peer-to-peer": Case(_LLAMA, "no_p2p_small_buffers"),
    "strands, NVLink, documents masked": Case(_LLAMA, masked=True),
    "tiny": Case(("--preset=llama-demo", "--seq=64", "--mesh=tp=2", "--cpu_devices=2")),
}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--cases", default="; ".join(name for name in CASES if name != "tiny"), help="separated by ;")
    made.add_argument("--steps", type=int, default=40, help="steps of dhelix train; the first five are not timed")
    made.add_argument("--case", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.case:
        options.out.write_text(json.dumps(measured(CASES[options.case], options.steps)))
        return
    found: dict[str, Any] = {}
    for name in (one.strip() for one in options.cases.split(";")):
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder, "part.json")
            command = [sys.executable, __file__, f"--case={name}", f"--steps={options.steps}", f"--out={part}"]
            own = environment(SETTINGS[CASES[name].setting], Path(folder))
            failed = subprocess.run(command, env=own).returncode
            found[name] = {"failed": failed} if failed else json.loads(part.read_text())
        options.out.write_text(json.dumps({"rows": rows(found), "cases": found}, indent=1) + "\n")
    print(json.dumps(rows(found), indent=1))


def measured(case: Case, steps: int) -> dict[str, Any]:
    """Seconds of each timed step of the three, and what they ran on."""
    from dhelix.launch import cli
    from dhelix.launch.train import loop

    original, times, tokens = loop.train, dict[str, list[float]](), list[int]()

    def train(run: loop.Run, checkpoints: Any, on_step: Callable[[list[loop.Step]], None], wished: Any) -> Any:
        ends: list[float] = []

        def shown(done: list[loop.Step]) -> None:
            on_step(done)
            ends.append(time.perf_counter())

        tokens.append(run.tokens_per_step)
        batch = next(run.batches.after(0))
        times["step"] = seconds(run, run.step, batch, steps // 2)
        results = original(run, checkpoints, shown, wished)
        times["train"] = np.diff(ends)[4:].tolist()
        times["step"] += seconds(run, run.step, batch, steps // 2)
        times["benchmark"] = benchmark(run, steps // 2)
        return results

    loop.train = train
    with tempfile.TemporaryDirectory() as folder:
        token_files.save(Path(folder, "tokens"), documents(case.masked))
        try:
            cli.main(["train", *case.flags, f"--data={folder}/tokens", f"--steps={steps}"])
        except SystemExit as ended:
            if ended.code:
                raise
    from dhelix.runtime.profiling.provenance import provenance

    return {"provenance": dataclasses.asdict(provenance()), "flags": case.flags, "tokens": tokens[0], "seconds": times}


def seconds(run: Any, step: Any, batch: Any, count: int) -> list[float]:
    """Seconds of each of `count` steps after two others, on the run's state."""
    import jax

    found = []
    for _ in range(count + 2):
        begun = time.perf_counter()
        run.state, _ = jax.block_until_ready(step(run.state, batch))
        found.append(time.perf_counter() - begun)
    return found[2:]


def benchmark(run: Any, count: int) -> list[float]:
    """Seconds of the steps of the train step that `benchmarks/strands` times, at the sizes of `run`."""
    import jax
    import optax

    from dhelix.launch.train import trainer
    from dhelix.models.train_step import make_train_step

    options, batch = run.options, next(run.batches.after(0))
    run.state = None  # frees the memory
    training = make_train_step(run.training.config, run.training.mesh, optax.adamw(1e-4), options.microbatches)
    run.state = training.init(jax.random.key(0))
    return seconds(run, trainer.make_step(training, options.plain, options.step), batch, count)


def documents(several: bool, size: int = 4_000_000, vocabulary: int = 256) -> Documents:
    """Random tokens as one document, or as many of different lengths."""
    drawn = np.random.default_rng(0)
    lengths = drawn.geometric(1 / _DOCUMENT, size // _DOCUMENT) if several else np.array([], int)
    stops = np.cumsum(lengths)
    stops = np.append(stops[stops < size], size)
    starts = np.insert(stops[:-1], 0, 0)
    tokens = drawn.integers(0, vocabulary, size, dtype=np.uint16)
    return Documents("random", tokens, starts, stops, vocabulary, "random")


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Medians of each case that ran, for a table."""
    made = []
    for name, case in found.items():
        if "seconds" not in case:
            continue
        step, train, benchmark = (1e3 * statistics.median(case["seconds"][k]) for k in ("step", "train", "benchmark"))
        made.append({
            "case": name,
            "timed steps": ", ".join(str(len(times)) for times in case["seconds"].values()),
            "step alone, ms": round(step, 1),
            "dhelix train, ms": round(train, 1),
            "the benchmark's step, ms": round(benchmark, 1),
            "train over its step": f"{train / step:.3f}",
            "tokens/s of dhelix train": round(1e3 * case["tokens"] / train),
        })  # fmt: skip
    return made


if __name__ == "__main__":
    main()
