"""Profiler traces written by hand in the profiler's own text format, and executions made from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from google.protobuf import text_encoding
from jax.profiler import ProfileData

from dhelix.passes.hlo import HloModule
from dhelix.runtime.profiling.traces import trace
from dhelix.runtime.profiling.traces.executions import Execution

MODULE = "jit_step"

Kernel = tuple[int, float, float, str | None, str | None]
"""Stream, start and end in microseconds, instruction and module; None if the trace names none."""


def kernel(stream: int, start: float, end: float, name: str | None, module: str | None = MODULE) -> Kernel:
    return stream, start, end, name, module


def profile(gpus: Mapping[int, Iterable[Kernel]]) -> trace.Profile:
    """A trace of GPUs by number. All kernels are named `kernel`, whatever they do."""
    return ProfileData.from_serialized_xspace(serialized(gpus))


def serialized(gpus: Mapping[int, Iterable[Kernel]], modules: Iterable[HloModule] = ()) -> bytes:
    """The file of such a trace, which also holds `modules` as XLA stores them."""
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
    planes.append(f'planes {{ id: 100 name: "/host:metadata" {_stored(modules)} }}')
    return ProfileData.text_proto_to_serialized_xspace("\n".join(planes))


def _stored(modules: Iterable[HloModule]) -> str:
    """Metadata of events that never happen. Each holds an xla.HloProto, whose first field is the module."""
    entries = ['stat_metadata { key: 7 value { id: 7 name: "Hlo Proto" } }']
    for number, module in enumerate(modules, 1):
        length = len(proto := module.to_bytes())
        digits = []
        while length > 127:  # as a varint
            digits, length = [*digits, length & 127 | 128], length >> 7
        text = text_encoding.CEscape(bytes([10, *digits, length]) + proto, as_utf8=False)
        stats = f'stats {{ metadata_id: 7 bytes_value: "{text}" }}'
        entries.append(f'event_metadata {{ key: {number} value {{ id: {number} name: "{module.name}" {stats} }} }}')
    return " ".join(entries)


def execution(name: str, start: float, end: float, shared: float = 0.0) -> Execution:
    """An execution; times are in microseconds."""
    return Execution(name, start * 1e-6, end * 1e-6, shared * 1e-6)
