"""Predicts steps of two H200s that no result file has, and then measures them: layouts of one batch, over two links.

    python benchmarks/prediction/layouts.py predict --out benchmarks/results/layouts_predicted_h200x2.json   # no GPU
    python benchmarks/prediction/layouts.py measure --predicted benchmarks/results/layouts_predicted_h200x2.json \\
        --out benchmarks/results/layouts_measured_h200x2.json --budget_s 420                                # two GPUs

The predictions are those of `dhelix simulate` with the shipped profiles. They are committed before the steps run. Each
program that is measured is made as `dhelix train` makes its step, by the passes that were simulated.

A link's launch setting holds for a process, so each link has its own. A process compiles some programs at a time and
then times them one by one. It writes the results after each program. Programs that do not fit into the budget are
skipped, and the file lists them. To try it out on two CPU devices: `measure --tiny`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dhelix.benchmarks.prediction.layout_programs import CLUSTERS, MODELS, SETTINGS, Program, chosen, costs_of

WARM_UP = 2
GRACE_S = 25.0  # for a process to start, and for a step that takes longer than expected; then it is ended


# --- Predicting.


def predicted(link: str, program: Program) -> dict[str, Any]:
    """The simulated step as JSON, or the reason why there is none."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from dhelix.errors import DhelixError
    from dhelix.launch.simulate import programs

    (cluster, model), row = costs_of(link), {"link": link, **program.row}
    try:
        step = programs.simulated_options(program.options(), cluster, program.system, model)
    except DhelixError as error:
        return {**row, "refused": str(error)}
    found = {
        "predicted_ms": 1e3 * step.seconds, "exposed_ms": 1e3 * step.parts.exposed, "memory_gib": step.memory / 2**30,
        "guessed": step.parts.guessed, "guessed_overlap": step.parts.guessed_overlap,
    }  # fmt: skip
    return {**row, **{name: round(value, 3) for name, value in found.items()}, "notes": list(step.notes)}


def predict(options: argparse.Namespace) -> None:
    import jax

    tasks = [(link, program) for link in SETTINGS for program in chosen(options.only)]
    spawn = multiprocessing.get_context("spawn")
    on = {"date": time.strftime("%Y-%m-%d"), "jax": jax.__version__, "settings": SETTINGS}
    rows: list[dict[str, Any]] = []
    with concurrent.futures.ProcessPoolExecutor(options.processes, spawn) as pool:
        for row in pool.map(predicted, *zip(*tasks, strict=True)):
            rows.append(row)
            print(json.dumps(row), flush=True)
            _write(options.out, {"on": on, "models": MODELS, "clusters": CLUSTERS, "rows": rows})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON with a line for each row, at once, so that a reader never sees a part of it."""
    rows = ",\n".join(json.dumps(row) for row in content["rows"])
    head = json.dumps({key: value for key, value in content.items() if key != "rows"}, indent=1)
    part = path.with_suffix(".part")
    part.write_text(f'{head[:-2]},\n "rows": [\n{rows}\n]}}\n')
    part.replace(path)


# --- Measuring.


class Measurement:
    """The programs of one link, in a process with the link's launch setting."""

    def __init__(self, options: argparse.Namespace) -> None:
        from dhelix.runtime.profiling.provenance import provenance

        self.options, self.link, self.end = options, options.link, time.monotonic() + options.budget_s
        self.content = json.loads(options.out.read_text()) if options.out.exists() else {"on": {}, "rows": []}
        self.content["rows"] = [row for row in self.content["rows"] if row["link"] != self.link]
        self.content["on"][self.link] = {**dataclasses.asdict(provenance()), "setting": SETTINGS[self.link]}
        self.cluster, self.model = costs_of(self.link)
        known = json.loads(options.predicted.read_text())["rows"]
        self.predicted_ms = {_names(r): r["predicted_ms"] for r in known if r["link"] == self.link and "notes" in r}

    def run(self) -> None:
        """Compiles the first program alone, because it tunes new products, and then the others, several at a time."""
        asked = [one for one in chosen(self.options.only) if _names(one.row) in self.predicted_ms]
        count, longest = self.options.threads, 0.0
        groups = [asked[:1], *(asked[n : n + count] for n in range(1, len(asked), count))]
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            for group in groups:
                if self.left < 0.8 * longest:
                    for program in group:
                        self.save(program, {"skipped": f"{self.left:.0f} s were left to compile"})
                    continue
                begun = time.monotonic()
                made = list(pool.map(self.compiled, group))
                longest = max(longest, time.monotonic() - begun)
                for program, (row, parts) in zip(group, made, strict=True):
                    self.measure(program, row, parts)
                del made

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def compiled(self, program: Program) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """What compiling says, and what running needs: the step, the function that makes its state, and its batch."""
        import jax
        import numpy as np

        from dhelix.launch.train import trainer
        from dhelix.passes.simulation.systems import SYSTEMS
        from dhelix.runtime.compiler import memory_need
        from dhelix.runtime.planning import simulation

        begun, plain = time.monotonic(), program.system == "xla"
        try:
            options = program.options(self.options.tiny)
            training, batch = trainer.make_training(options, trainer.configuration(options), jax.devices())
            step, notes = trainer.make_step(training, plain), ()
            if not plain:
                step = step.but(passes=simulation.passes_of(SYSTEMS[program.system], self.model, step.options))
            example = training.abstract_state(), training.abstract_batch(batch)
            found = step.lower(*example).compile()
            if not plain:
                notes = simulation.notes_of(step.outcomes(*example))
            init = training.init.lower(jax.random.key(0)).compile()  # pyright: ignore[reportFunctionMemberAccess]
        except Exception as error:  # one program must not stop the others
            return {"failed": f"did not compile: {_first_line(error)}"}, ()
        memory = memory_need.of_compiled(found).total / 2**30
        row = {"compile_s": round(time.monotonic() - begun, 1), "memory_gib": round(memory, 3), "notes": list(notes)}
        tokens = np.random.default_rng(0).integers(0, training.config.vocab, example[1]["tokens"].shape, "int32")
        return row, (found, init, {"tokens": tokens}, training.batch_sharding)

    def measure(self, program: Program, row: dict[str, Any], parts: tuple[Any, ...]) -> None:
        """Times the steps of a compiled program one by one. Its state is freed at the end."""
        import jax

        from dhelix.benchmarks.collectives.gpu_clocks import Clocks

        expected = (WARM_UP + self.options.steps) * self.predicted_ms[_names(program.row)] / 1e3
        if not parts or self.left < expected:
            return self.save(program, row if not parts else {**row, "skipped": f"{self.left:.0f} s were left"})
        compiled, init, batch, sharding = parts
        times: list[float] = []
        try:
            batch, state = jax.device_put(batch, sharding), init(jax.random.key(0))
            losses = []
            for _ in range(WARM_UP):
                state, metrics = jax.block_until_ready(compiled(state, batch))
                losses.append(float(metrics["loss"]))
            with Clocks() as clocks:
                first = time.perf_counter()
                for _ in range(self.options.steps):
                    begun = time.perf_counter()
                    state, _ = jax.block_until_ready(compiled(state, batch))
                    times.append(1e3 * (time.perf_counter() - begun))
                clock = clocks.between(first, time.perf_counter())
            row |= {"losses": losses} | ({} if clock is None else dataclasses.asdict(clock))
        except Exception as error:  # one program must not stop the others
            row["failed"] = f"did not run: {_first_line(error)}"
        if times:
            found = {"median_ms": statistics.median(times), "min_ms": min(times), "max_ms": max(times)}
            row |= {"steps": len(times), **{name: round(value, 2) for name, value in found.items()}}
        self.save(program, row)

    def save(self, program: Program, row: dict[str, Any]) -> None:
        row, expected = {"link": self.link, **program.row, **row}, self.predicted_ms[_names(program.row)]
        print(f"{self.left:4.0f} s left, {expected:.1f} ms predicted: {json.dumps(row)}", flush=True)
        self.content["rows"].append(row)
        _write(self.options.out, self.content)


