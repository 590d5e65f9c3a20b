"""Times MaxText's own step on the GPUs of one host: plain under several flags, and under `dhelix run`.

    python benchmarks/trainers/on_gpus.py --out maxtext_2gpus.json
    python benchmarks/trainers/on_gpus.py --links no-p2p --only "dhelix|MaxText" --out maxtext_2gpus.json
    python benchmarks/trainers/on_gpus.py --gpus 1 --only "nvlink, default, plain" --out maxtext_1gpu.json
    python benchmarks/trainers/on_gpus.py --tiny --out tiny.json                   # CPU devices: tries the script out

MaxText is installed for `--python`, and nothing of it is changed. The layers have Llama-8B's shapes: FSDP over all
GPUs, 4 micro-batches in a step (`gradient_accumulation_steps`), attention by cuDNN, and MaxText's remat policy for
GPUs. Each run is a process of its own. The first `SKIPPED` steps are not counted. Plain runs have XLA's default flags,
and those that MaxText ships for one node of H100s (`maxtext/configs/gpu/a3/llama_2_7b/1vm.sh`, without its dump). Every
launch setting that dhelix gets, plain gets, too.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dhelix.benchmarks.pages.markdown import table
from dhelix.benchmarks.trainers.results import Program
from dhelix.profiles.profile import SETTINGS
from dhelix.runtime.processes.this_machine import gpus_here

STEPS, SKIPPED = 14, 4
_LIMIT = 300.0  # seconds of one run
MAXTEXTS = (
    "--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_triton_gemm=false "
    "--xla_gpu_enable_command_buffer= --xla_gpu_enable_highest_priority_async_stream=true "
    "--xla_gpu_all_reduce_combine_threshold_bytes=134217728 --xla_gpu_all_gather_combine_threshold_bytes=134217728 "
    "--xla_gpu_reduce_scatter_combine_threshold_bytes=67108864 --xla_gpu_pipeline_all_gather=on "
    "--xla_gpu_pipeline_reduce_scatter=on --xla_gpu_pipeline_all_reduce=on "
    "--xla_gpu_enable_while_loop_double_buffering=true --xla_gpu_enable_all_gather_combine_by_dim=false "
    "--xla_gpu_enable_reduce_scatter_combine_by_dim=false --xla_disable_hlo_passes=rematerialization"
)
LINKS: Mapping[str, tuple[Mapping[str, str], tuple[str, ...]]] = {
    "nvlink": ({}, ("default", "copy-engine1")),
    "no-p2p": ({"NCCL_P2P_DISABLE": "1"}, ("small-buffers",)),
}
"""For each link: its variables, and the launch settings to run under."""
_HEADS = (
    "link", "launch setting", "XLA flags", "program", "step ms (fastest-slowest)", "over the best plain", "last loss",
    "what dhelix says",
)  # fmt: skip


@dataclass
class Run:
    """One run of MaxText.

    Attributes:
      link, setting: link, and launch setting (`profiles.profile.SETTINGS`).
      flags: whose XLA flags: "XLA's" or "MaxText's".
      by: "plain" or "dhelix".
      steps_ms: milliseconds of the steps that count.
      losses: of all steps.
      headline: what `dhelix run` says of the step.
      failed: the end of the output, if the run failed.
    """

    link: str
    setting: str
    flags: str
    by: str
    steps_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    headline: str = ""
    failed: str = ""

    @property
    def name(self) -> str:
        return f"{self.link}, {self.setting}, {self.by}, {self.flags} flags"


def runs(links: Sequence[str]) -> Iterator[Run]:
    """All runs of some links, those of dhelix first, so that they exist if time runs out."""
    for link in links:
        for setting in LINKS[link][1]:
            yield Run(link, setting, "XLA's", "dhelix")
            yield Run(link, setting, "XLA's", "plain")
            yield Run(link, setting, "MaxText's", "plain")


def arguments(folder: Path, options: argparse.Namespace) -> list[str]:
    """What follows `python` for a run that writes into `folder`."""
    chosen: dict[str, Any] = {
        "run_name": "run", "base_output_directory": folder, "metrics_file": folder / "metrics.jsonl",
        "hardware": "gpu", "skip_jax_distributed_system": "true", "dataset_type": "synthetic", "steps": STEPS,
        "enable_checkpointing": "false", "enable_goodput_recording": "false", "monitor_goodput": "false",
        "log_config": "false", "jax_cache_dir": "", "gradient_accumulation_steps": 4,
        "per_device_batch_size": options.batch,
        "ici_fsdp_parallelism": options.gpus, "base_num_decoder_layers": options.layers,
        "max_target_length": options.seq, "vocab_size": 32_000, "base_emb_dim": 4096, "base_mlp_dim": 14_336,
        "base_num_query_heads": 32, "base_num_kv_heads": 8, "head_dim": 128, "attention": "cudnn_flash_jax",
        "remat_policy": "minimal_with_context", "use_iota_embed": "true", "dtype": "bfloat16",
        "weight_dtype": "float32",
    }  # fmt: skip
    if options.tiny:
        chosen |= {
            "hardware": "cpu", "attention": "dot_product", "base_emb_dim": 64, "base_mlp_dim": 128, "head_dim": 16,
            "base_num_query_heads": 4, "base_num_kv_heads": 4, "max_target_length": 64, "vocab_size": 256,
        }  # fmt: skip
    return ["-m", "maxtext.trainers.pre_train.train", *(f"{name}={value}" for name, value in chosen.items())]


def environment(run: Run, options: argparse.Namespace) -> dict[str, str]:
    known = SETTINGS[run.setting]
    given = {**os.environ, **LINKS[run.link][0], **known.environment, "DECOUPLE_GCLOUD": "TRUE"}
    flags = [*known.training_flags, MAXTEXTS if run.flags == "MaxText's" else "", os.environ.get("XLA_FLAGS", "")]
    if options.tiny:
        given |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(options.gpus)}
        flags = []
    given["XLA_FLAGS"] = " ".join(flag for flag in flags if flag)
    given.setdefault("NCCL_NVLS_ENABLE", "0")
    return given


def measure(run: Run, options: argparse.Namespace, seconds: float) -> None:
    """Runs MaxText, and adds what was measured to `run`."""
    with tempfile.TemporaryDirectory(prefix="maxtext-") as name:
        folder = Path(name)
        report = folder / "report.json"
        before = ["-m", "dhelix", "run", "--report", str(report)] if run.by == "dhelix" else []
        command = [options.python, *before, *arguments(folder, options)]
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment(run, options), capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            run.failed = f"no end after {seconds:.0f} s"
            return
        if done.returncode:
            run.failed = f"exit status {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
            return
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        run.losses = [row["learning/loss"] for row in rows]
        run.steps_ms = [1e3 * row["perf/step_time_seconds"] for row in rows][SKIPPED:]
        if report.is_file():
            programs = map(Program.of, json.loads(report.read_text())["programs"])
            run.headline = "; ".join(line for one in programs if "train_step" in one.name for line in one.why[:1])


def markdown(found: Mapping[str, Any]) -> str:
    """A table of a result file, with the speed-up over the fastest plain run of the link."""
    every = [Run(**run) for run in found["runs"]]
    rows = []
    for run in every:
        place = run.link, run.setting, run.flags, run.by
        if not run.steps_ms:
            rows.append((*place, re.sub(r"\s+", " ", run.failed)[-120:], "", "", ""))
            continue
        plain = [statistics.median(r.steps_ms) for r in every if r.by == "plain" and r.link == run.link and r.steps_ms]
        middle = statistics.median(run.steps_ms)
        times = f"{middle:.1f} ({min(run.steps_ms):.1f}-{max(run.steps_ms):.1f})"
        gain = f"{min(plain) / middle:.3f}" if plain else ""
        rows.append((*place, times, gain, f"{run.losses[-1]:.4f}", run.headline))
    counts = sorted({len(run.steps_ms) for run in every if run.steps_ms})
    title = (
        f"**MaxText, {found['layers']} layers, S {found['seq']}, FSDP {found['gpus']}, 4 micro-batches of "
        f"{found['batch']} on each GPU; {' or '.join(map(str, counts))} timed steps** "
        f"({found['on']['gpus']}, jax {found['on']['jax']}, {found['on']['date']})"
    )
    return f"{title}\n\n{table(_HEADS, rows)}"


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True, help="file to write, after each run")
    made.add_argument("--python", default=sys.executable, help="a Python that has MaxText")
    made.add_argument("--gpus", type=int, default=2)
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--seq", type=int, default=4096)
    made.add_argument("--batch", type=int, default=4, help="sequences of a micro-batch, for each GPU")
    made.add_argument("--links", default=",".join(LINKS))
    made.add_argument("--only", default="", help="runs, as regular expression for LINK, SETTING, PROGRAM, FLAGS")
    made.add_argument("--tiny", action="store_true", help="a tiny model on CPU devices")
    made.add_argument("--budget_s", type=float, default=1e6, help="no run begins after so many seconds")
    options = made.parse_args()
    kind, count = gpus_here()
    on = {"gpus": f"{count} x {kind}", "date": str(datetime.date.today()), "jax": importlib.metadata.version("jax")}
    shape = {name: getattr(options, name) for name in ("gpus", "layers", "seq", "batch")}
    began, found = time.monotonic(), []
    results = {"on": on, **shape, "runs": found}
    for run in runs(options.links.split(",")):
        left = options.budget_s - (time.monotonic() - began)
        if not re.search(options.only, run.name) or left < 0:
            continue
        measure(run, options, min(_LIMIT, left))
        found.append(asdict(run))
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{time.monotonic() - began:4.0f} s  {run.name}: {run.failed or run.steps_ms}", flush=True)
    print(markdown(results))


if __name__ == "__main__":
    main()
