"""Reads and writes XLA's two file formats for measured times. XLA's own scheduler can use such files.

**Cost text** holds the times of one module's instructions in microseconds. XLA calls it a PGLE or FDO profile
(`ProfiledInstructionsProto` as text). The flag `--xla_gpu_pgle_profile_file_or_directory_path` takes the path of the
file. The name of the file must end in `.pbtxt`, because XLA ignores other files:

    costs {
      name: "loop_multiply_fusion"
      cost_us: 58.2
    }

For an asynchronous collective, XLA looks up the name of its start instruction, or the name of the instruction that the
start wraps. A name may begin with the fingerprint of a module, as in `<fingerprint>::<name>`.

**The collective performance table** (`DeviceHloInstructionProfiles` as text) holds the throughput of collectives inside
a node in bytes per second, by kind, size and group size. The flag `--xla_gpu_experimental_collective_perf_table_path`
takes the path of the file. The file replaces XLA's built-in table. XLA uses the table on Hopper and newer GPUs if there
is no PGLE profile (`--xla_gpu_enable_analytical_sol_latency_estimator`, on by default). XLA takes the nearest entry,
and divides the size of the collective by the throughput of the entry.

    text = xla_tables.collective_table({key: timing.seconds for key, timing in section.collectives.items()})

XLA ignores a table that it cannot read, and aborts the process if a table has an unknown kind of collective. So only
collectives that XLA knows are written (`in_table`). JAX's compilation cache looks at the path in the flag, not at the
contents of the file. So a file with other times needs another name. The formats are defined in openxla/xla,
`hlo_op_profile.proto` and `collective_interpolator.cc`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from dhelix.errors import DhelixError
from dhelix.profiles.keys import CollectiveKey

_KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_WITH_ARITHMETIC = ("all-reduce", "reduce-scatter")
_MAX_BYTES = 2**31 - 1  # XLA computes distances between entries with 32 bits
# XLA's PrimitiveType: name -> number of the type, bytes of an element.
_TYPES = {
    "PRED": (1, 1),
    "S8": (2, 1),
    "S16": (3, 2),
    "S32": (4, 4),
    "S64": (5, 8),
    "U8": (6, 1),
    "U16": (7, 2),
    "U32": (8, 4),
    "U64": (9, 8),
    "F16": (10, 2),
    "F32": (11, 4),
    "F64": (12, 8),
    "BF16": (16, 2),
    "F8E5M2": (19, 1),
    "F8E4M3FN": (20, 1),
}
_BYTES = dict(_TYPES.values())

# --- The part of XLA's schema that dhelix writes. Reading ignores all other fields.

_F = descriptor_pb2.FieldDescriptorProto
_SCALARS = {"string": _F.TYPE_STRING, "double": _F.TYPE_DOUBLE, "int64": _F.TYPE_INT64, "bool": _F.TYPE_BOOL}
# Message -> its fields, each with name, XLA's field number and type. `*` marks a repeated field.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "Cost": (("name", 1, "string"), ("cost_us", 2, "double")),
    "Costs": (("costs", 1, "Cost*"),),
    "Layout": (("minor_to_major", 1, "int64*"),),
    "Shape": (("element_type", 2, "Type"), ("dimensions", 3, "int64*"), ("layout", 5, "Layout")),
    "Iota": (
        ("num_replica_groups", 1, "int64"),
        ("num_devices_per_group", 2, "int64"),
        ("iota_reshape_dims", 3, "int64*"),
        ("iota_transpose_perm", 4, "int64*"),
    ),
    "DeviceList": (("iota_replica_group_list", 2, "Iota"),),
    "SourceTarget": (("source", 1, "int64"), ("target", 2, "int64")),
    "Instruction": (
        ("name", 1, "string"),
        ("opcode", 2, "string"),
        ("shape", 3, "Shape"),
        ("dimensions", 14, "int64*"),
        ("channel_id", 26, "int64"),
        ("source_target_pairs", 52, "SourceTarget*"),
        ("use_global_device_ids", 71, "bool"),
        ("collective_device_list", 87, "DeviceList"),  # as XLA wrote it until 2025
        ("iota_collective_device_list", 92, "Iota"),
    ),
    "Entry": (("instruction", 1, "Instruction"), ("network_throughput_bytes_per_sec", 6, "int64")),
    "EntryList": (("entries", 1, "Entry*"),),
    "Device": (("key", 1, "string"), ("value", 2, "EntryList")),  # XLA has a map here, whose entries have the same text
    "Table": (("entries", 2, "Device*"),),
}


def _declared() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="dhelix/xla_tables.proto", package="dhelix.tables", syntax="proto3")
    enum = file.enum_type.add(name="Type")
    for name, (number, _) in {"PRIMITIVE_TYPE_INVALID": (0, 0), **_TYPES}.items():
        enum.value.add(name=name, number=number)
    for name, members in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for member, number, kind in members:
            base = kind.rstrip("*")
            field = message.field.add(name=member, number=number)
            field.label = _F.LABEL_REPEATED if kind.endswith("*") else _F.LABEL_OPTIONAL
            if base in _SCALARS:
                field.type = _SCALARS[base]
            else:
                field.type = _F.TYPE_ENUM if base == "Type" else _F.TYPE_MESSAGE
                field.type_name = f".dhelix.tables.{base}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"dhelix.tables.{name}")) for name in _MESSAGES
    }


_CLASSES = _declared()


def _parsed(text: str, message: str, what: str, origin: str) -> Any:
    try:
        return text_format.Parse(text, _CLASSES[message](), allow_unknown_field=True)
    except text_format.ParseError as error:
        reason = " ".join(str(error).split())[:200]
        raise DhelixError(f"{origin}: no {what} ({reason}): check the path") from None
    except RecursionError:
        raise DhelixError(f"{origin}: no {what}: check the path") from None


# --- Cost text.


def cost_text(seconds: Mapping[str, float]) -> str:
    """XLA's cost text for one module.

    XLA uses its own estimate for an instruction without an entry.

    Args:
      seconds: times of instructions, by their names in the scheduled HLO.

    Raises:
      DhelixError: a time is negative or not finite.
    """
    for name, value in seconds.items():
        if not (math.isfinite(value) and value >= 0):
            raise DhelixError(f"the cost of {name} is {value} s: measure it again")
    costs = (_CLASSES["Cost"](name=name, cost_us=float(f"{seconds[name] * 1e6:.6g}")) for name in sorted(seconds))
    return text_format.MessageToString(_CLASSES["Costs"](costs=costs))


def parse_cost_text(text: str, origin: str) -> dict[str, float]:
    """The times in a cost text in seconds, by the names of instructions.

    A name may contain the fingerprint of its module, as in `<fingerprint>::<name>`. If a name occurs more than once,
    the last entry counts.

    Args:
      origin: name of the text in error messages.

    Raises:
      DhelixError: the text is no cost text, or a cost is negative or not finite.
    """
    costs = _parsed(text, "Costs", "cost text of XLA", origin).costs
    for cost in costs:
        if not (math.isfinite(cost.cost_us) and cost.cost_us >= 0):
            raise DhelixError(f"{origin}: the cost of {ascii(cost.name[:80])} is {cost.cost_us}: correct it")
    return {cost.name: cost.cost_us / 1e6 for cost in costs}


# --- The collective performance table.


def in_table(key: CollectiveKey) -> bool:
    """Whether XLA's collective performance table can have an entry for a collective.

    The table has five kinds of collectives inside a node. Between nodes, XLA uses a model of the network instead. For a
    reduction, the bytes of the buffer must be a multiple of 4 times the number of devices: whole float32 values.
    """
    part = 4 * key.group_size if key.kind in _WITH_ARITHMETIC else 1
    inside = key.nodes == 1 and key.group_size > 1
    return key.kind in _KINDS and inside and 0 < key.bytes <= _MAX_BYTES and key.bytes % part == 0


def collective_table(
    seconds: Mapping[CollectiveKey, float], device: str = "sm_90", implementation: str = "nccl"
) -> str:
    """XLA's collective performance table as text, with the times of all keys for which `in_table` is true.

    For an asynchronous collective, XLA looks up kind, size and group size. It ignores the number of groups that
    communicate at once. If several numbers of groups were measured, the entry with the most groups comes first, and XLA
    uses the first one. In most programs, all GPUs take part, so there are as many groups as possible.

    Args:
      seconds: times by key.
      device: XLA's name of the GPU: `sm_` and the compute capability. For capability 10.0, the model follows
        (`sm_100_B200`).
      implementation: the implementation of collectives with which the program will run, one of `keys.IMPLEMENTATIONS`.
        Times of other implementations are left out.

    Raises:
      DhelixError: the table would be empty, or a time is not positive.
    """
    chosen = [key for key in seconds if in_table(key) and key.implementation == implementation]
    if not chosen:
        raise DhelixError(
            f"no time of a collective inside a node was measured with {implementation}: run `dhelix profile "
            "--collectives`"
        )
    entries = _CLASSES["EntryList"]()
    for key in sorted(chosen, key=lambda k: (k.kind, k.group_size, k.bytes, -k.groups)):
        if not (math.isfinite(seconds[key]) and seconds[key] > 0):
            raise DhelixError(f"the time of {key} is {seconds[key]} s: measure it again")
        for element_type in ("BF16", "F32") if key.kind in _WITH_ARITHMETIC else ("U8",):
            _add_entry(entries, key, element_type, round(key.bytes / seconds[key]))
    return text_format.MessageToString(_CLASSES["Table"](entries=[_CLASSES["Device"](key=device, value=entries)]))


def _add_entry(entries: Any, key: CollectiveKey, element_type: str, throughput: int) -> None:
    number, width = _TYPES[element_type]
    parts = key.group_size if key.kind == "reduce-scatter" else 1
    entry = entries.entries.add(network_throughput_bytes_per_sec=max(throughput, 1))
    instruction = entry.instruction
    instruction.opcode, instruction.channel_id = key.kind, 1
    instruction.shape.element_type = number
    instruction.shape.dimensions.append(key.bytes // (width * parts))
    instruction.shape.layout.minor_to_major.append(0)
    if key.kind == "collective-permute":
        for source, target in _rings(key.group_size, key.groups):
            instruction.source_target_pairs.add(source=source, target=target)
        return
    if key.kind != "all-reduce":
        instruction.dimensions.append(0)
    instruction.use_global_device_ids = key.kind != "all-to-all"
    groups = instruction.iota_collective_device_list
    groups.num_replica_groups, groups.num_devices_per_group = key.groups, key.group_size
    groups.iota_reshape_dims.append(key.groups * key.group_size)
    groups.iota_transpose_perm.append(0)


def _rings(size: int, groups: int) -> Iterable[tuple[int, int]]:
    """The (source, target) pairs of a collective-permute, in which each device sends to the next one of its group."""
    return ((g * size + i, g * size + (i + 1) % size) for g in range(groups) for i in range(size))


def parse_collective_table(text: str, origin: str, device: str = "sm_90") -> dict[CollectiveKey, float]:
    """The times of the collectives in a table, in seconds. Every group is assumed to be inside one node.

    Entries for which there is no key are left out: entries of other kinds, entries without a size or groups, and
    collective-permutes that are not rings of equal size. If a table has several times for a key, for example one for
    each element type, the last time counts.

    Args:
      origin: name of the text in error messages.
      device: XLA's name of the GPU, as in `collective_table`.

    Raises:
      DhelixError: the text is not a collective performance table, or has no entries of `device`.
    """
    table = _parsed(text, "Table", "collective performance table of XLA", origin)
    lists = [entry.value for entry in table.entries if entry.key == device]
    if not lists:
        known = ", ".join(sorted(ascii(entry.key[:40]) for entry in table.entries)) or "none"
        raise DhelixError(f"{origin}: no entries for {device}: choose one of its devices ({known})")
    result = {}
    for entry in (entry for entries in lists for entry in entries.entries):
        key = _table_key(entry.instruction)
        if key is not None and entry.network_throughput_bytes_per_sec > 0:
            result[key] = key.bytes / entry.network_throughput_bytes_per_sec
    return result


def _table_key(instruction: Any) -> CollectiveKey | None:
    kind, shape = instruction.opcode, instruction.shape
    size = _BYTES.get(shape.element_type, 0) * math.prod(shape.dimensions)
    if kind == "collective-permute":
        group_size, groups = _ring_size([(pair.source, pair.target) for pair in instruction.source_target_pairs])
    else:
        old = instruction.collective_device_list.iota_replica_group_list
        new = instruction.iota_collective_device_list
        group_size, groups = max(
            (new.num_devices_per_group, new.num_replica_groups), (old.num_devices_per_group, old.num_replica_groups)
        )
    if kind not in _KINDS or size <= 0 or group_size < 1 or groups < 1:
        return None
    return CollectiveKey(kind, size * group_size if kind == "reduce-scatter" else size, group_size, groups=groups)


def _ring_size(pairs: list[tuple[int, int]]) -> tuple[int, int]:
    """The length and the number of the rings that `pairs` form; (0, 0) if they do not form rings of equal length."""
    following = dict(pairs)
    lengths = []
    while following:
        start, at = following.popitem()
        length = 1
        while at != start:
            if at not in following:
                return 0, 0
            at, length = following.pop(at), length + 1
        lengths.append(length)
    return (lengths[0], len(lengths)) if len(set(lengths)) == 1 and sum(lengths) == len(pairs) else (0, 0)
