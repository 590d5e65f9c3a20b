"""Step time of a Llama train step: plain against two strands, alternately, on the same GPUs.

    python benchmarks/strands.py --microbatches 16 --settings default,connections1 --out DIR

One process per setting that is process-wide (environment, NCCL), one compiled program per variant; the variants of a
process take turns, round by round, so that a slow spell of the machine meets all of them. Reported: median, fastest
and slowest step, compiler's memory, and from a profiler trace how much of the collectives' time lies under compute.
Losses of every variant over the same batches must agree; the table says by how much they differ.
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "connections1": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    "copy_engine": {
        "NCCL_CTA_POLICY": "2",
        "XLA_FLAGS": "--xla_gpu_experimental_enable_nccl_symmetric_buffers=true",
    },
    "no_p2p": {"NCCL_P2P_DISABLE": "1"},
}

_STRANDS = ("strand-duplication", "strand-lockstep", "gradient-accumulation", "activation-sharing")
# variant -> (names of the passes, XLA options)
VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "plain": ((), {}),
    "plain, no latency hiding": ((), {"xla_gpu_enable_latency_hiding_scheduler": False}),
    "plain, double buffering": ((), {"xla_gpu_enable_while_loop_double_buffering": True}),
    "plain, no slice fusion": ((), {"xla_gpu_enable_dynamic_slice_fusion": False}),
    "plain, list schedule": (("collective-schedule",), {}),
    "strands": (_STRANDS, {}),
    "strands, no slice fusion": (_STRANDS, {"xla_gpu_enable_dynamic_slice_fusion": False}),
    "strands, not in lockstep": (tuple(name for name in _STRANDS if name != "strand-lockstep"), {}),
    "strands, gradients stacked": (tuple(name for name in _STRANDS if name != "gradient-accumulation"), {}),
    "strands, two buffers": (tuple(name for name in _STRANDS if name != "activation-sharing"), {}),
    "strands, list schedule": ((*_STRANDS, "collective-schedule"), {}),
    "strands, list by profile": ((*_STRANDS, "collective-schedule by profile"), {}),
    "strands, paired": ((*_STRANDS, "strand-pairing"), {}),
    "plain, list by profile": (("collective-schedule by profile",), {}),
}


@dataclasses.dataclass
class Result:
    setting: str
    variant: str
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    losses: list[float]
    peak_gib: float
    temp_gib: float
    compile_s: float
    passes_s: float
    compute_ms: float = 0.0
    communication_ms: float = 0.0
    hidden_share: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--unrolled", action="store_true", help="layers one after the other, not scanned")
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant, of --steps steps")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--variants", default="plain;strands", help=f"of {'; '.join(VARIANTS)}")
    parser.add_argument("--settings", default="default", help=f"of {', '.join(SETTINGS)}, separated by ','")
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    parser.add_argument("--dump_hlo", action="store_true")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.worker:
        results = run_setting(arguments, arguments.worker)
        print("RESULT " + json.dumps([dataclasses.asdict(r) for r in results]), flush=True)
        return
    results = []
    for setting in arguments.settings.split(","):
        results += run_process(setting)
    record = {"on": versions(), "arguments": vars(arguments) | {"out": ""}, "results": [vars(r) for r in results]}
    (arguments.out / f"strands_m{arguments.microbatches}{'_unrolled' * arguments.unrolled}.json").write_text(
        json.dumps(record, indent=1)
    )
    print(table(results))


def versions() -> dict[str, str]:
    import importlib.metadata

    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    if shutil.which(query[0]):
        found["gpus"] = "; ".join(subprocess.run(query, stdout=subprocess.PIPE, text=True).stdout.split("\n")).strip(
            "; "
        )
    return found | {"date": time.strftime("%Y-%m-%d")}


def run_process(setting: str) -> list[Result]:
    environment = dict(os.environ)
    for name, value in SETTINGS[setting].items():
        environment[name] = f"{environment.get(name, '')} {value}".strip() if name == "XLA_FLAGS" else value
    environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    command = [sys.executable, *sys.argv, "--worker", setting]
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    for line in process.stdout.splitlines():
        if line.startswith("RESULT "):
            return [Result(**r) for r in json.loads(line[7:])]
        print(line)
    print(f"setting {setting} failed with exit code {process.returncode}")
    return []


def run_setting(arguments: argparse.Namespace, setting: str) -> list[Result]:
    import jax
    import numpy as np
    import optax

    from dhelix.models import preset
    from dhelix.models.parallel import make_mesh
    from dhelix.models.train_step import make_train_step

    config = preset(
        arguments.preset,
        layers=arguments.layers,
        seq=arguments.seq,
        vocab=arguments.vocab,
        scan_layers=not arguments.unrolled,
    )
    training = make_train_step(
        config, make_mesh(1, arguments.tp), optax.adamw(1e-4), microbatches=arguments.microbatches
    )
    random = np.random.default_rng(0)
    shape = (arguments.microbatches, arguments.seq + 1)
    batches = [
        {"tokens": jax.device_put(random.integers(0, config.vocab, shape, "int32"), training.batch_sharding)}
        for _ in range(arguments.steps * (arguments.rounds + 1))
    ]
    runs = []
    for variant in arguments.variants.split(";"):
        try:
            compiled, result = build(arguments, training, setting, variant)
        except Exception as error:  # one variant that does not compile must not cost the others their turn
            print(
                f"{setting} / {variant} did not compile: {type(error).__name__}: {str(error)[:500]}",
                flush=True,
            )
            continue
        runs.append((compiled, result, [training.init(jax.random.key(0)), 0, []]))
        print(f"{setting} / {variant}: compiled in {result.compile_s:.0f} s", file=sys.stderr, flush=True)
    for turn in range(arguments.rounds + 1):
        for compiled, result, progress in runs:
            for _ in range(arguments.steps):
                start = time.perf_counter()
                progress[0], metrics = compiled(progress[0], batches[progress[1] % len(batches)])
                result.losses.append(float(metrics["loss"]))
                if turn:
                    progress[2].append((time.perf_counter() - start) * 1e3)
                progress[1] += 1
    for compiled, result, (state, _, times) in runs:
        result.median_ms, result.fastest_ms, result.slowest_ms = (
            statistics.median(times),
            min(times),
            max(times),
        )
        if jax.default_backend() == "gpu":
            add_trace(result, compiled, state, batches[0])
    return [result for _, result, _ in runs]


def measured(setting: str):
    """Costs of the shipped profile that fits a setting of SETTINGS."""
    from dhelix.passes.costs import CostModel

    link = "no-p2p" if setting == "no_p2p" else "nvlink"
    return CostModel.find("H200", link, {"no_p2p": "default", "copy_engine": "copy-engine"}.get(setting, setting))


def build(arguments: argparse.Namespace, training, setting: str, variant: str):
    """The compiled step, as a user's decorator would make it, and an empty result."""
    import jax

    from dhelix import strand_interleave
    from dhelix.passes.activation_sharing import ActivationSharing
    from dhelix.passes.collective_schedule import CollectiveSchedule
    from dhelix.passes.gradient_accumulation import GradientAccumulation
    from dhelix.passes.strand_duplication import StrandDuplication
    from dhelix.passes.strand_lockstep import StrandLockstep
    from dhelix.passes.strand_pairing import StrandPairing
    from dhelix.profiles.hardware import H200, H200_NO_P2P

    names, options = VARIANTS[variant]
    hardware = H200_NO_P2P if setting == "no_p2p" else H200
    structure = (StrandDuplication(), StrandLockstep(), GradientAccumulation(), ActivationSharing())
    passes: list[Any] = [one for one in structure if one.name in names]
    if "collective-schedule" in names:
        passes.append(CollectiveSchedule(hardware))
    if "collective-schedule by profile" in names:
        passes.append(CollectiveSchedule(hardware, model=measured(setting)))
    if "strand-pairing" in names:
        passes.append(StrandPairing(hardware, model=measured(setting)))
    step: Any = jax.jit(training.train_step, donate_argnums=0)
    if passes:
        step = strand_interleave(training.train_step, passes=passes, strict=True, donate_argnums=0)
    example = training.abstract_state(), training.abstract_batch(arguments.microbatches)
    lowered = step.lower(*example)
    start = time.perf_counter()
    compiled = lowered.compile(options)
    seconds = time.perf_counter() - start
    passes_s = sum(stage.seconds for stage in step.report(*example).stages) if passes else 0.0
    if arguments.dump_hlo:
        path = arguments.out / f"{setting}_{variant}.txt".replace(" ", "_").replace(",", "")
        path.write_text(compiled.as_text())
    memory = compiled.memory_analysis()
    assert memory is not None
    peak, temp = memory.peak_memory_in_bytes / 2**30, memory.temp_size_in_bytes / 2**30
    return compiled, Result(setting, variant, 0, 0, 0, [], peak, temp, seconds, passes_s)