def _names(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["model"], row["layout"], row["system"]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


def measure(options: argparse.Namespace) -> None:
    """Measures each link in a process of its own, which shares the time that is left with the links after it."""
    from dhelix.benchmarks.strands import processes, variants

    links, end = [options.link] if options.link else list(SETTINGS), time.monotonic() + options.budget_s
    with tempfile.TemporaryDirectory() as folder:
        for number, link in enumerate(links):
            budget = (end - time.monotonic()) / (len(links) - number) - GRACE_S
            environment = processes.environment(variants.SETTINGS[SETTINGS[link]], Path(folder))
            if options.tiny:
                flags = f"{environment['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
                environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
            given = [*sys.argv[1:], "--link", link, "--budget_s", f"{budget:.0f}", "--of_parent"]
            try:
                subprocess.run([sys.executable, __file__, *given], env=environment, timeout=budget + GRACE_S)
            except subprocess.TimeoutExpired:
                print(f"{link}: out of time; what was measured until then counts", flush=True)
            processes.keep_choices(Path(folder))  # for the next link, so that both run the same kernels


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(dest="command", required=True)
    for name in ("predict", "measure"):
        one = commands.add_parser(name)
        one.add_argument("--out", type=Path, required=True)
        one.add_argument("--only", default="", help="regular expression for MODEL, LAYOUT, SYSTEM")
        one.add_argument("--processes", type=int, default=2, help="to predict: programs at a time")
        if name == "measure":
            one.add_argument("--predicted", type=Path, required=True, help="file of `predict`")
            one.add_argument("--budget_s", type=float, default=420.0, help="seconds for all links together")
            one.add_argument("--link", choices=SETTINGS, help="one link; default: all")
            one.add_argument("--steps", type=int, default=6, help="timed steps of each program")
            one.add_argument("--threads", type=int, default=6, help="programs that are compiled at a time")
            one.add_argument("--tiny", action="store_true", help="small models on two CPU devices, to try this out")
            one.add_argument("--of_parent", action="store_true", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.command == "predict":
        predict(options)
    elif options.of_parent:
        Measurement(options).run()
    else:
        measure(options)


if __name__ == "__main__":
    main()
