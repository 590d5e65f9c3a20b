"""Profiler traces written by hand, in the profiler's own text format, and executions out of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jax.profiler import ProfileData

from dhelix.runtime import trace
from dhelix.runtime.profiling.executions import Execution

MODULE = "jit_step"

Kernel = tuple[int, float, float, str | None, str | None]
"""Stream, start and end in microseconds, instruction and module; None: the trace names none."""


def kernel(stream: int, start: float, end: float, name: str | None, module: str | None = MODULE) -> Kernel:
    return stream, start, end, name, module


def profile(gpus: Mapping[int, Iterable[Kernel]]) -> trace.Profile:
    """A trace of GPUs by number; their kernels are called `kernel`, whatever they are for."""
    names = '{ key: 1 value { id: 1 name: "hlo_op" } } stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }'
    metadata = f'event_metadata {{ key: 1 value {{ id: 1 name: "kernel" }} }} stat_metadata {names}'
    planes = []
    for gpu, kernels in gpus.items():
        streams: dict[int, list[str]] = {}
        for stream, start, end, name, module in kernels:
            stats = [f'stats {{ metadata_id: {n} str_value: "{v}" }}' for n, v in ((1, name), (2, module)) if v]
            when = f"offset_ps: {round(start * 1e6)} duration_ps: {round((end - start) * 1e6)}"
            streams.setdefault(stream, []).append(f"events {{ metadata_id: 1 {when} {' '.join(stats)} }}")
        lines = [f'lines {{ id: {s} name: "Stream #{s}(Compute)" {" ".join(of)} }}' for s, of in streams.items()]
        lines.append('lines { id: 99 name: "XLA Ops" events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000000 } }')
        planes.append(f'planes {{ id: {gpu + 1} name: "/device:GPU:{gpu}" {" ".join(lines)} {metadata} }}')
    planes.append(f'planes {{ id: 99 name: "/host:CPU" {metadata} }}')
    return ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace("\n".join(planes)))


def execution(name: str, start: float, end: float, shared: float = 0.0) -> Execution:
    """Times in microseconds."""
    return Execution(name, start * 1e-6, end * 1e-6, shared * 1e-6)
