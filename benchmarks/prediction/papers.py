"""Simulates the training runs that DHelix published, and compares the speed-ups (arXiv 2411.15871, figures 11 to 13).

    python benchmarks/prediction/papers.py --out benchmarks/results/papers.json --processes 14      # without a GPU

Each row is one bar of a figure: a model, a cluster, and a system against Megatron-LM. The clusters are those of
`profiles/papers/clusters.py`. One of their constants was changed after the first comparison: the A40's bandwidth inside
a node, from 16 to 23.5 GB/s, because TP took more of the time than the 29 % of section 6.3.1. The order of Megatron-LM,
TP 4, and keys of all heads were assumed after it, too. No constant was chosen by the speed-ups. What the paper's text
leaves open is assumed alike for all rows:

- TP 8 inside a node, and TP 4 for the smallest models. The paper scales TP and PP with the size of the model (section
  6.2.1), and gives them in the figures only. CP and DP between nodes, PP 1: with pipelines, the bubble is 1 of 128.
- 8 M tokens a step on 64 GPUs, micro-batches of one sequence, optimizer states over DP (ZeRO-1), no recomputation.
- Megatron-LM hides reduce-scatters beside weight gradients, and CP's messages beside attention (`megatron`).
- Of the models with experts, one of four pipeline stages is simulated: a quarter of the layers on 16 GPUs, EP 8 in a
  node, 1600 sequences a step.
- With CP, all query heads have keys and values of their own. With the 8 of Llama 3, CP would take 2 % of Llama-39B's
  time at CP 2 and S 16384, and the paper has 28 % (section 6.4).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhelix.models.presets import PRESETS

TOKENS = 8 * 2**20
BASELINE = "Megatron-LM"
SYSTEM_OF = {"Intra-batch": "intra-batch", "Wavelet+": "wavelet", "DHelix": "strands"}


@dataclass(frozen=True)
class Run:
    """One training run of the paper.

    Attributes:
      workload: its name in `profiles/papers/published.py`.
      figure: where its numbers are.
      capacity: capacity factor of experts; None without experts.
    """

    cluster: str
    preset: str
    workload: str
    figure: str
    seq: int
    cp: int = 1
    capacity: float | None = None

    @property
    def systems(self) -> tuple[str, ...]:
        """The systems to simulate, Megatron-LM's first."""
        intra = ("intra-batch",) if self.figure == "figure 11" else ()
        wavelet = ("wavelet",) if self.figure == "figure 11" or self.capacity else ()
        return ("megatron", *intra, *wavelet, "strands")

    def options(self, gpus: int) -> dict[str, Any]:
        """The fields of `Options` of this run."""
        if self.capacity:
            layers = PRESETS[self.preset].layers // 4
            return {
                "preset": self.preset, "layers": layers, "seq": self.seq, "capacity": self.capacity,
                "mesh": "dp=2,ep=8,tp=1", "batch": 1600, "microbatches": 100, "states": "zero1",
            }  # fmt: skip
        tp = 4 if PRESETS[self.preset].hidden <= 4096 else 8
        dp = gpus // tp // self.cp
        batch = TOKENS // self.seq
        mesh = f"dp={dp},cp={self.cp},tp={tp}" if self.cp > 1 else f"dp={dp},tp={tp}"
        return {
            "preset": self.preset, "seq": self.seq, "vocab": 32_000, "mesh": mesh, "batch": batch,
            "microbatches": batch // dp, "states": "zero1",
        }  # fmt: skip


_LLAMA = ("8b", "25b", "39b")
_GPT = ("6.7b", "18b", "30b")
RUNS = (
    *(Run("dhelix-a40", f"llama-{size}", f"Llama-{size.upper()}, S 8192", "figure 11", 8192) for size in _LLAMA),
    *(Run("dhelix-a40", f"gpt-{size}", f"GPT-{size.upper()}, S 8192", "figure 11", 8192) for size in _GPT),
    *(Run("dhelix-a40", f"llama-{size}", f"Llama-{size.upper()}, S 16384, CP 2", "figure 12", 16384, 2)
      for size in _LLAMA),
    *(Run("dhelix-a40", f"gpt-{size}", f"GPT-{size.upper()}, S 16384, CP 2", "figure 12", 16384, 2) for size in _GPT),
    Run("dhelix-a800", "llama-66b", "Llama-66B, S 16384, TP 8, CP 2", "figure 13a", 16384, 2),
    Run("dhelix-a800", "llama-66b", "Llama-66B, S 32768, TP 8, CP 4", "figure 13a", 32768, 4),
    Run("dhelix-a40", "phi-moe-31b", "Phi-31B, EP 8, DP 16, PP 4, capacity 6", "table 6", 3072, capacity=6),
    Run("dhelix-a800", "phi-moe-42b", "Phi-42B, capacity 8", "section 6.3.2", 3072, capacity=8),
)  # fmt: skip


