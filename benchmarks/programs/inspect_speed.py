"""Times `dhelix inspect` and `dhelix plan` on large dumps.

    python benchmarks/programs/inspect_speed.py step.hlo --out FOLDER               # the scheduled HLO of a train step
    python benchmarks/programs/inspect_speed.py step.hlo --out FOLDER --profile     # where the time goes

The step is repeated until the dump has 100,000 instructions, and until it has 50 MB. A repetition takes the state that
the one before returns. Each time is that of a whole process on one core, with the peak of its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

CORE = 0
NAME = re.compile(r"%[\w.\-]+")


def instructions(text: str) -> int:
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", text, re.MULTILINE))


def parts(text: str) -> list[str]:
    """The types in a tuple's type."""
    found, depth, begin = [], 0, 1
    for at, letter in enumerate(text):
        depth += (letter in "({[") - (letter in ")}]")
        if (letter == "," and depth == 1) or not depth:
            found.append(re.sub(r"/\*.*?\*/", "", text[begin:at]).strip())
            begin = at + 1
        if not depth:
            break
    return found


def repeated(text: str, times: int) -> Iterator[str]:
    """The lines of a module that runs the step of `text` several times."""
    header, _, rest = text.partition("\n")
    called, _, entry = rest.partition("\nENTRY ")
    first, *lines = entry.split("\n")
    lines = lines[: lines.index("}")]
    root = next(line for line in lines if line.lstrip().startswith("ROOT "))
    parameters = [line for line in lines if re.search(r"\bparameter\(\d+\)", line)]
    results = parts(root.partition(" = ")[2])
    carried = {}
    for line in parameters:
        match = re.match(r"\s*(%[\w.\-]+) = (.*?) parameter\((\d+)\)", line)
        assert match is not None
        name, kind, number = match[1], match[2], int(match[3])
        if number < len(results) and results[number] == kind:
            carried[name] = (kind, number)
    fixed = {re.match(r"\s*(%[\w.\-]+)", line)[1] for line in parameters}  # type: ignore[index]
    root_name = NAME.search(root)[0]  # type: ignore[index]

    def copy(part: str, n: int) -> str:
        part = re.sub(r"channel_id=(\d+)", lambda found: f"channel_id={int(found[1]) + 100_000 * n}", part)
        return NAME.sub(lambda found: found[0] if found[0] in fixed else f"{found[0]}.r{n}", part)

    yield header
    for n in range(times):
        yield copy(called, n)
    yield "\nENTRY " + first
    yield from parameters
    for n in range(times):
        state = {name: f"{name}.s{n}" for name in carried} if n else {}
        for name, (kind, number) in carried.items() if n else ():
            yield f"  {state[name]} = {kind} get-tuple-element({root_name}.r{n - 1}), index={number}"
        for line in lines:
            if line in parameters:
                continue
            line = NAME.sub(lambda found, state=state: state.get(found[0], found[0]), copy(line, n))
            yield line if n == times - 1 else line.replace("ROOT ", "", 1)
    yield "}"


def timed(command: list[str], profile: Path | None) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    python = [sys.executable, *(["-m", "cProfile", "-o", str(profile)] if profile else []), "-m", "dhelix", *command]
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(pinned)[CORE]})
    done = subprocess.run(python, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    os.sched_setaffinity(0, pinned)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_mib": after.ru_maxrss / 1024,
        "status": done.returncode,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=Path)
    parser.add_argument("--instructions", type=int, default=100_000)
    parser.add_argument("--megabytes", type=float, default=50.0)
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no_plan", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = arguments.dump.read_text()
    results = []

    def run(name: str, file: Path, *command: str) -> None:
        profile = arguments.out / f"{name.replace(' ', '_')}.prof" if arguments.profile else None
        size = file.read_text()
        result = {"what": name, "instructions": instructions(size), "megabytes": len(size) / 1e6}
        result |= timed([*command], profile)
        print(json.dumps(result), flush=True)
        results.append(result)
        (arguments.out / "inspect_speed.json").write_text(json.dumps(results, indent=1))

    run("inspect", arguments.dump, "inspect", str(arguments.dump))
    if not arguments.no_plan:
        out = str(arguments.out / "plan.json")
        run("plan", arguments.dump, "plan", str(arguments.dump), "--out", out)
    many, large = arguments.out / "many.hlo", arguments.out / "large.hlo"
    for file, times in (
        (many, -(-arguments.instructions // instructions(text))),
        (large, -(-int(arguments.megabytes * 1e6) // len(text))),
    ):
        file.write_text("\n".join(repeated(text, times)) + "\n")
    run("inspect many", many, "inspect", str(many))
    run("inspect large", large, "inspect", str(large))
    page = arguments.out / "many.html"
    run("page of many", many, "inspect", str(many), "--html", str(page))
    for file in (many, large, page):
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
