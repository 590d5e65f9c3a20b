"""Turns result files into Markdown tables: one function for each kind of file.

    strands([Path("strands_h100x2_nvlink_m4_c.json")])    # the tables of benchmarks/strands/tables.py
    grid([Path("own_tiles_h100.json")])                   # any JSON of nested numbers

Each function takes the paths of a section's files and returns text that depends on their content alone.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dhelix.benchmarks.collective_matmul import tables as matmul_tables
from dhelix.benchmarks.collective_matmul.results import Results as MatmulResults
from dhelix.benchmarks.collectives import channel_fits as channel_study
from dhelix.benchmarks.collectives import simulated_tuning as tuning_study
from dhelix.benchmarks.inference import results as inference_results
from dhelix.benchmarks.orders import optimality as optimality_study
from dhelix.benchmarks.orders import robustness as robustness_study
from dhelix.benchmarks.orders import solve_time as solve_time_study
from dhelix.benchmarks.pages.markdown import table
from dhelix.benchmarks.pipeline import memory as pipeline_memory_study
from dhelix.benchmarks.pipeline import tables as pipeline_tables
from dhelix.benchmarks.prediction import held_out as held_out_study
from dhelix.benchmarks.prediction import layout_tables as layout_study
from dhelix.benchmarks.prediction import papers as papers_study
from dhelix.benchmarks.prediction import predictions as prediction_study
from dhelix.benchmarks.prediction import volumes as volumes_study
from dhelix.benchmarks.programs import policy_and_reference as policy_study
from dhelix.benchmarks.sharding import against_xla as sharding_memory_study
from dhelix.benchmarks.sharding import run as sharding_study
from dhelix.benchmarks.sharding import strategies as strategies_study
from dhelix.benchmarks.strands import results as strand_results
from dhelix.benchmarks.strands import tables as strand_tables
from dhelix.benchmarks.trainers import on_gpus as trainer_gpu_study
from dhelix.benchmarks.trainers import results as trainer_results


def strands(paths: Sequence[Path]) -> str:
    """Tables of `benchmarks/strands/run.py`. Files of one machine and workload are merged."""
    return strand_tables.tables([strand_results.read(path) for path in paths])


def early_strands(paths: Sequence[Path]) -> str:
    """Tables of the strand benchmark's first file format, which holds the median, fastest and slowest step."""
    rows = []
    for record in map(_load, paths):
        of = record["arguments"]
        workload = f"M {of['microbatches']}" + (", unrolled layers" if of.get("unrolled") else "")
        for r in record["results"]:
            times = f"{r['median_ms']:.1f} ({r['fastest_ms']:.1f}-{r['slowest_ms']:.1f})"
            rows.append((workload, r["setting"], r["variant"], times))
    return table(("workload", "setting", "program", "step ms (fastest-slowest)"), rows)


def pipelines(paths: Sequence[Path]) -> str:
    """Tables of `benchmarks/pipeline/run.py`."""
    return pipeline_tables.tables([pipeline_tables.read(path) for path in paths])


def pipeline_memory(paths: Sequence[Path]) -> str:
    """Tables of `benchmarks/pipeline/memory.py`, which reads its files itself."""
    assert {path.name for path in paths} <= {
        pipeline_memory_study.file_of(n).name for n in ("steps", "largest", "paper")
    }
    return pipeline_memory_study.tables()


def matmuls(paths: Sequence[Path]) -> str:
    """Tables of `benchmarks/collective_matmul/run.py`."""
    return matmul_tables.tables([MatmulResults.read(path) for path in paths])


def inference(paths: Sequence[Path]) -> str:
    """Tables of `benchmarks/inference/run.py`."""
    return inference_results.tables([inference_results.read(path) for path in paths])


def predictions(paths: Sequence[Path]) -> str:
    """Errors of predicted step times: a row for each run and link, and a row for all steps together."""
    return prediction_study.table(prediction_study.written(paths))


def held_out(paths: Sequence[Path]) -> str:
    """Errors of the contention model on pairs that it was not fitted to, a table for each profile."""
    parts = []
    for name, results in sorted(_load(paths[0]).items()):
        found = [held_out_study.HeldOut(**{k: v for k, v in r.items() if k != "verdict"}) for r in results]
        parts.append(f"**{name}**\n\n{held_out_study.markdown(found)}")
    return "\n\n".join(parts)


def optimality(paths: Sequence[Path]) -> str:
    """Simulated times of orders beside proved lower bounds."""
    return optimality_study.table(optimality_study.read(paths[0]))


def robustness(paths: Sequence[Path]) -> str:
    """Speed-ups of orders under changed costs."""
    return robustness_study.table([robustness_study.Row(**r) for r in _load(paths[0])["results"]])


def solve_time(paths: Sequence[Path]) -> str:
    """Search time by size of the program."""
    return solve_time_study.table([solve_time_study.Row(**r) for r in _load(paths[0])["results"]])


def policy_and_reference(paths: Sequence[Path]) -> str:
    """Predicted steps of a policy with and without a reference model, a table for each file."""
    tables = [policy_study.table([policy_study.Row(**r) for r in _load(path)]) for path in paths]
    return "\n\n".join(f"**{path.stem}**\n\n{text}" for path, text in zip(paths, tables, strict=True))


