"""The planner's memory and bytes of collectives beside those of compiled steps. No GPU is needed.

    python benchmarks/sharding/against_xla.py --out benchmarks/results/sharding_memory.json
    python benchmarks/sharding/against_xla.py --out FILE --models llama-7b --gpus 8
    python benchmarks/sharding/against_xla.py --out FILE --compiled FILE     # predicts again, and compiles nothing

A case takes 10 to 60 s. The file is written after each one, and cases that it has are not compiled again. The exit
status is 1 if a prediction of memory is off by more than 5 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dhelix.benchmarks.pages.markdown import table
from dhelix.benchmarks.sharding.cases import SEQUENCE, Case
from dhelix.launch.shard.job import model_sizes
from dhelix.models.presets import preset
from dhelix.passes.sharding.collective_times import Links, LinkTimes
from dhelix.passes.sharding.factors import Factor, Factors
from dhelix.passes.sharding.planner import Candidate, evaluate
from dhelix.passes.sharding.sizes import BF16_SUMS, SINGLE, Batch
from dhelix.passes.sharding.step_times import Compute, Job

MODELS, GPUS, MICROBATCHES = ("llama-7b", "llama-13b"), (8, 64, 1024), (1, 2)
STRATEGIES, BY_HAND = ("dp", "zero1", "zero2", "zero3"), ("zero1", min(GPUS))
"""Strategies under automatic sharding; the one that also runs under a shard_map, on so many GPUs."""

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
LIMIT = 0.05
_NODE, _GB = 8, 1e9
_HEADS = (
    "model", "GPUs", "strategy", "sharding", "M", "arguments, GB", "temporaries, GB", "in all, GB",
    "predicted, GB", "error", *(f"{kind}, GB" for kind in KINDS),
)  # fmt: skip


def cases(models: Sequence[str] = MODELS, gpus: Sequence[int] = GPUS) -> Iterator[Case]:
    """All cases, those of one model and number of GPUs together."""
    for model, size in itertools.product(models, gpus):
        for strategy, microbatches in itertools.product(STRATEGIES, MICROBATCHES):
            yield Case(model, size, strategy, microbatches)
        for microbatches in MICROBATCHES if size == BY_HAND[1] else ():
            yield Case(model, size, BY_HAND[0], microbatches, "shard_map")


def predicted(case: Case) -> dict[str, Any]:
    """What the planner says of a case, in the words of `compiled.compile_case`, and its parts of memory."""
    found = candidate_of(case)
    memory = found.memory
    arguments = memory.parameters + memory.optimizer
    parts = {name: round(size) for name, size in memory.parts().items() if size}
    moved = {kind: round(size) for kind, size in found.times.moved.items()}
    return {"arguments": round(arguments), "temporaries": round(memory.total - arguments), "parts": parts,
            "collectives": moved}  # fmt: skip


def candidate_of(case: Case) -> Candidate:
    """The planner's candidate of a case. Its times do not matter here."""
    config = preset(case.model, seq=SEQUENCE)
    job = Job(
        model_sizes(case.model, config, SEQUENCE, case.sharding == "auto"),
        Batch(1, SEQUENCE, case.microbatches),
        Compute(1e15, 1e12),
        SINGLE if case.sharding == "shard_map" and case.strategy in ("dp", "zero1") else BF16_SUMS,
        split="inside",
    )
    mesh = Factor(min(case.gpus, _NODE), -(-case.gpus // _NODE))
    return evaluate(job, Factors.named(case.strategy, mesh), LinkTimes(Links(within=1e11, between=1e11)))


def error(row: Mapping[str, Any]) -> float:
    """Relative error of the predicted memory."""
    ours, xla = (row[who]["arguments"] + row[who]["temporaries"] for who in ("predicted", "compiled"))
    return ours / xla - 1.0


def markdown(found: Sequence[Mapping[str, Any]]) -> str:
    """A table of all cases, and the largest errors. Where bytes differ, the planner's stand in parentheses."""
    errors = [error(row) for row in found]
    within = sum(abs(one) <= LIMIT for one in errors)
    equal = sum(all(_alike(row, kind) for kind in KINDS) for row in found)
    return (
        f"{within} of {len(found)} cases are within {LIMIT:.0%}; errors are {min(errors):+.1%} to {max(errors):+.1%}. "
        f"The bytes of all collectives are equal in {equal} cases.\n\n{table(_HEADS, [_cells(row) for row in found])}"
    )


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    ours, xla, off = row["predicted"], row["compiled"], error(row)
    sizes = (xla["arguments"], xla["temporaries"], xla["arguments"] + xla["temporaries"])
    shown = f"{off:+.1%}" if abs(off) <= LIMIT else f"**{off:+.1%}**"
    return (
        *(str(row[name]) for name in ("model", "gpus", "strategy", "sharding", "microbatches")),
        *(_gb(size) for size in sizes),
        _gb(ours["arguments"] + ours["temporaries"]),
        shown,
        *(_bytes(row, kind) for kind in KINDS),
    )


def _bytes(row: Mapping[str, Any], kind: str) -> str:
    ours, xla = (row[who]["collectives"].get(kind, 0) for who in ("predicted", "compiled"))
    if not ours and not xla:
        return ""
    return _gb(xla) if _alike(row, kind) else f"{_gb(xla)} ({_gb(ours)})"


def _alike(row: Mapping[str, Any], kind: str) -> bool:
    ours, xla = (row[who]["collectives"].get(kind, 0) for who in ("predicted", "compiled"))
    return ours == xla


def _gb(size: float) -> str:
    return f"{size / _GB:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True, help="file to write")
    made.add_argument("--compiled", type=Path, nargs="*", default=(), help="files whose cases are not compiled again")
    made.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    made.add_argument("--gpus", default=",".join(map(str, GPUS)), help="separated by commas")
    options = made.parse_args(arguments)
    known = {}
    for path in (*options.compiled, *([options.out] if options.out.exists() else [])):
        known |= {_key(row): row["compiled"] for row in json.loads(path.read_text())}
    rows = []
    for case in cases(options.models.split(","), [int(size) for size in options.gpus.split(",")]):
        found = known.get(_key(asdict(case))) or _compile(case)
        rows.append({**asdict(case), "compiled": found, "predicted": predicted(case)})
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
        print(" ".join(_cells(rows[-1])), flush=True)
    raise SystemExit(int(any(abs(error(row)) > LIMIT for row in rows)))


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in asdict(Case("", 1, "", 1)))


def _compile(case: Case) -> dict[str, Any]:
    from dhelix.runtime.compiler import deviceless

    os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda")
    deviceless.prepare_environment()
    from dhelix.benchmarks.sharding.compiled import compile_case  # imports JAX, which tables do not need

    return compile_case(case)


if __name__ == "__main__":
    main()
