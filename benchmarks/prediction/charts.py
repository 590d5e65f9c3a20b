"""Simulates how much two strands gain by bandwidth, TP size and sequence length, and larger TP against more PP.

    python benchmarks/prediction/charts.py --processes 2 --out charts.json
    python benchmarks/prediction/charts.py --out charts.json --draw docs/images/simulated-charts.png

All steps are on 64 H100s in 8 nodes, with InfiniBand of 400 Gb/s per GPU. Where the bandwidth within a node varies, no
collective has a measured time. The other charts have the measured times of NVLink. States are sharded by ZeRO-1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

CLUSTER = "h100-infiniband"
SYSTEMS = ("xla", "strands")
BATCH_8B, BATCH_70B = 256, 128


def _step(chart: str, x: str, mesh: str, **options: Any) -> dict[str, Any]:
    shared = {"preset": "llama-8b", "states": "zero1", "batch": BATCH_8B}
    return {"chart": chart, "x": x, "constants": {}, "options": {**shared, "mesh": mesh, **options}}


def steps() -> list[dict[str, Any]]:
    """What is simulated: chart, place on its axis, options of the step, and constants of the cluster."""
    found = []
    for bandwidth in (12, 25, 50, 100, 200, 330):
        one = _step("bandwidth", f"{bandwidth}", "dp=8,tp=8", microbatches=32)
        found.append({**one, "constants": {"inside_gb_per_second": bandwidth}})
    for tp in (1, 2, 4, 8):
        remat = "full" if tp == 1 else None
        found.append(_step("tp", f"{tp}", f"dp={64 // tp},tp={tp}", microbatches=4 * tp, remat=remat))
    for seq in (2048, 4096, 8192, 16384, 32768):
        batch = BATCH_8B * 8192 // seq
        found.append(_step("sequence", f"{seq}", "dp=8,tp=8", seq=seq, batch=batch, microbatches=max(batch // 8, 2)))
    for tp, pp in ((8, 1), (8, 2), (8, 4), (4, 4), (4, 8), (2, 8)):
        dp = 64 // tp // pp
        pipeline = {"pp": pp} if pp > 1 else {}
        states = {"states": "zero1" if dp > 1 else None}
        found.append(
            _step("tp against pp", f"TP {tp}, PP {pp}", f"dp={dp},tp={tp}", preset="llama-3.1-70b", batch=BATCH_70B,
                  microbatches=BATCH_70B // dp, **states, **pipeline)
        )  # fmt: skip
    return found


def simulate(step: dict[str, Any], system: str) -> dict[str, Any]:
    """One step as JSON, or why there is none."""
    from dhelix.errors import DhelixError
    from dhelix.launch.simulate import programs
    from dhelix.launch.train.options import Options
    from dhelix.passes.simulation.cluster_costs import ClusterCosts
    from dhelix.profiles.clusters import known
    from dhelix.profiles.files import storage
    from dhelix.profiles.profile import Profile, Section

    given = {name: value for name, value in step["options"].items() if value is not None}
    if "pp" in given:
        given["pipeline"] = "1f1b" if system == "xla" else "w"
    cluster, profile = known.find(CLUSTER).with_constants(step["constants"], "the chart"), None
    if step["constants"]:  # kernels as measured, but no collectives
        measured = storage.find("H100", "nvlink")
        assert measured is not None  # it is shipped
        section = measured.section("default")
        profile = Profile("H100", "nvlink", sections={"default": Section("default", operators=section.operators)})
    try:
        model = ClusterCosts.of(cluster, profile=profile)
        return programs.simulated_options(Options(**given), cluster, system, model).to_json()
    except DhelixError as error:
        return {"refused": str(error)}


def rows(step: dict[str, Any], found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A row of the table: XLA's order beside two strands."""
    row = {"chart": step["chart"], "x": step["x"], "model": step["options"]["preset"], "mesh": step["options"]["mesh"]}
    for system in SYSTEMS:
        one = found[system]
        row[f"{system} ms"] = round(1e3 * one["seconds"], 1) if "seconds" in one else one["refused"]
        row[f"{system} MFU %"] = round(100 * one["mfu"], 1) if "seconds" in one else ""
        row[f"{system} GB"] = round(one["memory"] / 1e9, 1) if "seconds" in one else ""
    if all("seconds" in found[system] for system in SYSTEMS):
        row["gain"] = round(found["xla"]["seconds"] / found["strands"]["seconds"], 3)
    return row


def draw(report: dict[str, Any], path: Path) -> None:
    """Draws MFU over bandwidth, TP size and sequence length, and for TP against PP."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    titles = {
        "bandwidth": "Llama-8B, DP 8 x TP 8: GB/s of a GPU within a node", "tp": "Llama-8B: size of TP",
        "sequence": "Llama-8B, DP 8 x TP 8: sequence length", "tp against pp": "Llama-70B: TP against PP",
    }  # fmt: skip
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    for axis, (chart, title) in zip(axes.flat, titles.items(), strict=True):
        shown = [row for row in report["rows"] if row["chart"] == chart and "gain" in row]
        places = range(len(shown))
        for number, (system, color) in enumerate(zip(SYSTEMS, ("#8a8f98", "#2b6cb0"), strict=True)):
            values = [row[f"{system} MFU %"] for row in shown]
            hatches = ["///" if row[f"{system} GB"] > 80.0 else "" for row in shown]
            left = [place + 0.4 * number - 0.2 for place in places]
            axis.bar(left, values, 0.4, color=color, label=system, hatch=hatches, edgecolor="white", linewidth=0)
        for place, row in zip(places, shown, strict=True):
            top = max(row["xla MFU %"], row["strands MFU %"])
            axis.text(place, top + 1, f"{row['gain']:.2f}x", ha="center", fontsize=9)
        axis.set_xticks(list(places), [row["x"] for row in shown])
        axis.set_title(title, fontsize=10)
        axis.set_ylim(0, 70)
        axis.set_ylabel("simulated MFU, %")
        axis.spines[["top", "right"]].set_visible(False)
    words = ["XLA's order (with PP: 1F1B)", "two strands (with PP: W); hatched: needs more than 80 GB"]
    axes.flat[0].legend(words, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draw", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(options.out.read_text()), options.draw)
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    asked, spawn = steps(), multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.processes, spawn) as pool:
        tasks = [{system: pool.submit(simulate, step, system) for system in SYSTEMS} for step in asked]
        found = []
        for step, of_step in zip(asked, tasks, strict=True):
            found.append(rows(step, {system: task.result() for system, task in of_step.items()}))
            print(found[-1], flush=True)
    options.out.write_text(json.dumps({"cluster": CLUSTER, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
