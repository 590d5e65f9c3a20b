"""The two fingerprints of a step, and the marker that carries the first one into the compiler.

*The fingerprint of the inputs* covers the program, the pass options, the profile and the versions. It becomes part of
the module's name (`jit_step__dhelix_<16 hex digits>`). That name is part of the compilation cache's key. No other part
of the key depends on the passes. From the name, the compiler hook also knows whether a module belongs to dhelix,
without parsing the module.

*The fingerprint of the compiled collective order* covers which collectives run over which devices, in execution order.
Hosts whose orders differ would deadlock.

The same input gives the same fingerprints on every host. Fingerprints depend on no dict order, object identity, file
path or time. See docs/design/compiler.md, "Names, markers, fingerprints".
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dhelix.errors import DhelixError
from dhelix.passes.analysis.execution import sequence_of
from dhelix.passes.hlo import Computation, HloModule, Instruction, schema, shapes
from dhelix.profiles.collective_matmul.sites import Times
from dhelix.profiles.profile import Profile

DIGITS = 16
_MARKER = re.compile(rf"__dhelix_([0-9a-f]{{{DIGITS}}})")

COLLECTIVES = frozenset(
    {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "recv",
        "reduce-scatter",
        "send",
    }
)


def of_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]


# Marker


def mark(name: str, fingerprint: str) -> str:
    """Returns `name` with `fingerprint` as its marker. An existing marker is replaced."""
    return f"{unmark(name)}__dhelix_{fingerprint}"


def unmark(name: str) -> str:
    return _MARKER.sub("", name)


def marker_of(module: bytes) -> str | None:
    """The fingerprint in the name of a serialized module; None if the name has none.

    Reads the module only up to its name.
    """
    found = _MARKER.search(module_name(module))
    return found.group(1) if found else None


def module_name(module: bytes) -> str:
    """Name of a serialized HloModuleProto; "" if there is no name, or `module` is no such proto."""
    try:
        for number, value in _fields(module):
            if number == 1 and isinstance(value, bytes):
                return value.decode(errors="replace")
    except (IndexError, ValueError):
        pass
    return ""


# Inputs


def input_fingerprint(passes: Sequence[object], module: bytes | None = None, profile: object = None) -> str:
    """16 hex digits that change with everything that can change the passes' result for a program.

    Args:
      passes: the passes that run, in order. Each is a dataclass of options and has a `name` and a `stage`.
      module: the lowered program before any pass, or None to leave the program out.
      profile: source of the costs: bytes, or any value that `plain` takes.

    Raises:
      DhelixError: an option or profile value has no stable text form.
    """
    inputs = {
        "passes": [{"name": p.name, "stage": p.stage, "options": p} for p in passes],  # type: ignore[attr-defined]
        "module": None if module is None else module_fingerprint(module),
        "profile": profile,
        "versions": versions(),
    }
    return of_bytes(json.dumps(plain(inputs), sort_keys=True).encode())


def module_fingerprint(module: bytes) -> str:
    """16 hex digits that identify what a serialized module computes.

    The digits do not depend on fields that differ between hosts or runs of the same program. These are the module's
    name (with its marker) and id, the metadata (such as source lines and paths), and the numbers of Python callbacks.
    """
    digest = hashlib.sha256()
    rest = bytearray()
    for number, value, raw in _raw_fields(module):
        if number == _COMPUTATIONS and isinstance(value, bytes):
            digest.update(_computation_content(value))
        elif number not in (_NAME, _ID, _STACK_FRAMES):
            rest += raw
    digest.update(schema.ModuleProto.FromString(bytes(rest)).SerializeToString(deterministic=True))
    return digest.hexdigest()[:DIGITS]


def of_all_but_id(module: bytes) -> str:
    """16 hex digits that identify a serialized module except for its id, which XLA assigns anew in each process."""
    return of_bytes(b"".join(raw for number, _, raw in _raw_fields(module) if number != _ID))


def plain(value: object, fallback: Callable[[object], object] | None = None) -> Any:
    """`value` as JSON data in one canonical form: keys and sets sorted, dataclasses as dicts, enums by name.

    `fallback` converts values of other types. Without a `fallback`, a value of another type raises DhelixError.
    """
    if value is None or isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (bytes, bytearray)):
        return f"sha256:{hashlib.sha256(value).hexdigest()}"
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Profile | Times):  # too large to write out: both hold tens of thousands of times
        return f"{type(value).__name__}:{value.digest}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        options = {f.name: plain(getattr(value, f.name), fallback) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **dict(sorted(options.items()))}
    if isinstance(value, Mapping):
        return {str(key): plain(item, fallback) for key, item in sorted(value.items(), key=lambda kv: str(kv[0]))}
    if isinstance(value, (list, tuple)):
        return [plain(item, fallback) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, fallback) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
    if callable(getattr(value, "tolist", None)):  # NumPy scalars and arrays
        return plain(value.tolist(), fallback)  # type: ignore[attr-defined]
    if fallback is not None:
        return fallback(value)
    raise DhelixError(
        f"a {type(value).__name__} has no stable text form, so hosts could not agree on it; "
        "use numbers, strings, enums, dataclasses, lists or dicts as pass options"
    )


@functools.cache
def versions() -> dict[str, str]:
    """Versions of dhelix, jax and jaxlib, and a digest of dhelix's sources (which may change within a version)."""
    found = {}
    for package in ("dhelix", "jax", "jaxlib"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "unpackaged"
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    sources = [f for folder in ("passes", "profiles", "runtime") for f in (root / folder).rglob("*.py")]
    for relative in sorted(f.relative_to(root).as_posix() for f in sources):
        digest.update(relative.encode() + b"\0" + (root / relative).read_bytes() + b"\0")
    return {**found, "dhelix sources": digest.hexdigest()[:DIGITS]}


# Compiled collective order


def collective_fingerprint(module: HloModule) -> str:
    """16 hex digits that identify the collectives of a compiled module and their execution order.

    The collectives in loops and called computations are included.
    """
    return of_bytes(_collectives_of(module)[module.entry])


def collective_order(module: HloModule) -> tuple[str, ...]:
    """The collectives of a module in execution order, as one readable line each. Each loop body appears once."""

    def walk(computation: Computation) -> Iterator[str]:
        for instruction in sequence_of(computation):
            if _is_collective(instruction):
                yield _describe(instruction)
            for called in _with_collectives(instruction, content):
                yield from walk(called)

    content = _collectives_of(module)
    return tuple(walk(module.entry))


def _collectives_of(module: HloModule) -> dict[Computation, bytes]:
    """Maps each computation to a digest of the collectives in it and in its callees.

    The digest is empty if there are no collectives. Takes time linear in the size of the module.
    """
    content: dict[Computation, bytes] = {}
    for computation in module.computations:  # callees first
        parts = []
        for instruction in sequence_of(computation):
            if _is_collective(instruction):
                parts.append(_describe(instruction).encode())
            called = [content[c] for c in _with_collectives(instruction, content)]
            if called:
                parts.append(instruction.opcode.encode() + b"".join(called))
        content[computation] = hashlib.sha256(b"\0".join(parts)).digest() if parts else b""
    return content


def _with_collectives(instruction: Instruction, content: Mapping[Computation, bytes]) -> list[Computation]:
    # A `-done` calls the computation of its start again. That computation was counted at the start.
    if instruction.opcode in ("async-done", "async-update"):
        return []
    return [c for c in instruction.called if content[c]]


def _is_collective(instruction: Instruction) -> bool:
    return instruction.opcode.removesuffix("-start") in COLLECTIVES


def _describe(instruction: Instruction) -> str:
    """Describes a collective in one line.

    The digest at the end of the line covers all attributes that affect what the collective does. XLA writes device
    groups in several forms; the digest covers all of them.
    """
    attributes = schema.InstructionProto()
    attributes.CopyFrom(instruction.proto)
    for field in _NO_ATTRIBUTES:
        attributes.ClearField(field)
    digest = of_bytes(attributes.SerializeToString(deterministic=True))
    shape = shapes.text(instruction.shape)
    return f"{instruction.opcode} {shape} channel={instruction.proto.channel_id} attributes={digest}"


# Fields with names, ids and scheduling hints of a collective. They do not affect what the collective does.
_NO_ATTRIBUTES = (
    "backend_config",
    "called_computation_ids",
    "control_predecessor_ids",
    "id",
    "metadata",
    "name",
    "operand_ids",
)


# Serialized protos, parsed only as far as needed

_NAME, _COMPUTATIONS, _ID, _STACK_FRAMES = 1, 3, 5, 17  # fields of HloModuleProto


def _computation_content(computation: bytes) -> bytes:
    proto = schema.ComputationProto.FromString(computation)
    for instruction in proto.instructions:
        instruction.ClearField("metadata")
        if "python" in instruction.custom_call_target and "callback" in instruction.custom_call_target:
            instruction.ClearField("backend_config")
    return proto.SerializeToString(deterministic=True)


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    return ((number, value) for number, value, _ in _raw_fields(message))


def _raw_fields(message: bytes) -> Iterator[tuple[int, bytes | int, bytes]]:
    """Yields each top-level field of a serialized proto: number, value, and all bytes of the field.

    The value is an int if the field is a varint, and bytes otherwise.
    """
    position = 0
    while position < len(message):
        start = position
        tag, position = _varint(message, position)
        kind = tag & 7
        value: bytes | int
        if kind == 0:
            value, position = _varint(message, position)
        elif kind in (1, 2, 5):
            size, position = _varint(message, position) if kind == 2 else ({1: 8, 5: 4}[kind], position)
            value, position = message[position : position + size], position + size
        else:
            raise ValueError(f"not a serialized proto: wire type {kind}")
        yield tag >> 3, value, message[start:position]


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
