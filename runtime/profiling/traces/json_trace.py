"""Reads a `trace.json.gz`, which the profiler writes beside the `.xplane.pb`, or which somebody else sent alone.

The result has the planes, lines and events of `jax.profiler.ProfileData`, so that all readers of traces read it, too:

    pid and its `process_name`   plane   /device:GPU:0
    tid and its `thread_name`    line    Stream #13(Compute)
    ph "X", ts and dur in µs     event   its `args` are the stats

The JSON holds no compiled program, and at most a million events: the profiler leaves out the others.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dhelix.errors import DhelixError

MOST_EVENTS = 1_000_000
"""The profiler writes no more events than these into one file."""
_GZIP = b"\x1f\x8b"
_PID_SUFFIX = re.compile(r" \(pid \d+\)$")  # TensorBoard adds it


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    start_ns: float
    duration_ns: float
    stats: tuple[tuple[str, Any], ...]


@dataclass(slots=True)
class Line:
    name: str
    events: list[Event] = field(default_factory=list)


@dataclass(slots=True)
class Plane:
    name: str
    lines: list[Line] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class JsonTrace:
    """What `jax.profiler.ProfileData` shows of a trace; `events` counts all events."""

    planes: tuple[Plane, ...]
    events: int


def looks_like(data: bytes) -> bool:
    """Whether a file's content, also packed by gzip, begins like a trace in Chrome's JSON format."""
    if data.startswith(_GZIP):
        try:
            data = zlib.decompressobj(wbits=31).decompress(data[:65536], 65536)
        except zlib.error:
            return False
    return data.lstrip()[:1] == b"{" and b'"traceEvents"' in data[:65536] + data[-65536:]


def load(file: Path) -> JsonTrace:
    """Reads a trace, which may be packed by gzip.

    Raises:
      DhelixError: the file is cut short, or is not such a trace.
    """
    try:
        data = file.read_bytes()
        told = json.loads(gzip.decompress(data) if data.startswith(_GZIP) else data)
        return _read(told["traceEvents"])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        words = f"{type(error).__name__}: {error}" if isinstance(error, (KeyError, TypeError)) else error
        why = f"is not a profiler trace in JSON, or is cut short: {words}"
        raise DhelixError(f"{file} {why}; record it again") from None


def _read(events: list[dict[str, Any]]) -> JsonTrace:
    planes: dict[Any, Plane] = {}
    lines: dict[Any, Line] = {}
    found: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        kind, pid = event.get("ph"), event.get("pid")
        thread = pid, event.get("tid")
        if kind == "M" and event["name"] == "process_name":
            planes[pid] = Plane(_PID_SUFFIX.sub("", str(event["args"]["name"])))
        elif kind == "M" and event["name"] == "thread_name":
            lines[thread] = Line(str(event["args"]["name"]))
        elif kind == "X":
            stats = tuple((event.get("args") or {}).items())
            start, duration = 1e3 * float(event["ts"]), 1e3 * float(event.get("dur", 0.0))
            found[thread].append(Event(str(event["name"]), start, duration, stats))
    for thread, of_thread in found.items():
        line = lines.setdefault(thread, Line(""))
        line.events = of_thread
        planes.setdefault(thread[0], Plane("")).lines.append(line)
    return JsonTrace(tuple(planes.values()), sum(map(len, found.values())))