def simulate(run: Run, system: str) -> dict[str, Any]:
    """One simulated step as JSON, or the reason why there is none."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from dhelix.errors import DhelixError
    from dhelix.launch.simulate import programs
    from dhelix.launch.train import trainer
    from dhelix.launch.train.options import Options
    from dhelix.passes.simulation.cluster_costs import ClusterCosts
    from dhelix.profiles.clusters import known

    cluster = known.find(run.cluster)
    try:
        options = Options(**run.options(cluster.gpus))
        config = trainer.configuration(options)
        if run.cp > 1:
            config = dataclasses.replace(config, kv_heads=config.heads)
        return programs.simulated_options(options, cluster, system, ClusterCosts.of(cluster), config).to_json()
    except DhelixError as error:
        return {"refused": str(error)}


def rows(run: Run, steps: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The published speed-ups of a run beside ours."""
    from dhelix.profiles.papers import clusters

    base = steps[run.systems[0]]
    found = []
    for number in clusters.get(run.cluster).numbers:
        ours = steps.get(SYSTEM_OF.get(number.system, ""))
        if number.quantity != "speed-up over Megatron-LM" or number.upper or not ours:
            continue
        if number.workload != run.workload or number.where != run.figure:
            continue
        if "refused" in base or "refused" in ours:
            row = {"refused": base.get("refused") or ours.get("refused")}
        else:
            ratio = base["seconds"] / ours["seconds"]
            off = 100 * (ratio - number.value)
            close = abs(off) <= max(3.0, 20.0 * (number.value - 1.0))
            row = {"simulated": round(ratio, 3), "gain_off_points": round(off, 1), "within": close}
        found.append({"cluster": run.cluster, "workload": run.workload, "where": run.figure, "system": number.system,
                      "published": number.value, **row})  # fmt: skip
    return found


_39B, _PHI = "Llama-39B, S 16384, CP 2", "Phi-31B, EP 8, DP 16, PP 4, capacity 6"
_66B, _66B_LONG = "Llama-66B, S 16384, TP 8, CP 2", "Llama-66B, S 32768, TP 8, CP 4"
# Where, workload, what, published %, our workload, system, and the axis over which compute waits, or a value of a step.
SHARES = (
    ("figure 3", "Llama-39B", "time in communication, TP and CP", 55.0, _39B, "megatron", "exposed"),
    ("section 6.4", _39B, "time in communication, CP", 28.0, _39B, "megatron", "cp"),
    ("section 6.3.1", "CP 2", "time in communication, TP", 29.0, _39B, "megatron", "tp"),
    ("figure 3", "Phi-31B", "time in communication, EP", 34.3, _PHI, "megatron", "ep"),
    ("section 6.3.1", _66B, "time in communication, TP", 10.0, _66B, "megatron", "tp"),
    ("section 6.3.1", _66B, "MFU of Megatron-LM", 60.0, _66B, "megatron", "mfu"),
    ("section 6.3.1", _66B_LONG, "MFU of Megatron-LM", 52.0, _66B_LONG, "megatron", "mfu"),
    ("section 6.3.1", _66B_LONG, "MFU of DHelix", 64.0, _66B_LONG, "strands", "mfu"),
    ("figure 16", _66B_LONG, "hidden by DHelix", 82.0, _66B_LONG, "strands", "hidden"),
    ("section 6.2.1", "S 8192", "hidden by Intra-batch", 26.1, "S 8192", "intra-batch", "hidden"),
    ("section 6.2.1", "S 8192", "hidden by Wavelet+", 39.9, "S 8192", "wavelet", "hidden"),
    ("section 6.2.1", "S 8192", "hidden by DHelix", 83.0, "S 8192", "strands", "hidden"),
)
"""Published shares of DHelix. "S 8192" stands for the mean over the models of figure 11."""


def shares(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Published shares in percent beside those of the simulated steps."""
    return [
        {"where": where, "workload": workload, "what": what, "published %": published, "simulated %": round(ours, 1)}
        for where, workload, what, published, name, system, kind in SHARES
        if (ours := _share(report, name, system, kind)) is not None
    ]


def _share(report: dict[str, Any], workload: str, system: str, kind: str) -> float | None:
    chosen = [one["systems"].get(system, {}) for one in report["steps"] if one["workload"].endswith(workload)
              or one["workload"] == workload]  # fmt: skip
    found = [100.0 * _value(step, kind) for step in chosen if "seconds" in step]
    return sum(found) / len(found) if found else None


def _value(step: dict[str, Any], kind: str) -> float:
    if kind in ("mfu", "hidden"):
        return step[kind]
    if kind == "exposed":
        return step["parts"]["exposed"] / step["seconds"]
    waits = [one["seconds"] for one in step["exposed_by"] if one["collective"].endswith(f"over {kind}")]
    return sum(waits) / step["seconds"]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--processes", type=int, default=1)
    made.add_argument("--only", default="", help="runs whose name contains this text")
    options = made.parse_args()
    runs = [run for run in RUNS if options.only in run.workload]
    asked = [(run, system) for run in runs for system in run.systems]
    steps: dict[Run, dict[str, dict[str, Any]]] = {run: {} for run in runs}
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.processes, spawn, max_tasks_per_child=1) as pool:
        tasks = {pool.submit(simulate, run, system): (run, system) for run, system in asked}
        for task in concurrent.futures.as_completed(tasks):
            run, system = tasks[task]
            steps[run][system] = task.result()
            print(run.workload, system, steps[run][system].get("seconds") or steps[run][system], flush=True)
    compared = [row for run in runs for row in rows(run, steps[run])]
    report = {
        "rows": compared,
        "within": sum(row.get("within", False) for row in compared),
        "of": len(compared),
        "steps": [{**dataclasses.asdict(run), "systems": steps[run]} for run in runs],
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: report[key] for key in ("rows", "within", "of")}, indent=1))


if __name__ == "__main__":
    main()
