"""Traces of a made-up job whose times are known: each GPU computes, gathers beside compute, and reduces.

One step of a GPU, in microseconds from its own start, which is later by `late` on a slow GPU:

    compute         dot.1 1000   dot.2 900 (1000 beside the all-gather)   dot.3 900
    communication                all-gather 800 after the last arrival                  all-reduce 300 after the last

`dot.2` and `dot.3` are equal products, so the trace tells that `dot.2` loses 100 µs beside the all-gather.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from dhelix.passes.hlo import HloModule
from dhelix.tests.runtime.profiling import recorded_traces
from dhelix.tests.runtime.profiling.recorded_traces import Kernel, kernel

STEP = 5000.0
MODULE = """
HloModule jit_step, is_scheduled=true, num_partitions=%d

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

ENTRY main {
  x = f32[1024,1024] parameter(0)
  y = f32[1024,2048] parameter(1)
  dot.1 = f32[1024,1024] dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  all-gather-start.1 = (f32[1024,1024], f32[%d,1024]) all-gather-start(dot.1), channel_id=1, dimensions={0},
      replica_groups={{%s}}, use_global_device_ids=true
  dot.2 = f32[1024,2048] dot(dot.1, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  all-gather-done.1 = f32[%d,1024] all-gather-done(all-gather-start.1)
  dot.3 = f32[1024,2048] dot(dot.1, dot.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  all-reduce.1 = f32[1024,2048] all-reduce(dot.3), channel_id=2, replica_groups={{%s}}, use_global_device_ids=true,
      to_apply=add
  ROOT out = (f32[1024,2048], f32[%d,1024]) tuple(all-reduce.1, all-gather-done.1)
}
"""


def program(gpus: int) -> HloModule:
    group, rows = ",".join(map(str, range(gpus))), 1024 * gpus
    return HloModule.from_text(MODULE.replace(",\n      ", ", ") % (gpus, rows, group, rows, group, rows))


def kernels(late: Sequence[float], steps: int = 4) -> dict[int, list[Kernel]]:
    """The kernels of each GPU. GPU n begins each step `late[n]` microseconds after the others."""
    found: dict[int, list[Kernel]] = {gpu: [] for gpu in range(len(late))}
    for step in range(steps):
        gathered = step * STEP + max(late, default=0.0) + 1000 + 800
        reduced = step * STEP + max(late, default=0.0) + 1000 + 1000 + 900 + 300
        for gpu, delay in enumerate(late):
            begin = step * STEP + delay
            found[gpu] += [
                kernel(1, begin, begin + 1000, "dot.1"),
                kernel(2, begin + 1000, gathered, "all-gather-start.1"),
                kernel(1, begin + 1000, begin + 2000, "dot.2"),
                kernel(1, begin + 2000, begin + 2900, "dot.3"),
                kernel(2, begin + 2900, reduced, "all-reduce.1"),
            ]
    return found


def record(folder: Path, late: Sequence[float], hosts: Mapping[str, float] | None = None, whole: bool = True) -> Path:
    """Writes the job's trace as the profiler does.

    Args:
      hosts: the hosts' names, and by how many microseconds each one's clock is ahead. They share the GPUs evenly.
      whole: whether the trace holds the program.
    """
    hosts = hosts or {"node-0": 0.0}
    run = folder / "plugins" / "profile" / "2026_11_28"
    run.mkdir(parents=True)
    found, per_host = kernels(late), len(late) // len(hosts)
    for number, (host, ahead) in enumerate(hosts.items()):
        local = {
            gpu - number * per_host: [(s, a + ahead, b + ahead, n, m) for s, a, b, n, m in found[gpu]]
            for gpu in range(number * per_host, (number + 1) * per_host)
        }
        modules = [program(len(late))] if whole else []
        (run / f"{host}.xplane.pb").write_bytes(recorded_traces.serialized(local, modules))
    return folder


def record_json(file: Path, late: Sequence[float]) -> Path:
    """Writes the job's trace as JSON, with the host's launches."""
    events: list[dict[str, object]] = [{"ph": "M", "pid": 99, "name": "process_name", "args": {"name": "/host:CPU"}}]
    for gpu, of_gpu in kernels(late).items():
        events.append({"ph": "M", "pid": gpu, "name": "process_name", "args": {"name": f"/device:GPU:{gpu}"}})
        for stream in (1, 2):
            name = {"name": f"Stream #{stream}(Compute)"}
            events.append({"ph": "M", "pid": gpu, "tid": stream, "name": "thread_name", "args": name})
        for number, (stream, start, end, instruction, module) in enumerate(of_gpu):
            told = {"hlo_op": instruction, "hlo_module": module, "correlation_id": f"{gpu}{number:03}"}
            times = {"ph": "X", "pid": gpu, "tid": stream, "ts": start, "dur": end - start}
            events.append({**times, "name": "kernel", "args": told})
            launch = {"ph": "X", "pid": 99, "tid": gpu, "name": "cuLaunchKernel", "args": told}
            events.append({**launch, "ts": start - 20.0, "dur": 10.0})
    file.write_bytes(gzip.compress(json.dumps({"displayTimeUnit": "ns", "traceEvents": events}).encode()))
    return file
