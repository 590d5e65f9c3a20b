"""Measures how model states are best sharded over two GPUs: every strategy, the planner's choice, and XLA's FSDP.

    python benchmarks/sharding/strategies.py --settings copy_engine1,no_p2p_small_buffers --out DIR
    python benchmarks/sharding/strategies.py --settings two_nodes_sockets --only 'M [14],' --out DIR
    python benchmarks/sharding/strategies.py --settings default,copy_engine1 --only 'copy_engine1|XLA' --out DIR
    python benchmarks/sharding/strategies.py --settings copy_engine1 --on_paper --out DIR     # what the planner expects

The step is `dhelix train`'s with `--sharding auto`, so devices sum gradients in bfloat16, as XLA's FSDP does. Programs
of dhelix are compiled with the decorator, as a user would (`programs.py` lists them). Each setting has a process and a
result file of its own. XLA's FSDP counts at its best setting of a link. All settings compile at the same time, and
share the GPUs' memory. Then they run one after the other, as those of `strands/run.py`. Name at most two settings for
GPUs of 80 GB.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dhelix.benchmarks.pages.markdown import table
from dhelix.benchmarks.sharding.programs import AT_ONCE, MICROBATCHES, OURS, PROGRAMS, ROWS, SPREAD, STRATEGIES
from dhelix.benchmarks.strands import run as strands
from dhelix.benchmarks.strands.processes import Job
from dhelix.benchmarks.strands.results import Result, Run
from dhelix.benchmarks.strands.variants import SETTINGS, Setting, chosen
from dhelix.errors import DhelixError

WORKER = Path(__file__).parent / "strategies_worker.py"
_SPREAD_HEADS = (
    "M", "parameters", "step", "communication exposed", "all-gathers", "all-gathers exposed",
    "hidden of the blocking all-gathers",
)  # fmt: skip
_WAYS = (
    ("gathered at once", "zero1", AT_ONCE),
    ("gathered layer by layer", "zero1", OURS),
    ("layer by layer, rows of the embedding", ROWS, OURS),
)
_ENDLESS = 1e6  # seconds


def tables(runs: Sequence[Run]) -> str:
    """The tables of some runs, in Markdown."""
    return "\n\n".join(part for run in runs for part in _of_run(run, _baselines(run, runs))) + "\n"


def _baselines(run: Run, runs: Sequence[Run]) -> dict[int, float]:
    """Milliseconds of XLA's FSDP for each number of micro-batches: the best of all settings of a machine's link."""

    def place(one: Run) -> tuple[str, str]:
        return one.on["machine"], SETTINGS[one.results[0].setting].link

    found: dict[int, float] = {}
    for result in [r for one in runs if place(one) == place(run) for r in one.results if r.steps_ms]:
        program = PROGRAMS[result.variant]
        if program.kind == "XLA":
            found[program.microbatches] = min(found.get(program.microbatches, math.inf), result.median_ms)
    return found


def _of_run(run: Run, baselines: Mapping[int, float]) -> Iterator[str]:
    found = {result.variant: result for result in run.results if result.steps_ms}
    if not any(PROGRAMS[name].kind == "ours" for name in found):
        return  # measured for the baseline of another run
    setting = run.results[0].setting
    counts = sorted({len(result.steps_ms) for result in found.values()})
    w, link = run.workload, SETTINGS[setting].link
    yield (
        f"**{link}, {setting}: {w['preset']} shapes, {w['layers']} layers, S {w['seq']}, DP {w['dp']}; "
        f"{' or '.join(map(str, counts))} timed steps per program** "
        f"({run.on['gpus']}, machine {run.on['machine']}, jax {run.on['jax']}, {run.on['date']})"
    )
    heads = ("M", *STRATEGIES, "XLA's FSDP, best", "planner's choice", "off the fastest", "over XLA's FSDP")
    if rows := [row for m in MICROBATCHES if (row := _row(run, found, m, baselines.get(m)))]:
        yield table(heads, rows)
    if spread := [row for m in SPREAD for row in _spread(run, found, m)]:
        yield "ZeRO-1 with parameters gathered in different ways, in milliseconds, one step of each traced:"
        yield table(_SPREAD_HEADS, spread)
    if failed := [f"{result.variant}: {result.failed}" for result in run.results if result.failed]:
        yield "Not run: " + "; ".join([*failed, *run.dropped])


def _row(run: Run, found: dict[str, Result], m: int, baseline: float | None) -> tuple[str, ...]:
    """A number of micro-batches: milliseconds of a step, with what the planner expected in parentheses."""
    planned = run.workload["planned"].get(str(m), {"chosen": "", "expected_ms": {}})
    ours = {s: one.median_ms for s in STRATEGIES if (one := found.get(f"M {m}, {s}, {OURS}"))}
    if len(ours) < 2:
        return ()  # nothing to choose from
    cells = []
    for strategy in STRATEGIES:
        expected = planned["expected_ms"].get(strategy)
        measured = f"{ours[strategy]:.1f}" if strategy in ours else ""
        cells.append(f"{measured} ({expected:.1f})" if expected else measured)
    chosen_ms, fastest = ours.get(planned["chosen"]), min(ours.values())
    off = "" if chosen_ms is None else f"{chosen_ms / fastest - 1:+.1%}"
    gain = f"{baseline / chosen_ms:.3f}" if baseline and chosen_ms else ""
    return str(m), *cells, f"{baseline:.1f}" if baseline else "", planned["chosen"], off, gain


def _spread(run: Run, found: dict[str, Result], m: int) -> Iterator[tuple[str, ...]]:
    """ZeRO-1's ways to gather parameters: the step, exposed communication, and the share of all-gathers that is hidden.

    Collectives that bring rows of an embedding count as all-gathers. The share is of the time that the all-gathers
    take if they are issued at once.
    """
    traced = run.workload.get("gathers", {})
    blocking = traced.get(f"M {m}, zero1, {AT_ONCE}", {"ms": 0.0})["ms"]
    for way, strategy, by in _WAYS:
        name = f"M {m}, {strategy}, {by}"
        if name in found and name in traced:
            step, gathers = found[name], traced[name]
            waiting = gathers["ms"] - gathers["hidden_ms"]
            exposed = step.communication_ms - step.hidden_ms
            times = (step.median_ms, exposed, gathers["ms"], waiting)
            hidden = f"{1 - waiting / blocking:.0%}" if blocking else "not named in the trace"
            yield str(m), way, *(f"{one:.1f}" for one in times), hidden


def read(path: Path) -> Run:
    """Reads a result file."""
    record = json.loads(path.read_text())
    return Run(**{**record, "results": [Result(**result) for result in record["results"]]})


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--dp", type=int, default=2)
    only = "regular expression for SETTING, M NUMBER, STRATEGY, WHO; default: all programs in all settings"
    made.add_argument("--only", default="", help=only)
    strands.add_common_flags(made, rounds=2)
    made.set_defaults(seq=4096, microbatches=max(MICROBATCHES))
    return made


def main() -> None:
    arguments = parser().parse_args()
    try:
        settings = [SETTINGS[name] for name in chosen(arguments.settings, SETTINGS, "setting")]
        measure([(setting, complete(arguments, setting)) for setting in settings])
    except DhelixError as error:
        sys.exit(str(error))


def complete(arguments: argparse.Namespace, setting: Setting) -> argparse.Namespace:
    """The options that a worker of `strands/run.py` expects. Raises DhelixError if no program is left."""
    names = [name for name in PROGRAMS if re.search(arguments.only, f"{setting.name}, {name}")]
    if not names:
        raise DhelixError(f"--only {arguments.only!r} leaves nothing of {setting.name}, {'; '.join(PROGRAMS)}")
    fixed = {"variants": names, "tp": 1, "cp": 1, "ep": 0, "capacity": 0.0, "channels": 0, "shards": 0}
    fixed |= {"unrolled": False, "sharding": "auto", "states": None, "no_traces": False, "context": "ring"}
    return argparse.Namespace(**vars(arguments) | fixed)


def measure(todo: Sequence[tuple[Setting, argparse.Namespace]]) -> None:
    """Compiles for all settings at the same time. Then each setting has the GPUs for itself."""
    with ThreadPoolExecutor() as pool:
        jobs = [(_job(*one, together=len(todo)), one[1]) for one in todo]
        deadline = time.monotonic() + jobs[0][0].seconds
        started = [pool.submit(job.turn, deadline) for job, _ in jobs]
        for (job, arguments), compiled in zip(jobs, started, strict=True):
            path = arguments.out / f"{arguments.name or 'strategies'}_{job.setting.name}.json"
            more = compiled.result()
            while more:
                more = job.turn(deadline)
                if job.run is not None:
                    job.run.write(path)
            run = job.run
            job.close()
            if run is None:
                print(f"{job.setting.name}: no results", flush=True)
                continue
            run.write(path)
            print(f"{tables([run])}\nresults in {path}", flush=True)


def _job(setting: Setting, arguments: argparse.Namespace, together: int) -> Job:
    arguments.out.mkdir(parents=True, exist_ok=True)
    return Job(arguments, setting, arguments.budget_s or _ENDLESS, together, WORKER)


if __name__ == "__main__":
    main()