def add_trace(result: Result, compiled, state, batch) -> None:
    import jax

    from dhelix.runtime import trace
    from dhelix.runtime.lowering import compiled_module

    module = compiled_module(compiled)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(compiled(state, batch))
        report = trace.analyse(trace.load(folder), module=module)
    result.compute_ms, result.communication_ms = report.compute_ms, report.communication_ms
    result.hidden_share = report.hidden_share


def table(results: list[Result]) -> str:
    lines = [
        "| setting | program | step ms (fastest-slowest) | x best plain | compute ms | collectives ms | hidden "
        "| peak GiB | largest relative loss difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    plain = [r for r in results if r.variant.startswith("plain") and "list" not in r.variant]
    for r in results:
        best = min((p.median_ms for p in plain), default=r.median_ms)
        reference = next((p for p in plain if p.setting == r.setting), r)
        difference = max(abs(a - b) / abs(a) for a, b in zip(reference.losses, r.losses, strict=True))
        lines.append(
            f"| {r.setting} | {r.variant} | {r.median_ms:.1f} ({r.fastest_ms:.1f}-{r.slowest_ms:.1f}) "
            f"| {r.median_ms / best:.3f} | {r.compute_ms:.0f} | {r.communication_ms:.0f} | {r.hidden_share:.0%} "
            f"| {r.peak_gib:.2f} | {difference:.1e} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
