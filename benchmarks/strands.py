"""Step time of a Llama train step: XLA alone, two strands under every schedule, and without communication.

    python benchmarks/strands.py --settings default,connections1,copy_engine1 --out DIR
    python benchmarks/strands.py --microbatches 4 --settings no_p2p,no_p2p_connections1 --variants "plain; strands, dp"
    python benchmarks/strands.py --variants schedules --check_steps 20 --rounds 0 --no_traces    # are results right?
    python benchmarks/strand_tables.py DIR/*.json

Settings hold for a whole process, so each has one (two that pose as nodes for `two_nodes`); the variants of a process
take turns, round by round, so that a slow spell of the machine meets all of them (`strand_worker.py`). What is known
of XLA's autotuner is loaded, and what one process adds is read by the next, so that all of them run the same kernels.

Results are written after every setting. With `--budget_s` settings that no longer fit are dropped, and the file says
so; files of several calls on one machine make one set of tables (`strand_tables.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dhelix.benchmarks.strand_results import Result, Run
from dhelix.benchmarks.strand_tables import tables
from dhelix.benchmarks.strand_variants import ESSENTIAL, SCHEDULES, SETTINGS, VARIANTS, Setting, chosen
from dhelix.errors import DhelixError
from dhelix.runtime import autotune_results
from dhelix.runtime.profiling.nodes import emulated_nodes

_WORKER = Path(__file__).parent / "strand_worker.py"
_CHOICES, _CHOSEN = "autotune.pbtxt", "autotune.part.pbtxt"
_GRACE_S = 20.0  # that a process may take beyond the budget before it is ended
_ENDLESS = 1e6  # seconds


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--unrolled", action="store_true", help="layers one after the other, not scanned")
    made.add_argument("--tp", type=int, default=4)
    shards = "a GPU has as much of heads, FFN and vocabulary as with so many GPUs; 0: as with --tp"
    made.add_argument("--shards", type=int, default=0, help=shards)
    made.add_argument("--variants", default=ESSENTIAL, help=f"or schedules, all, or of: {'; '.join(VARIANTS)}")
    made.add_argument("--channels", type=int, default=0, help="most channels of a collective; 0: NCCL's choice")
    made.add_argument("--no_traces", action="store_true", help="no traced step: times alone")
    add_common_flags(made, rounds=3)
    return made


def add_common_flags(made: argparse.ArgumentParser, rounds: int) -> None:
    """Flags of every benchmark that `measure` runs; `rounds`, unless the user says how many."""
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
    made.add_argument("--budget_s", type=float, default=0.0, help="seconds for all settings; 0: no limit")
    made.add_argument("--out", type=Path, default=Path("benchmark-output"))
    made.add_argument("--name", default="", help="of the result file")
    made.add_argument("--on_paper", action="store_true", help="no GPUs: compiled for H200s, and what is predicted")
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
    """Runs all settings. Returns the file of results, which is complete after each of them.

    Args:
      name: of that file, unless the arguments say it.
      worker: the script of a setting's process.
      show: makes tables of results.
    """
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.name or name}.json"
    began, longest = time.monotonic(), 0.0
    runs: list[Run] = []
    dropped: list[str] = []
    for number, setting in enumerate(map(SETTINGS.__getitem__, arguments.settings)):
        left = arguments.budget_s - (time.monotonic() - began) if arguments.budget_s else _ENDLESS
        if left < 0.8 * longest or left < 1:
            reason = f"{left:.0f} s of the budget were left, and the longest took {longest:.0f} s"
            dropped.append(f"setting {setting.name}: {reason}")
            print(f"dropped {dropped[-1]}", flush=True)
            continue
        start = time.monotonic()
        run = run_setting(arguments, setting, left / (len(arguments.settings) - number), left, worker)
        longest = max(longest, time.monotonic() - start)
        if run is None:
            dropped.append(f"setting {setting.name}: its process gave no results")
            continue
        runs.append(run)
        merged = _merged(runs, dropped)
        merged.write(path)
        print(f"{setting.name}: {time.monotonic() - start:.0f} s\n\n{show([merged])}", flush=True)
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
    parts += [f"m{arguments.microbatches}", f"v{arguments.vocab}", arguments.settings[0]]
    return "strands_" + "_".join(parts) + "_unrolled" * arguments.unrolled


def run_setting(
    arguments: argparse.Namespace, setting: Setting, share: float, left: float, worker: Path = _WORKER
) -> Run | None:
    """The results of one setting's process or processes; None if there are none.

    Args:
      share: seconds after which they shall leave out what they can.
      left: seconds after which they are ended.
      worker: their script.
    """
    file = arguments.out / f"{setting.name}.part.json"
    file.unlink(missing_ok=True)
    request = {k: v for k, v in vars(arguments).items() if k != "settings"}
    request |= {"out": str(arguments.out), "setting": setting.name, "file": str(file), "seconds": share}
    processes = [
        subprocess.Popen([sys.executable, str(worker), json.dumps(request | place)], env=environment)
        for place, environment in places(arguments, setting)
    ]
    problem = wait(processes, time.monotonic() + left + _GRACE_S)
    keep_choices(arguments.out)
    if problem:
        print(f"{setting.name}: {problem}; what was measured until then counts", flush=True)
    if not file.is_file():
        return None
    record = json.loads(file.read_text())
    file.unlink()
    run = Run(**{**record, "results": [Result(**result) for result in record["results"]]})
    return dataclasses.replace(run, dropped=[*run.dropped, f"setting {setting.name}: {problem}"]) if problem else run


def wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> str:
    """Until all have ended, one has failed (the others would wait for it for ever), or it is too late; then why."""
    problem = ""
    while not problem and any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            problem = "out of time"
        time.sleep(0.1)
        codes = [process.returncode for process in processes if process.returncode]
        problem = problem or (f"a process ended with code {codes[0]}" if codes else "")
    for process in processes:
        process.kill()
        process.wait()
    return problem or next((f"a process ended with code {p.returncode}" for p in processes if p.returncode), "")


def places(arguments: argparse.Namespace, setting: Setting) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """For each process where it stands among several, and its environment."""
    base = environment(setting, arguments.out)
    if arguments.on_paper:
        return [({}, {**base, "JAX_PLATFORMS": "cpu,cuda"})]
    if setting.nodes == 1:
        return [({}, base)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = emulated_nodes(setting.nodes, arguments.tp // setting.nodes, port)
    return [
        ({"coordinator": n.coordinator, "process": n.process, "devices": n.local_device_ids}, {**base, **n.environment})
        for n in nodes
    ]


def environment(setting: Setting, folder: Path) -> dict[str, str]:
    """Of a process of this setting. XLA flags that the caller gives stay, and count more."""
    result = {**os.environ, **setting.environment}
    flags = [*setting.xla_flags, *_autotuning(folder), os.environ.get("XLA_FLAGS", "")]
    result["XLA_FLAGS"] = " ".join(flag for flag in flags if flag)
    result.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    result.setdefault("NCCL_NVLS_ENABLE", "0")
    return result


def _autotuning(folder: Path) -> list[str]:
    """Flags that load what is known of XLA's choices, and leave all that a process knows in a file of its own."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return []
    file = folder / _CHOICES
    known = file if file.is_file() else autotune_results.file()
    load = [f"--xla_gpu_load_autotune_results_from={known}"] if known else []
    return [f"--xla_gpu_dump_autotune_results_to={folder / _CHOSEN}", *load]


def keep_choices(folder: Path) -> None:
    """What a process chose anew is there for the next one."""
    chosen_now = folder / _CHOSEN
    if not chosen_now.is_file():
        return
    known = [file for file in (autotune_results.file(), folder / _CHOICES) if file is not None and file.is_file()]
    try:
        (folder / _CHOICES).write_text(autotune_results.merged([*known, chosen_now]))
    except DhelixError as error:  # compiles at the same time may have written into each other's text
        print(f"autotuning results are not kept: {error}", flush=True)
    chosen_now.unlink()


if __name__ == "__main__":
    main()
