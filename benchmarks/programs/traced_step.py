"""Records traces of a train step, and compares `dhelix inspect TRACE` with an independent computation.

    python benchmarks/programs/traced_step.py record FOLDER --link no-p2p            # needs two GPUs
    python benchmarks/programs/traced_step.py check FOLDER/* --json traced_step.json

`record` runs steps of Llama-8B shapes with tensor parallelism, plain and as two strands, and writes for each a trace
and the compiled program, `step.hlo`. Without CUDA graphs, each kernel names its instruction.

The independent computation shares no code with `inspect`. It reads the trace's JSON, not its protobuf. It adds up time
between each two neighbouring starts or ends. A kernel communicates if its own name says so, or if its instruction's
text in `step.hlo` has a collective. Only which operators are equal is taken from dhelix: those with one profile key.
Operators without a key are equal if they have the same text, names of instructions aside.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 5  # traced
TICKS = 10_000  # for each millisecond
BESIDE, ENOUGH, PAUSE_MS = 0.05, 3, 0.02  # as `inspect` defines what runs beside communication, is known, is one run
COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all)(-start)?\("
)
GRAPH = re.compile("command_buffer|$")
FIELDS = ("step_ms", "compute_ms", "communication_ms", "hidden_ms", "exposed_ms", "idle_ms", "slow_down_ms")


def record(arguments: argparse.Namespace) -> None:
    if arguments.link == "no-p2p":
        os.environ["NCCL_P2P_DISABLE"] = "1"
    import jax
    import optax

    from dhelix import strand_interleave
    from dhelix.models import preset
    from dhelix.models.common.mesh import make_mesh
    from dhelix.models.train_step import make_train_step

    config = preset("llama-8b", arguments.layers, seq=arguments.seq, vocab=32_000)
    training = make_train_step(config, make_mesh(1, 2), optax.adamw(1e-4), microbatches=4)
    batch = {"tokens": jax.device_put(np.ones((4, config.seq + 1), "int32"), training.batch_sharding)}
    state = training.init(jax.random.key(0))
    for graphs in (False, True):
        options = {} if graphs else {"xla_gpu_enable_command_buffer": ""}
        steps = {
            "plain": jax.jit(training.train_step, donate_argnums=0, compiler_options=options),
            "strands": strand_interleave(
                training.train_step, schedule="dp", donate_argnums=0, compiler_options=options
            ),
        }
        for name, step in steps.items():
            folder = arguments.folder / f"{arguments.link}_{name}{'_graphs' if graphs else ''}"
            folder.mkdir(parents=True)
            compiled = step.lower(state, batch).compile()
            (folder / "step.hlo").write_text(compiled.as_text())
            for _ in range(3):
                state, _ = jax.block_until_ready(step(state, batch))
            with jax.profiler.trace(folder):
                for _ in range(STEPS):
                    state, _ = step(state, batch)
                jax.block_until_ready(state)
            if name == "strands":
                print(step.report(state, batch))
            print(folder, flush=True)


def kinds(text: str) -> dict[str, str]:
    """Maps each instruction to its text, with the text of what it calls and without names."""
    bodies: dict[str, str] = {}
    found: dict[str, str] = {}
    name, lines = "", []
    for line in text.splitlines():
        line = re.sub(r", (metadata|frontend_attributes)=\{[^}]*\}", "", line)
        if line.endswith("{") and not line.startswith("HloModule"):
            name, lines = line.split()[1 if line.startswith("ENTRY") else 0].lstrip("%").partition("(")[0], []
        elif line == "}":
            bodies[name] = "\n".join(lines)
        elif match := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)", line):
            called = [bodies.get(call, "") for call in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", match[2])]
            words = re.sub(r"(calls|to_apply)=%?[\w.\-]+", "", match[2])
            words = re.sub(r'"force_earliest_schedule":\w+|"operation_queue_id":"\d*"', "", words)
            words = re.sub(r"%[\w.\-]+", "", words)
            found[match[1]] = "\n".join([words, *called])
            lines.append(words)
    # XLA writes an async fusion without the name of the fusion that a trace has: "x.1-fusion.2" of "fused_x.1.clone".
    fused = {body.removesuffix(".clone"): text for body, text in bodies.items() if body.startswith("fused_")}
    return found | {f"{body.removeprefix('fused_')}-fusion": text for body, text in fused.items()}


def events(folder: Path, kind: dict[str, str]) -> dict[int, list[dict[str, Any]]]:
    """The kernels and copies of each GPU, with times in milliseconds. `kind` is as `kinds` returns it."""
    (file,) = folder.rglob("*.trace.json.gz")
    whole = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    gpus = {
        event["pid"]: int(event["args"]["name"].rpartition(":")[2])
        for event in whole
        if event.get("name") == "process_name" and "/device:GPU:" in event["args"]["name"]
    }
    streams = {
        (event["pid"], event["tid"])
        for event in whole
        if event.get("name") == "thread_name" and event["args"]["name"].startswith("Stream")
    }
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in whole:
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams:
            arguments = event.get("args", {})
            name, kernel = arguments.get("hlo_op", ""), event["name"]
            talks = re.search("nccl", kernel, re.IGNORECASE) or COLLECTIVE.search(_text(kind, name))
            copies = not name and "Memcpy" in kernel and "H2D" not in kernel and "D2H" not in kernel
            found[gpus[event["pid"]]].append(
                {
                    "start": event["ts"] / 1e3,
                    "end": (event["ts"] + event.get("dur", 0.0)) / 1e3,
                    "stream": event["tid"],
                    "name": name,
                    "module": arguments.get("hlo_module", ""),
                    "talks": bool(talks or copies),
                }
            )
    return found


def _text(kind: dict[str, str], name: str) -> str:
    return kind.get(name) or kind.get(re.sub(r"(?<=-fusion)\.\d+$", "", name), "")


def counted(found: list[dict[str, Any]]) -> dict[str, float]:
    """Adds up the time between each two neighbouring starts or ends, by what runs then."""
    inside = [e for e in found if e["module"]]
    begin, end = min(e["start"] for e in inside), max(e["end"] for e in inside)
    every = [e for e in found if e["start"] >= begin and e["end"] <= end]
    times = np.array([t for e in every for t in (e["start"], e["end"])])
    change = np.tile([1, -1], len(every))
    talks = np.repeat([e["talks"] for e in every], 2)
    order = np.argsort(times, kind="stable")
    spans = np.diff(times[order])
    communicating = np.cumsum(np.where(talks, change, 0)[order])[:-1] > 0
    computing = np.cumsum(np.where(talks, 0, change)[order])[:-1] > 0
    total = {
        "step_ms": spans.sum(),
        "compute_ms": spans[computing].sum(),
        "communication_ms": spans[communicating].sum(),
        "hidden_ms": spans[computing & communicating].sum(),
        "exposed_ms": spans[communicating & ~computing].sum(),
        "idle_ms": spans[~communicating & ~computing].sum(),
    }
    return {name: float(ms) / STEPS for name, ms in total.items()}


def slowed_down(gpus: dict[int, list[dict[str, Any]]], kind: dict[str, str]) -> dict[int, float]:
    """Milliseconds that operators beside communication take longer than equal ones alone, by counting ticks."""
    alone: dict[tuple[int | str, str], list[float]] = defaultdict(list)
    beside: dict[tuple[int, str], list[float]] = defaultdict(list)
    for gpu, found in gpus.items():
        begin = min(e["start"] for e in found if e["module"])
        inside = [e for e in found if e["start"] >= begin]
        ticks = round((max(e["end"] for e in inside) - begin) * TICKS) + 1
        busy = {stream: np.zeros(ticks, np.int16) for stream in {e["stream"] for e in inside}}
        talking = np.zeros(ticks, np.int16)
        for e in inside:
            busy[e["stream"]][_ticks(e, begin)] = 1
            talking[_ticks(e, begin)] |= e["talks"]
        everywhere = np.sum(list(busy.values()), axis=0)
        for run in _runs(inside):
            at, name = _ticks(run, begin), str(run["name"])
            if run["talks"] or GRAPH.match(name):
                continue
            took = run["end"] - run["start"]
            if (everywhere[at] - busy[run["stream"]][at]).sum() <= BESIDE * took * TICKS:
                alone[gpu, kind.get(name, name)].append(took)
                alone["all", kind.get(name, name)].append(took)
            if talking[at].sum() > BESIDE * took * TICKS:
                beside[gpu, kind.get(name, name)].append(took)
    lost: dict[int, float] = defaultdict(float)
    for (gpu, which), times in beside.items():
        samples = alone[gpu, which] if len(alone[gpu, which]) >= ENOUGH else alone["all", which]
        if len(samples) >= ENOUGH:
            lost[gpu] += sum(times) - len(times) * statistics.median(samples)
    return {gpu: ms / STEPS for gpu, ms in lost.items()}


def _ticks(event: dict[str, Any], begin: float) -> slice:
    return slice(round((event["start"] - begin) * TICKS), round((event["end"] - begin) * TICKS))


def _runs(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels of one instruction that follow each other closely on a stream are one run."""
    runs: list[dict[str, Any]] = []
    last: dict[str, dict[str, Any]] = {}
    for event in sorted(events, key=lambda e: e["start"]):
        run = last.get(event["stream"])
        if run and run["name"] == event["name"] and event["start"] - run["end"] < PAUSE_MS:
            run["end"] = event["end"]
        else:
            last[event["stream"]] = dict(event)
            runs.append(last[event["stream"]])
    return runs


