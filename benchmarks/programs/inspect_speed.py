"""Times `dhelix inspect` and `dhelix plan` on large dumps.

    python benchmarks/programs/inspect_speed.py --out FOLDER               # no GPU; --dump takes another step
    python benchmarks/programs/inspect_speed.py --out FOLDER --profile     # where the time goes, for pstats

The step is one of two strands with 3,902 instructions. It is repeated until the dump has 10,505 or 100,000
instructions, or 50 MB. A repetition takes the state that the one before returns. Each time is that of a whole process
on one core, after a first call that fills Python's caches, with the peak of its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dhelix.launch.inspect.reading import dumps

STEP = Path(__file__).parents[2] / "tests/testdata/segment_times/strands_dp.hlo.pb.gz"
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
    python = [sys.executable, *(["-m", "cProfile", "-o", str(profile)] if profile else []), "-m", "dhelix", *command]
    start = time.perf_counter()
    process = subprocess.Popen(
        python,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    )
    _, status, used = os.wait4(process.pid, 0)
    return {
        "seconds": time.perf_counter() - start,
        "of the processor": used.ru_utime + used.ru_stime,
        "peak MiB": used.ru_maxrss / 1024,
        "status": os.waitstatus_to_exitcode(status),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dump", type=Path, default=STEP)
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = dumps.read_file(arguments.dump).module.to_text()
    step, plan, many, large = (arguments.out / f"{name}.hlo" for name in ("step", "plan", "many", "large"))
    for file, times in (
        (step, 1),
        (plan, -(-10_505 // instructions(text))),
        (many, -(-100_000 // instructions(text))),
        (large, -(-50_000_000 // len(text))),
    ):
        file.write_text("\n".join(repeated(text, times)) + "\n")
    timed(["inspect", str(step)], None)
    page, planned = arguments.out / "page.html", arguments.out / "plan.json"
    results = []
    for name, file, command in (
        ("inspect", step, ["inspect"]),
        ("inspect", many, ["inspect"]),
        ("inspect", large, ["inspect"]),
        ("inspect --html", many, ["inspect", "--html", str(page)]),
        ("plan, six settings", plan, ["plan", "--out", str(planned)]),
        ("plan, one setting", many, ["plan", "--settings=default", "--out", str(planned)]),
    ):
        profile = arguments.out / f"{len(results)}.prof" if arguments.profile else None
        made = file.read_text()
        result: dict[str, float | str] = {"command": name, "instructions": instructions(made), "MB": len(made) / 1e6}
        result |= timed([command[0], str(file), *command[1:]], profile)
        print(json.dumps(result), flush=True)
        results.append(result)
        (arguments.out / "inspect_speed.json").write_text(json.dumps(results, indent=1) + "\n")
    for file in (step, plan, many, large, page, planned):
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
