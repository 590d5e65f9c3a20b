"""Predicts measured steps again, with today's dhelix: the results of `strands/run.py` and `pipeline/run.py`.

    python benchmarks/prediction/predictions.py benchmarks/results/strands_h200x*.json --out DIR
    python benchmarks/prediction/predictions.py benchmarks/results/pipeline_h200x*.json --out DIR
    python benchmarks/prediction/predictions.py --tables DIR/predictions*.json    # prints the table

Needs no GPUs. Programs are compiled by today's passes with the costs of the available profiles. Steps measured under a
cap on NCCL channels are predicted from costs measured under the same cap (`benchmarks/results/costs_h200x2_channels*`).
With --unseen, each program is predicted as if none of its keys had been measured, and a cap is a slower link
(`unseen.py`); pipelines are then left out.
Results of several nodes, of context and expert parallelism and of sharded states are left out. So are variants,
settings and workloads that were removed. `measured` is the time of consecutive steps, at the clock of a warm GPU, as
users see it. A traced step, if there is one, is slightly shorter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dhelix.benchmarks.pipeline import run as pipeline
from dhelix.benchmarks.pipeline import tables as pipeline_tables
from dhelix.benchmarks.pipeline import variants as pipeline_variants
from dhelix.benchmarks.prediction.unseen import costs_under
from dhelix.benchmarks.strands import run as strands
from dhelix.benchmarks.strands import variants as strand_variants
from dhelix.benchmarks.strands.results import Run, read
from dhelix.errors import DhelixError
from dhelix.profiles.files.storage import SEARCH_PATH
from dhelix.profiles.hardware import gpu_name


@dataclass(frozen=True)
class Step:
    """The step times of one program in one run, in milliseconds.

    Attributes:
      file: name of the results file without its suffix.
      link: "NVLink", "capped NVLink" or "no peer-to-peer".
      traced: time of a step under the profiler; 0 if none was traced.
    """

    file: str
    link: str
    setting: str
    variant: str
    measured: float
    traced: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0


def steps_of(files: Sequence[Path], out: Path, unseen: bool = False) -> list[Step]:
    """All rows that can be predicted. Programs of one workload are compiled once.

    Args:
      unseen: whether the programs count as unmeasured.
    """
    wanted: dict[tuple[str, str], dict[str, list[str]]] = {}
    runs = [(file.stem, _read(file)) for file in files]
    for _, run in runs:
        for setting, variant, _, _ in _measured(run):
            variants = wanted.setdefault(_step(run), {}).setdefault(setting, [])
            variants += [variant] * (variant not in variants)
    found: dict[tuple[tuple[str, str], str, str], float] = {}
    for step, settings in wanted.items():
        gpu, workload = step
        for setting, variants in settings.items():
            for name, ms in _predicted(gpu, json.loads(workload), setting, variants, out, unseen).items():
                found[step, setting, name] = ms
    return [
        Step(file, _link(run, setting), setting, variant, measured, traced, round(found[key], 2))
        for file, run in runs
        for setting, variant, measured, traced in _measured(run)
        if (key := (_step(run), setting, variant)) in found
    ]


def _step(run: Run) -> tuple[str, str]:
    """The GPU, and the workload as JSON text."""
    gpus = str(run.on.get("gpus", strand_variants.GPU)).partition(",")[0]
    return gpu_name(gpus), json.dumps(run.workload, sort_keys=True)


def _read(file: Path) -> Run:
    return (pipeline_tables.read if file.name.startswith("pipeline") else read)(file)


def _measured(run: Run) -> Iterator[tuple[str, str, float, float]]:
    """Yields setting, variant, median step time, and time of a traced step (0 if none), both in milliseconds."""
    known = pipeline_variants.VARIANTS if "stages" in run.workload else strand_variants.VARIANTS
    if any(run.workload.get(name) for name in ("unrolled", "cp", "ep", "states")) or (
        run.workload.get("channels") and not costs_under(run.workload["channels"]).is_dir()
    ):
        return
    for result in run.results:
        setting = strand_variants.SETTINGS.get(result.setting)
        if result.steps_ms and result.variant in known and setting is not None and setting.nodes == 1:
            yield result.setting, result.variant, statistics.median(result.steps_ms), result.span_ms or 0.0


def _predicted(
    gpu: str, workload: dict[str, Any], setting: str, variants: Sequence[str], out: Path, unseen: bool
) -> dict[str, float]:
    """Milliseconds by variant. If nothing can be predicted, prints why and returns an empty dict."""
    stages = workload.get("stages", 0)
    if stages and unseen:
        return {}
    names = ("preset", "layers", "seq", "vocab", "microbatches", *(() if stages else ("channels", "shards")))
    given = {name: workload.get(name, 0) for name in names} | {"tp": workload["tp"] * (stages or 1)}
    given |= {"stages": stages} if stages else {k: v for k, v in workload.items() if k in ("dp", "sharding")}
    given |= {"hardware": gpu, "out": out, "settings": setting, "variants": "; ".join(variants), "name": "part"}
    module = pipeline if stages else strands
    options = module.parser().parse_args(
        ["--on_paper", *["--unseen"] * unseen, *(f"--{name}={value}" for name, value in given.items())]
    )
    if workload.get("channels"):
        os.environ[SEARCH_PATH] = str(costs_under(workload["channels"]))  # inherited by the processes of `measure`
    else:
        os.environ.pop(SEARCH_PATH, None)
    try:
        if stages:
            pipeline.complete(options)
            path = strands.measure(options, "part", pipeline.WORKER, lambda runs: "")
        else:
            options.settings, options.variants = [setting], list(variants)
            path = strands.measure(options, "part", show=lambda runs: "")
    except DhelixError as error:
        print(f"{workload}, {setting}: {error}", flush=True)
        return {}
    results = (pipeline_tables.read if stages else read)(path).results
    return {r.variant: r.predicted_ms for r in results if r.setting == setting and r.predicted_ms}


def _link(run: Run, setting: str) -> str:
    if strand_variants.SETTINGS[setting].link != "nvlink":
        return "no peer-to-peer"
    return "capped NVLink" if run.workload.get("channels") else "NVLink"


def table(steps: Sequence[Step]) -> str:
    """A row for each run and link, with the errors of its predictions."""
    groups: dict[tuple[str, str], list[Step]] = {}
    for step in steps:
        groups.setdefault((step.file, step.link), []).append(step)
    rows = [_row(f"`{file}`, {link}", of) for (file, link), of in groups.items()]
    if not groups:
        raise DhelixError("no row of these results can be predicted: name results of steps that ran on GPUs")
    rows.append(_row("**all**", list(steps)))
    head = "| run | rows | mean error | within 3 % | within 5 % | furthest off | of traced steps: rows, mean error |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows])


def _row(name: str, steps: Sequence[Step]) -> str:
    off = [abs(step.error) for step in steps]
    furthest = max(steps, key=lambda step: abs(step.error))
    traced = [abs(step.predicted / step.traced - 1.0) for step in steps if step.traced]
    close = [str(sum(error <= limit for error in off)) for limit in (0.03, 0.05)]
    cells = [name, str(len(steps)), f"{statistics.mean(off):.1%}", *close]
    cells.append(f"{furthest.variant} ({furthest.setting}) {furthest.error:+.1%}")
    cells.append(f"{len(traced)}, {statistics.mean(traced):.1%}" if traced else "")
    return f"| {' | '.join(cells)} |"


def written(paths: Iterable[Path]) -> list[Step]:
    """The steps that `main` wrote into files.

    Raises:
      DhelixError: a file is something else.
    """
    try:
        return [Step(**step) for path in paths for step in json.loads(path.read_text())]
    except (OSError, TypeError, ValueError) as error:
        raise DhelixError(f"not all of these are results of benchmarks/prediction/predictions.py ({error})") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="*", help="of strands/run.py and pipeline/run.py")
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    parser.add_argument("--name", default="predictions", help="of the file")
    parser.add_argument("--unseen", action="store_true", help="without what was measured of the programs themselves")
    parser.add_argument("--tables", type=Path, nargs="+", help="files of earlier calls; nothing is compiled")
    arguments = parser.parse_args()
    try:
        steps = (
            written(arguments.tables)
            if arguments.tables
            else steps_of(arguments.results, arguments.out, arguments.unseen)
        )
        text = table(steps)
    except DhelixError as error:
        sys.exit(str(error))
    if not arguments.tables:
        arguments.out.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(asdict(step)) for step in steps)
        Path(arguments.out, f"{arguments.name}.json").write_text(f"[\n{lines}\n]\n")
    print(text)


if __name__ == "__main__":
    main()
