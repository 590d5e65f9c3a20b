"""Measures a train step as compiled by XLA alone, with two strands under each schedule, and without communication.

    python benchmarks/strands/run.py --settings default,connections1,copy_engine1 --out DIR
    python benchmarks/strands/run.py --microbatches 4 --settings no_p2p --variants "plain; strands, dp"
    python benchmarks/strands/run.py --variants schedules --check_steps 20 --rounds 0 --no_traces  # compares results
    python benchmarks/strands/tables.py DIR/*.json

A launch setting holds for a whole process, so each setting has its own process (`processes.py`). Settings take turns,
round by round, and so do the variants of a setting (`worker.py`). So a slow period of the machine affects all of them.
The settings share each GPU's memory. With `--one_by_one`, they run one after the other, each with all of the memory.

The results file is written after every turn. With `--budget_s`, rounds and traces that no longer fit are skipped. With
`--one_by_one`, whole settings may be skipped, too. The file lists what was skipped. Files of several calls on one
machine make one set of tables (`tables.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from dhelix.benchmarks.strands.processes import Job
from dhelix.benchmarks.strands.results import Run
from dhelix.benchmarks.strands.tables import tables
from dhelix.benchmarks.strands.variants import ESSENTIAL, GPU, SCHEDULES, SETTINGS, VARIANTS, chosen
from dhelix.errors import DhelixError
from dhelix.models.common.context_parallel import Exchange
from dhelix.models.train_step import Sharding
from dhelix.passes.sharding.factors import STRATEGIES
from dhelix.runtime.compiler import deviceless

_WORKER = Path(__file__).parent / "worker.py"
_GRACE_S = 20.0  # time beyond the budget after which a process is ended
_ENDLESS = 1e6  # seconds


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--unrolled", action="store_true", help="layers one after the other, not scanned")
    made.add_argument("--tp", type=int, default=4)
    made.add_argument("--dp", type=int, default=1, help="data parallelism; --microbatches are of each of its groups")
    made.add_argument("--cp", type=int, default=1, help="context parallelism")
    made.add_argument("--context", default="ring", choices=get_args(Exchange), help="how keys and values travel")
    made.add_argument("--ep", type=int, default=0, help="expert parallelism, for a preset with experts")
    made.add_argument("--capacity", type=float, default=0.0, help="capacity factor of experts; 0: the preset's")
    made.add_argument("--states", choices=STRATEGIES, help="how model states are sharded over --dp (default: not)")
    made.add_argument("--sharding", default="shard_map", choices=get_args(Sharding), help="who makes collectives")
    shards = "a GPU has as much of heads, FFN and vocabulary as with so many GPUs; 0: as with --tp"
    made.add_argument("--shards", type=int, default=0, help=shards)
    made.add_argument("--variants", default=ESSENTIAL, help=f"or schedules, all, or of: {'; '.join(VARIANTS)}")
    made.add_argument("--channels", type=int, default=0, help="most channels of a collective; 0: NCCL's choice")
    made.add_argument("--no_traces", action="store_true", help="no traced step: times alone")
    add_common_flags(made, rounds=3)
    return made


def add_common_flags(made: argparse.ArgumentParser, rounds: int) -> None:
    """Adds the flags of every benchmark that `measure` runs. `rounds` is the default of --rounds."""
    made.add_argument("--preset", default="llama-8b")
    made.add_argument("--seq", type=int, default=8192)
    made.add_argument("--vocab", type=int, default=32_000)
    made.add_argument("--microbatches", type=int, default=16)
    turns = "turns of each variant, of --steps steps; 0: checks alone"
    made.add_argument("--rounds", type=int, default=rounds, help=turns)
    made.add_argument("--steps", type=int, default=2)
    made.add_argument("--check_steps", type=int, default=2, help="first steps, whose results are compared")
    made.add_argument("--settings", default="default", help=f"separated by commas, of: {', '.join(SETTINGS)}")
    made.add_argument("--threads", type=int, default=4, help="compiles at a time, after the first one")
    made.add_argument("--one_by_one", action="store_true", help="a setting after the other, not by turns")
    made.add_argument("--budget_s", type=float, default=0.0, help="seconds for all settings; 0: no limit")
    made.add_argument("--out", type=Path, default=Path("benchmark-output"))
    made.add_argument("--name", default="", help="of the result file")
    made.add_argument("--on_paper", action="store_true", help="no GPUs: compiled without, and what is predicted")
    made.add_argument(
        "--unseen", action="store_true", help="on paper: predicted as if the program's keys were unmeasured"
    )
    made.add_argument("--hardware", default=GPU, choices=[t.upper() for t in deviceless.targets()], help="on paper")
    made.add_argument("--dump_hlo", action="store_true")


def main() -> None:
    arguments = parser().parse_args()
    try:
        arguments.settings = chosen(arguments.settings, SETTINGS, "setting")
        named = str(arguments.variants).strip()
        names = {"all": "; ".join(VARIANTS), "schedules": SCHEDULES}.get(named, named)
        arguments.variants = chosen(names, VARIANTS, "variant")
        path = measure(arguments, _file_name(arguments))
    except DhelixError as error:
        sys.exit(str(error))
    print(f"results in {path}")


def measure(
    arguments: argparse.Namespace,
    name: str = "",
    worker: Path = _WORKER,
    show: Callable[[Sequence[Run]], str] = tables,
) -> Path:
    """Runs all settings. Returns the results file, which is complete after each turn.

    Args:
      name: default name of the file, without suffix.
      worker: script that a setting's process runs.
      show: turns results into text that is printed.

    Raises:
      DhelixError: no setting gave results.
    """
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.name or name}.json"
    settings = [SETTINGS[name] for name in arguments.settings]
    alone = arguments.one_by_one or arguments.on_paper
    groups = [[setting] for setting in settings] if alone else [settings]
    began, longest = time.monotonic(), 0.0
    runs: list[Run] = []
    dropped: list[str] = []
    for number, group in enumerate(groups):
        names = ", ".join(setting.name for setting in group)
        left = arguments.budget_s - (time.monotonic() - began) if arguments.budget_s else _ENDLESS
        if left < 0.8 * longest or left < 1:
            reason = f"{left:.0f} s of the budget were left, and the longest took {longest:.0f} s"
            dropped.append(f"setting {names}: {reason}")
            print(f"dropped {dropped[-1]}", flush=True)
            continue
        start = time.monotonic()
        jobs = [Job(arguments, setting, left / (len(groups) - number), len(group), worker) for setting in group]
        going = jobs
        while going:
            going = [job for job in going if job.turn(start + left + _GRACE_S)]
            if found := [*runs, *(run for job in jobs if (run := job.run) is not None)]:
                _merged(found, dropped).write(path)
        longest = max(longest, time.monotonic() - start)
        for job in jobs:
            run = job.run
            job.close()
            if run is None:
                dropped.append(f"setting {job.setting.name}: its process gave no results")
            else:
                runs.append(run)
        if runs:
            print(f"{names}: {time.monotonic() - start:.0f} s\n\n{show([_merged(runs, dropped)])}", flush=True)
    if not runs:
        raise DhelixError(f"no results: {'; '.join(dropped)}")
    _merged(runs, dropped).write(path)
    return path


def _merged(runs: list[Run], dropped: list[str]) -> Run:
    results = [result for run in runs for result in run.results]
    return dataclasses.replace(runs[0], results=results, dropped=[d for r in runs for d in r.dropped] + dropped)


def _file_name(arguments: argparse.Namespace) -> str:
    shards = f"of{arguments.shards}" if arguments.shards else ""
    parts = [arguments.preset, f"l{arguments.layers}", f"s{arguments.seq}", f"tp{arguments.tp}{shards}"]
    parts += [f"dp{arguments.dp}"] * (arguments.dp > 1) + [arguments.sharding] * (arguments.sharding != "shard_map")
    parts += [arguments.states] * bool(arguments.states)
    parts += [f"ep{arguments.ep}", f"c{arguments.capacity:g}"] if arguments.ep else []
    parts += [f"cp{arguments.cp}", arguments.context] if arguments.cp > 1 else []
    parts += [f"m{arguments.microbatches}", f"v{arguments.vocab}", arguments.settings[0]]
    return "strands_" + "_".join(parts) + "_unrolled" * arguments.unrolled


if __name__ == "__main__":
    main()
