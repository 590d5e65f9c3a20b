"""Simulates every point of a bounded grid, and compares `dhelix simulate --search` with the best of them.

    python benchmarks/prediction/exhaustive.py --preset llama-8b --processes 16 --out grid.json
    python benchmarks/prediction/exhaustive.py --preset llama-8b --out grid.json --search

The grids are for 64 H100s in 8 nodes. Points that `estimates.py` expects to need more than 1.5 times the memory of a
GPU are left out. Points are saved as they come, and a run continues where another one ended. Their order is random, but
points with layers of equal shapes follow each other, because they share kernels. `--search` simulates nothing: the
search may ask for the points of the file, some tens of them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

CLUSTER = "h100-infiniband"
GRIDS = {
    "llama-8b": {"batch": 256, "pp": (1, 2, 4), "cp": (1, 2), "sequences": (1, 2, 4)},
    "llama-3.1-70b": {"batch": 256, "pp": (1, 2, 4, 8), "cp": (1, 2), "sequences": (1, 2)},
    "phi-moe-42b": {"batch": 512, "pp": (1, 2), "cp": (1,), "sequences": (1, 2, 4)},
}
BUDGETS = (10, 20, 30, 40, 60)


def made(preset: str, part: str = "") -> tuple[Any, Any, list[Any]]:
    """The task, the estimator, and the choices of the grid, in an order that mixes them.

    Args:
      part: a part of the grid, such as "pp=1,states=zero1|zero2".
    """
    from dhelix.launch.simulate import search
    from dhelix.launch.train import trainer
    from dhelix.launch.train.options import Options
    from dhelix.passes.simulation.choices import Space, choices
    from dhelix.passes.simulation.cluster_costs import EQUAL
    from dhelix.profiles.clusters import known

    grid, cluster = GRIDS[preset], known.find(CLUSTER)
    task = search.Task(Options(preset=preset, batch=grid["batch"]), cluster, "default", EQUAL, None)
    config = trainer.configuration(task.options)
    shape = search.shape_of(preset, config)
    estimator = search.estimator_of(task, shape)
    every, _ = choices(shape, Space(cluster.gpus, cluster.gpus_per_node, grid["batch"]))
    limit = 1.5 * cluster.hardware.memory_bytes
    kept = [
        choice
        for choice in every
        if choice.pp in grid["pp"] and choice.cp in grid["cp"] and choice.sequences in grid["sequences"]
        if estimator(choice).memory <= limit
    ]
    random.Random(0).shuffle(kept)
    shapes = list(dict.fromkeys((one.tp, one.cp, one.sequences) for one in kept))
    kept.sort(key=lambda one: shapes.index((one.tp, one.cp, one.sequences)))
    only = {name: values.split("|") for name, _, values in (text.partition("=") for text in part.split(",") if text)}
    return task, estimator, [one for one in kept if all(str(getattr(one, name)) in only[name] for name in only)]


def simulate(task: Any, choice: Any) -> tuple[Any, dict[str, Any]]:
    """One point, as JSON values: seconds and bytes, or why it cannot run."""
    from dhelix.launch.simulate import search

    begun = time.perf_counter()
    found = search.simulated(task, choice)
    took = round(time.perf_counter() - begun, 1)
    if isinstance(found, str):
        return choice, {"refused": found, "took": took}
    return choice, {"seconds": found.seconds, "memory": found.memory, "mfu": found.mfu, "took": took}


def run(options: argparse.Namespace) -> None:
    """Simulates what is missing, until `--minutes` are over."""
    from dhelix.launch.simulate import search

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    end = time.monotonic() + 60 * options.minutes
    task, _, every = made(options.preset, options.part)
    whole = len(made(options.preset)[2])
    done = read(options.out)
    left = [choice for choice in every if str(choice) not in done]
    print(f"{len(every)} points, {len(left)} of them left", flush=True)
    pool_of = concurrent.futures.ProcessPoolExecutor
    spawn = multiprocessing.get_context("spawn")
    with pool_of(options.processes, spawn, search.prepare, max_tasks_per_child=40) as pool:
        waiting = {pool.submit(simulate, task, choice) for choice in left[: options.processes]}
        rest = iter(left[options.processes :])
        while waiting:
            ready, waiting = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
            for one in ready:
                choice, result = one.result()
                done[str(choice)] = {"choice": asdict(choice), **result}
                following = next(rest, None) if time.monotonic() < end else None
                if following is not None:
                    waiting.add(pool.submit(simulate, task, following))
            write(options.out, options.preset, whole, done)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The points of a file, by their words."""
    if not path.exists():
        return {}
    points = json.loads(path.read_text())["points"]
    return {row["words"]: {key: row[key] for key in row if key != "words"} for row in points}


def write(path: Path, preset: str, points: int, done: dict[str, dict[str, Any]]) -> None:
    """Writes all points, in a fixed order."""
    rows = [{"words": words, **done[words]} for words in sorted(done)]
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = json.dumps({"preset": preset, "cluster": CLUSTER, "grid": GRIDS[preset], "points_of_the_grid": points})
    path.write_text(f'{head[:-1]}, "points": [\n{lines}\n]}}\n')


def step_of(row: dict[str, Any], system: str, limit: float) -> Any:
    """A point as the search takes it: a step whose parts are unknown, or why it cannot run."""
    from dhelix.passes.framework.gain import StepParts
    from dhelix.passes.simulation.simulated_step import SimulatedStep, Work

    if "refused" in row:
        return row["refused"]
    parts = StepParts(
        compute=row["seconds"], copies=0.0, clock=0.0, slow_down=0.0, exposed=0.0, idle=0.0, flops=0.0, memory=0,
        guessed=0.0, guessed_overlap=0.0, costs="",
    )  # fmt: skip
    return SimulatedStep(system, parts, row["memory"], Work(1, 1.0, 1, 1.0), limit)


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The best of the grid beside what the search finds in it, by the number of simulations."""
    from dhelix.passes.simulation import layout_search
    from dhelix.profiles.clusters import known

    _, estimator, every = made(options.preset, options.part)
    done, limit = read(options.out), known.find(CLUSTER).hardware.memory_bytes
    known_ones = sorted(choice for choice in every if str(choice) in done)

    def asked(chosen: Sequence[Any]) -> list[Any]:
        return [step_of(done[str(choice)], choice.system, limit) for choice in chosen]

    of_grid = [done[str(choice)] for choice in known_ones]
    best = min((row for row in of_grid if row.get("memory", limit + 1) <= limit), key=lambda row: row["seconds"])
    rows = []
    for budget in BUDGETS:
        found = layout_search.search(known_ones, estimator, asked, limit, budget)
        first = found.ranked[0]
        rows.append({
            "model": options.preset, "part": options.part, "points": len(known_ones), "of": len(every),
            "most simulations": budget,
            "simulations": len(found.ranked) + len(found.others), "found s": round(first.seconds, 4),
            "best s": round(best["seconds"], 4), "longer": round(first.seconds / best["seconds"] - 1.0, 4),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=GRIDS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--part", default="", help="a part of the grid, such as pp=1,states=zero1|zero2")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--search", action="store_true")
    options = parser.parse_args()
    if options.search:
        print(json.dumps(compare(options), indent=1))
    else:
        run(options)


if __name__ == "__main__":
    main()