def sharding(paths: Sequence[Path]) -> str:
    """The numbers of AMSP beside the planner's."""
    return "\n\n".join(sharding_study.markdown(_load(path)) for path in paths)


def sharding_memory(paths: Sequence[Path]) -> str:
    """The planner's memory and bytes of collectives beside those of compiled steps."""
    return "\n\n".join(sharding_memory_study.markdown(_load(path)) for path in paths)


def strategies(paths: Sequence[Path]) -> str:
    """Strategies for model states over two GPUs, the planner's choice, and XLA's FSDP."""
    return strategies_study.tables([strategies_study.read(path) for path in paths])


def simulated_tuning(paths: Sequence[Path]) -> str:
    """Searches for settings of collectives, compared on simulated overlaps."""
    return "\n\n".join(tuning_study.markdown(_load(path)) for path in paths)


def channel_grid(paths: Sequence[Path]) -> str:
    """Errors of the channel model on measured overlaps, and their contention."""
    return "\n\n".join(channel_study.markdown(_load(path)) for path in paths)


def trainers(paths: Sequence[Path]) -> str:
    """Trainers of other people, plain and under `dhelix run`."""
    return trainer_results.table([trainer_results.Result.of(r) for path in paths for r in _load(path)["results"]])


def trainers_on_gpus(paths: Sequence[Path]) -> str:
    """MaxText on GPUs, plain and under `dhelix run`."""
    return "\n\n".join(trainer_gpu_study.markdown(_load(path)) for path in paths)


def records(paths: Sequence[Path]) -> str:
    """A list of flat records: a column for each number or name. Lists and nested records are left out."""
    parts = []
    for path in paths:
        loaded = _load(path)
        rows = loaded if isinstance(loaded, list) else loaded.get("results") or loaded["rows"]
        heads = [k for k in rows[0] if all(isinstance(r.get(k), int | float | str | bool) for r in rows)]
        body = table(heads, [[cell(row[head]) for head in heads] for row in rows])
        parts.append(f"**{path.stem}**\n\n{body}" if len(paths) > 1 else body)
    return "\n\n".join(parts)


def published(paths: Sequence[Path]) -> str:
    """DHelix's numbers beside those of `benchmarks/prediction/papers.py` and `volumes.py`."""
    others = {
        "Shares of a step's time, MFU, and hidden communication": papers_study.shares(_load(paths[0])),
        "Table 1: bytes that a GPU of Llama-3.1-405B sends in a step, GiB": volumes_study.table_1(),
    }
    parts = [records(paths)]
    for title, rows in others.items():
        parts.append(f"**{title}.**\n\n{table(list(rows[0]), [[cell(v) for v in row.values()] for row in rows])}")
    return "\n\n".join(parts)


def layouts(paths: Sequence[Path]) -> str:
    """Layouts of two GPUs, predicted, and measured if they were."""
    return layout_study.tables(paths)


def agreement(paths: Sequence[Path]) -> str:
    """Relative differences of the same operators in two profiles."""
    heads = ("measured", "setting", "what", "in both", "compared", "median difference", "90 % are below", "bias")
    rows = [
        (name.replace("_", " "), r["setting"], r["what"], cell(r["common"]), cell(r["compared"]))
        + tuple(f"{r[k]:.1%}" for k in ("median", "p90", "bias"))
        for name, compared in _load(paths[0]).items()
        for r in compared["agreement"]
    ]
    return table(heads, rows)


def grid(paths: Sequence[Path]) -> str:
    """Nested numbers: a table of rows and columns for each innermost pair of levels. Lists count as their median."""
    parts = []
    for path in paths:
        loaded = _load(path)
        for run in loaded if isinstance(loaded, list) else [loaded]:
            provenance = run.get("on") or {}
            on = ", ".join(str(provenance[k]) for k in ("gpu", "gpus", "machine", "jax", "date") if provenance.get(k))
            values = {k: v for k, v in run.items() if isinstance(v, Mapping) and k != "on"}
            parts += [f"**{path.stem}**" + f" ({on})" * bool(on), *_grids((), values)]
    return "\n\n".join(parts)


def _grids(names: tuple[str, ...], values: Mapping[str, Any]) -> list[str]:
    inner = {k: v for k, v in values.items() if isinstance(v, Mapping)}
    if not inner:
        rows = [(k, cell(v)) for k, v in values.items()]
        return [_titled(names, table(("", names[-1] if names else "value"), rows))] if rows else []
    if all(not isinstance(v, Mapping) for row in inner.values() for v in row.values()):
        heads = list(dict.fromkeys(k for row in inner.values() for k in row))
        rows = [[name, *(cell(row[head]) if head in row else "" for head in heads)] for name, row in inner.items()]
        return [_titled(names, table(("", *heads), rows))]
    return [text for name, row in inner.items() for text in _grids((*names, name), row)]


def _titled(names: Sequence[str], text: str) -> str:
    return f"*{', '.join(names)}*\n\n{text}" if names else text


def cell(value: Any) -> str:
    """Numbers with four significant digits, lists as their median."""
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, Sequence):
        return cell(statistics.median(value)) if value else ""
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value)}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def _load(path: Path) -> Any:
    return json.loads(path.read_text())
