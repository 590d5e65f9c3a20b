"""Runs trainers of other people plain and under `dhelix run` on 8 CPU devices, and compares their losses.

    python benchmarks/trainers/run.py --environments DIR --out real_trainers.json
    python benchmarks/trainers/run.py --environments DIR --cases maxtext,levanter-gpt2
    python benchmarks/trainers/run.py --list

Nothing of a trainer is changed. DIR gets virtual environments for MaxText and Levanter (2 GB each), Keras and Tunix
(less than 1 GB each), with pinned versions, and a folder for each run. They need no GPU, and Python 3.12 or newer.
dhelix comes from this repository, by PYTHONPATH.

Losses are compared in all digits of a float32. If some differ, the result says how far. Then both programs also run
without the passes of XLA that round differently in different programs: the algebraic simplifier (it writes a * x / y as
x * (a / y) where it sees that a and y are broadcast), and fusion. dhelix then sums gradients over devices where the
program does, in each micro-batch, instead of once at the end. The exit status is 1 if losses differ there, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from dhelix.benchmarks.trainers.cases import CASES, HERE, STEPS, Case
from dhelix.benchmarks.trainers.results import Program, Result, Run, table

_COMPILED = re.compile(r"Finished XLA compilation of (\S+) in ([\d.]+) sec")
_VERSIONS = ("jax", "jaxlib", "flax", "equinox", "optax")
_LIMIT = 1800.0  # seconds of one run
_EXACT = "--xla_disable_hlo_passes=algsimp,fusion,small-while-loop-hoisting"


def main() -> None:
    known = {case.name: case for case in CASES}
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--environments", type=Path, help="folder for virtual environments and runs")
    made.add_argument("--cases", default="", help="names, with commas between them; default: all")
    made.add_argument("--out", type=Path, help="write results to this JSON file; other cases in it stay")
    made.add_argument("--list", action="store_true", help="print the names of all cases and stop")
    arguments = made.parse_args()
    if arguments.list:
        print("\n".join(known))
        return
    names = [name for name in arguments.cases.split(",") if name] or list(known)
    if unknown := [name for name in names if name not in known]:
        made.error(f"no case {unknown[0]!r}; the cases are {', '.join(known)}")
    if arguments.environments is None:
        made.error("give --environments, a folder with room for 6 GB")
    top = arguments.environments.resolve()
    results: dict[str, Result] = {}
    if arguments.out and arguments.out.exists():
        results = {one.name: one for one in map(Result.of, json.loads(arguments.out.read_text())["results"])}
    for name in names:
        results[name] = compare(known[name], top)
        rows = [asdict(results[name]) for name in known if name in results]
        print(json.dumps(rows[-1], indent=1), file=sys.stderr, flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps({"results": rows}, indent=1) + "\n")
    done = [results[name] for name in names]
    print(table(done))
    sys.exit(not all(one.equal or one.equal_exactly for one in done))


def compare(case: Case, top: Path) -> Result:
    """Runs one trainer plain and under `dhelix run`."""
    python = environment(case.environment, top)
    plain, _ = run(case, python, top, interleaved=False)
    ours, programs = run(case, python, top, interleaved=True)
    found = Result(case.name, case.mesh, versions(python, case.trainer), plain, ours, programs)
    if found.equal:
        return found
    exact = tuple(run(case, python, top, interleaved, _EXACT)[0] for interleaved in (False, True))
    return replace(found, exact=exact)


def environment(name: str, top: Path) -> Path:
    """The Python of a virtual environment, which is made if it is missing or has other pins."""
    folder, pins = top / name, HERE / f"{name}.txt"
    python, stamp = folder / "bin" / "python", folder / "pins.txt"
    if stamp.exists() and stamp.read_text() == pins.read_text():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(pins)]
    subprocess.run(install, check=True)
    stamp.write_text(pins.read_text())
    return python


def versions(python: Path, trainer: str) -> dict[str, str]:
    """Versions of the trainer and of the libraries that compile its step."""
    names = [*filter(None, [trainer]), *_VERSIONS]
    code = (
        "import importlib.metadata as m, json; have = {d.name.lower() for d in m.distributions()}; "
        f"print(json.dumps({{n: m.version(n) for n in {names!r} if n in have}}))"
    )
    return json.loads(subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout)


def variables(case: Case, top: Path, flags: str) -> dict[str, str]:
    """The environment of a run: 8 CPU devices, no compilation cache, flags of XLA, and this dhelix."""
    link = top / "path" / "dhelix"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(HERE.parents[1])
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "DHELIX")) and k != "VIRTUAL_ENV"}
    ours = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_LOG_COMPILES": "1",
        "XLA_FLAGS": flags,
        "PYTHONPATH": str(link.parent),
        "PYTHONUNBUFFERED": "1",
    }
    return {**kept, **ours, **case.variables}


def run(case: Case, python: Path, top: Path, interleaved: bool, flags: str = "") -> tuple[Run, tuple[Program, ...]]:
    """Runs a trainer to its end. Raises SystemExit with the end of its output if it fails."""
    folder = top / "runs" / case.name / (("dhelix" if interleaved else "plain") + "-exact" * bool(flags))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    report = folder / "report.json"
    options = folder / "options.toml"
    options.write_text('[options]\ndisable = ["replica-sums"]\n' if flags else "")
    before = ["-m", "dhelix", "run", "--report", str(report), "--options", str(options)] if interleaved else []
    command = [str(python), *before, *case.arguments(folder)]
    start, first, lines = time.monotonic(), 0.0, []
    with subprocess.Popen(
        command,
        cwd=folder,
        env=variables(case, top, flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if not first and re.search(case.first, line):
                first = time.monotonic() - start
            if time.monotonic() - start > _LIMIT:
                process.kill()
    seconds, text = time.monotonic() - start, "".join(lines)
    (folder / "output.txt").write_text(text)
    losses = case.losses(folder, text) if process.returncode == 0 else ()
    if len(losses) != STEPS:
        raise SystemExit(f"{case.name}: exit status {process.returncode}, losses {losses}\n{text[-3000:]}")
    compiled = sum(float(found) for name, found in _COMPILED.findall(text) if "step" in name)
    programs = tuple(map(Program.of, json.loads(report.read_text())["programs"])) if interleaved else ()
    return Run(losses, round(first, 1), round(compiled, 1), round(seconds, 1)), programs


if __name__ == "__main__":
    main()
