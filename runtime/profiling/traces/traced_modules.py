"""Reads the compiled programs in a profiler trace. XLA stores every program whose kernels may be in the trace.

    with jax.profiler.trace(folder):
        jax.block_until_ready(train_step(state, batch))
    (module,) = traced_modules.load(folder)              # as it ran, with its schedule

The programs are in a plane without times, `/host:metadata`. There, each program is metadata of an event that never
happens. So `jax.profiler.ProfileData` does not show the programs. This module reads the following fields of the file
(tsl/profiler/protobuf/xplane.proto):

    XSpace          planes 1
    XPlane          name 2, event_metadata 4 (map), stat_metadata 5 (map)
    XEventMetadata  stats 5
    XStatMetadata   id 1, name 2
    XStat           metadata_id 1, bytes_value 6: an xla.HloProto, whose field 1 is the module
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from dhelix.errors import DhelixError
from dhelix.passes.hlo import HloModule
from dhelix.runtime.profiling.traces import trace

_PLANE, _STAT = b"/host:metadata", b"Hlo Proto"
_VALUE = 2  # field number of the value in a map's entry


def load(path: str | Path) -> list[HloModule]:
    """Returns the scheduled modules in a trace, without duplicates.

    Args:
      path: see `trace.load`.

    Raises:
      DhelixError: there is no trace, the trace cannot be read, or it contains no scheduled module.
    """
    file = trace.find(path)
    try:
        planes = [_fields(plane) for plane in _fields(file.read_bytes())[1]]
        found = dict.fromkeys(proto for plane in planes if plane[2] == [_PLANE] for proto in _modules(plane))
    except DecodeError as error:
        raise DhelixError(f"{file} is not a profiler trace, or is cut short: {error}; record it again") from None
    modules = [module for module in map(HloModule.from_bytes, found) if module.is_scheduled]
    if not modules:
        raise DhelixError(f"{file} holds no compiled program; record the trace with jax.profiler.trace inside the job")
    return modules


def _modules(plane: dict[int, list[Any]]) -> list[bytes]:
    """The serialized modules in a plane, in the order of the file."""
    names = [_fields(_fields(entry)[_VALUE][0]) for entry in plane[5]]
    numbers = {stat[1][0] for stat in names if stat[2] == [_STAT]}
    events = [_fields(_fields(entry)[_VALUE][0]) for entry in plane[4]]
    stats = [_fields(stat) for event in events for stat in event[5]]
    return [_fields(stat[6][0])[1][0] for stat in stats if stat[1][0] in numbers and stat[6]]


def _fields(message: bytes) -> dict[int, list[Any]]:
    """The values of a serialized message by field number. Each value is a number or bytes."""
    found: dict[int, list[Any]] = defaultdict(list)
    for field in UnknownFieldSet(Empty.FromString(message)):
        found[field.field_number].append(field.data)
    return found