def check(arguments: argparse.Namespace) -> int:
    from dhelix.launch.inspect.traces.measurement import measure
    from dhelix.runtime.profiling.traces import recording

    rows, worst = [], 0.0
    for folder in arguments.folders:
        found, text = measure(recording.load(folder)), folder / "step.hlo"
        kind = kinds(text.read_text()) if text.exists() else {}
        gpus = events(folder, kind)
        ran = {e["name"] for of_gpu in gpus.values() for e in of_gpu}
        equal = {name: key for name in sorted(ran) if (key := _key(found, name))}
        lost = slowed_down(gpus, kind | equal)
        for gpu in found.gpus:
            independent = counted(gpus[gpu.gpu]) | {"slow_down_ms": lost.get(gpu.gpu, 0.0)}
            for name in FIELDS:
                ours = getattr(gpu, name)
                apart = abs(ours - independent[name])
                rows.append((folder.name, gpu.gpu, name, round(ours, 4), round(independent[name], 4)))
                worst = max(worst, apart / max(independent[name], 0.01 * independent["step_ms"]))
                print(f"{folder.name:24} GPU {gpu.gpu}  {name:18} {ours:10.3f} {independent[name]:10.3f}")
    print(f"worst difference: {worst:.2%} (of times below 1 % of the step: of that 1 %)")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=0))
    return int(worst > 0.01)


def _key(found: Any, name: str) -> str:
    """The profile key of an instruction of a `Measurement`; "" if it has none."""
    from dhelix.passes.evaluation.operator_keys import key_of

    instruction = found.program_facts.instructions.get(name)
    return "" if instruction is None else str(key_of(instruction) or "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--link", choices=("nvlink", "no-p2p"), default="nvlink")
    recording.add_argument("--layers", type=int, default=4)
    recording.add_argument("--seq", type=int, default=4096)
    recording.set_defaults(run=record)
    checking = commands.add_parser("check")
    checking.add_argument("folders", type=Path, nargs="+")
    checking.add_argument("--json", type=Path)
    checking.set_defaults(run=check)
    arguments = parser.parse_args()
    return arguments.run(arguments) or 0


if __name__ == "__main__":
    sys.exit(main())
