"""Difference of every schedule on every mesh from the plain step, with even and uneven micro-batches and layers.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu \
        python tests/runtime/pipeline/matrix.py --out benchmarks/results

Each setting runs five optimizer steps in float32 on 8 CPU devices; `test_executor.py` runs a few of them. The
difference covers parameters, optimizer state and losses, relative to the largest magnitude of each leaf.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dhelix.passes.pipeline_fold import INTERLEAVED, LOCKSTEP, SCHEDULES
from dhelix.tests.runtime.pipeline.models import Setting, pipelined_steps, plain_steps

MESHES = {"PP 2": (2, 1, 1), "PP 4": (4, 1, 1), "PP 8": (8, 1, 1), "PP 2 x TP 2 x DP 2": (2, 2, 2)}
FILE = "pipeline_numerics.json"


def settings(mesh: str) -> Iterator[Setting]:
    """M below P, equal to P, and odd above P; layers that fill the chunks, or one more; ends alternately shared."""
    pp, tp, dp = MESHES[mesh]
    kinds = [(name, chunks) for name in SCHEDULES for chunks in ((2, 3) if name in INTERLEAVED and pp < 8 else (2,))]
    for (name, chunks), (turn, (microbatches, more)) in itertools.product(
        kinds, enumerate(itertools.product((pp - 1, pp, 2 * pp + 1), (0, 1)))
    ):
        yield Setting(
            pp, microbatches, chunks * pp + more, tp, dp, rows=2, shared=turn % 2 == 0, schedule=name, chunks=chunks
        )
    for name in LOCKSTEP:
        yield Setting(pp, 2 * pp + 1, 4 * pp, tp, dp, rows=2, shared=True, schedule=name, sends_beside=True)


def difference(setting: Setting) -> float:
    """The largest difference of all leaves of the state and of the losses."""
    actual, expected = pipelined_steps(setting), plain_steps(setting.alone)
    return max(map(_relative, jax.tree.leaves(actual), jax.tree.leaves(expected)))


def _relative(actual: Any, expected: Any) -> float:
    got, want = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-30))


def table(found: dict[str, dict[str, float]]) -> str:
    """The largest difference for each schedule and mesh, in Markdown."""
    lines = ["| | " + " | ".join(f"{mesh} ({len(found[mesh])} runs)" for mesh in MESHES) + " |", "|---|" + "---|" * 4]
    for name in SCHEDULES:
        runs = ([found[mesh][s.name] for s in settings(mesh) if s.schedule == name] for mesh in MESHES)
        lines.append(f"| {name} | " + " | ".join(f"{max(differences):.1e}" for differences in runs) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    found = {mesh: {setting.name: difference(setting) for setting in settings(mesh)} for mesh in MESHES}
    (out / FILE).write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
