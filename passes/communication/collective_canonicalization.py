"""Rewrites collectives of XLA's partitioner, so that they have the form of collectives in a shard_map.

Before, with rows sharded over 4 devices:                After:
    n = bf16[2,64] convert(...)                              m = bf16[2,64] multiply(n, broadcast(scale))
    g = bf16[8,64] all-gather(n)                             g = bf16[8,64] all-gather(m)
    m = bf16[8,64] multiply(g, broadcast(scale))             y = bf16[8,16] dot(g, w)
    y = bf16[8,16] dot(m, w)

    a = bf16[8,64] all-reduce(dot(x, v))                     s = bf16[8,64] add(dot(x, v), dot(y, w))
    b = bf16[8,64] all-reduce(dot(y, w))                     r = bf16[2,64] reduce-scatter(s)
    r = bf16[2,64] dynamic-slice(add(a, b), my rows)

The partitioner gathers the operand of an elementwise operation if a user needs the operation's whole result. It also
sums whole arrays over devices, even if each device keeps only a part of the sum. A collective matmul can replace a
collective that is directly next to its matrix product (`passes/communication/collective_matmul/collective_matmul.py`).
It cannot replace a collective if an elementwise operation stands between the two, nor an all-reduce whose sum is cut
into parts.

Contract
    Consumes  a partitioned program with synchronous collectives (stage PRE_SCHEDULER).
    Makes     1. an all-gather after elementwise operations instead of an all-gather before them, if a product reads the
                 result;
              2. a reduce-scatter, from all-reduces that are added, reshaped or transposed, and then cut into each
                 device's part.
    Leaves    everything else, with one note for each reason.

Why it is legal
    1. An element of the result depends on one gathered element and on other operands. The other operands are the same
       for all rows: they are scalars, or values broadcast along the gathered dimension. They are also proved to be the
       same on all devices of the group (`passes/analysis/replication.py`). So each device may compute its own rows
       instead of all rows. Nothing else reads the gathered array, so one gather suffices.
    2. Additions, reshapes and transposes commute with a sum over devices. Only rounding may differ, because the order
       of additions changes. The pass proves that each device cuts out the part that a reduce-scatter would give to it.
       For this proof, the pass evaluates the offset on each device from partition-id and constants, with XLA's integer
       arithmetic.

Cost: none. Elementwise operations run once per row and fuse with the producer of the row. An all-gather stays if its
elementwise users widen the type, because the moved all-gather would transfer more bytes. XLA's own passes (all-reduce
reassociation, reduce-scatter creator) would make the same reduce-scatter, but too late: they run after the pass
`collective-matmul`, which needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dhelix.passes.analysis.collectives import Groups, device_groups
from dhelix.passes.analysis.replication import Replication
from dhelix.passes.communication.collective_matmul.pattern import Unfit, is_marked, is_product, is_sum, only_moves
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, graph, shapes
from dhelix.passes.hlo.edit import ELEMENTWISE, drop_dead, replace_all_uses
from dhelix.passes.hlo.loops import Unknown, evaluate

WIDER = "the elementwise result of an all-gather has a wider type than the gathered array"
OTHERS = "an elementwise operation on an all-gather reads a value that may differ between devices"
READ = "a sliced sum over devices has other readers or control dependencies"
MIXED = "a sliced sum has terms that are not sums over the same devices"
ELSEWHERE = "a slice of a sum over devices is not proved to be the device's own part"
_ELEMENTWISE = ELEMENTWISE | {"ceil", "floor"}
_LINEAR = frozenset("add copy reshape transpose".split())
_MOST_NEEDED = 64  # instructions that an offset may depend on
Users = dict[Instruction, list[Instruction]]
Offsets = dict[Instruction, list[int] | None]
"""Caches the value of a scalar on each device; None if unknown. Many slices share an offset."""


@dataclass(frozen=True)
class CollectiveCanonicalization:
    """Moves all-gathers behind elementwise operations and makes reduce-scatters of sliced all-reduces. No options."""

    name = "collective-canonicalization"
    stage = Stage.PRE_SCHEDULER

    def run(self, module: HloModule, context: PassContext) -> bool:
        if module.is_scheduled:
            context.note("left alone: the module is scheduled")
            return False
        left, late, scattered = Counter[str](), 0, 0
        replication = Replication(module)
        for computation in list(module.computations):
            if any(i.opcode in ("all-gather", "all-reduce") for i in computation.instructions):
                late += _gather_late(computation, replication, left)
                scattered += _scatter_sums(computation, left)
        context.left_alone(left)
        if late:
            context.note("all-gathers moved behind elementwise operations", count=late)
        if scattered:
            context.note("sliced all-reduces are now reduce-scatters", count=scattered)
        return bool(late or scattered)


def _put_in_place(computation: Computation, stands_for: Mapping[Instruction, Instruction]) -> None:
    """Replaces the uses of each key by its value and removes the keys."""

    def last(value: Instruction) -> Instruction:  # a part of a sum may itself be a term of another sum
        while value in stands_for:
            value = stands_for[value]
        return value

    if stands_for:
        replace_all_uses(computation, {old: last(new) for old, new in stands_for.items()})
        drop_dead(computation)


# 1. all-gather -> elementwise


def _gather_late(computation: Computation, replication: Replication, left: Counter[str]) -> int:
    """Moves all-gathers of a computation behind elementwise operations. Returns the number of moved all-gathers."""
    users, ordered = computation.users(), graph.tied(computation)
    builder, stands_for = Builder(computation), dict[Instruction, Instruction]()
    for gather in [i for i in computation.instructions if i.opcode == "all-gather"]:
        if len(gather.operands) != 1 or shapes.is_tuple(gather.shape) or is_marked(gather) or gather in ordered:
            continue
        behind = _elementwise_readers(gather, users, ordered)
        if not behind or not _meets_product(behind[-1], users):
            continue
        if _width(behind[-1]) > _width(gather):
            left[WIDER] += 1
            continue
        groups = device_groups(gather) if gather.proto.channel_id else ()
        if not replication.same_on(groups, *_others(gather, behind)):
            left[OTHERS] += 1
            continue
        stands_for[behind[-1]] = gather
        gather.operands = [_of_a_shard(builder, gather, behind)]
        gather.proto.shape.element_type = behind[-1].shape.element_type
    _put_in_place(computation, stands_for)
    return len(stands_for)


def _elementwise_readers(gather: Instruction, users: Users, ordered: set[Instruction]) -> list[Instruction]:
    """The chain of elementwise instructions behind a gather. Each is the only reader of its predecessor."""
    found, value = list[Instruction](), gather
    dimension = gather.proto.dimensions[0]
    while value is not gather.computation.root and len(users[value]) == 1:
        (reader,) = users[value]
        same_size = reader.shape.dimensions == gather.shape.dimensions
        if reader.opcode not in _ELEMENTWISE or reader in ordered or is_marked(reader) or not same_size:
            break
        if not all(o is value or _is_same_for_rows(o, dimension) for o in reader.operands):
            break
        found.append(reader)
        value = reader
    return found


def _is_same_for_rows(value: Instruction, dimension: int) -> bool:
    return not value.shape.dimensions or value.opcode == "broadcast" and dimension not in value.proto.dimensions


def _others(gather: Instruction, behind: Sequence[Instruction]) -> list[Instruction]:
    """The operands that the instructions `behind` a gather read from outside their chain."""
    chain = {gather, *behind}
    return list(dict.fromkeys(o for instruction in behind for o in instruction.operands if o not in chain))


def _meets_product(value: Instruction, users: Users) -> bool:
    """Whether a matrix product reads `value`, directly or through moves."""
    pending = [value]
    while pending:
        for user in users[pending.pop()]:
            if is_product(user):
                return True
            if only_moves(user):
                pending.append(user)
    return False


def _width(value: Instruction) -> int:
    return shapes.byte_size(value.shape) // max(shapes.element_count(value.shape), 1)


def _of_a_shard(builder: Builder, gather: Instruction, behind: Sequence[Instruction]) -> Instruction:
    """Copies the instructions `behind` a gather for a device's own shard. Returns the last copy."""
    dimension, before = gather.proto.dimensions[0], gather.operands[0]
    rows = before.shape.dimensions[dimension]
    known = {gather: before}
    for instruction in behind:
        for operand in instruction.operands:
            if operand not in known:
                scalar = not operand.shape.dimensions
                known[operand] = operand if scalar else builder.copy(operand, operand.operands)
        known[instruction] = builder.copy(instruction, [known[o] for o in instruction.operands])
    for original, copy in known.items():
        if original is not gather and copy is not original:
            copy.proto.shape.dimensions[dimension] = rows
    return known[behind[-1]]


# 2. all-reduce -> dynamic-slice


def _scatter_sums(computation: Computation, left: Counter[str]) -> int:
    """Makes reduce-scatters from all-reduces whose sums are cut into parts. Returns the number of reduce-scatters."""
    users, ordered = computation.users(), graph.tied(computation)
    builder, stands_for = Builder(computation), dict[Instruction, Instruction]()
    offsets: Offsets = {}
    made = 0
    for part in [i for i in computation.instructions if i.opcode == "dynamic-slice"]:
        terms = list(dict.fromkeys(_terms(part.operands[0], users, ordered)))
        if not any(term.opcode == "all-reduce" for term in terms):
            continue
        try:
            groups = _groups(part, terms, users, ordered)
            dimension = _own_dimension(part, groups, offsets)
        except Unfit as reason:
            left[str(reason)] += 1
            continue
        scatter = builder.copy(terms[0], part.operands[:1])
        scatter.proto.name = computation.module.unique_name("reduce-scatter")
        scatter.opcode = "reduce-scatter"
        scatter.proto.shape.CopyFrom(part.shape)
        scatter.proto.dimensions[:] = [dimension]
        stands_for.update({part: scatter, **{term: term.operands[0] for term in terms}})
        made += 1
    _put_in_place(computation, stands_for)
    return made


def _terms(value: Instruction, users: Users, ordered: set[Instruction]) -> Iterator[Instruction]:
    """The terms of the sum `value`. An addition, copy, reshape or transpose with several readers is one term."""
    pending = [value]
    while pending:
        top = pending.pop()
        if top.opcode in _LINEAR and top not in ordered and _is_read_once(top, users):
            pending.extend(reversed(top.operands))
        else:
            yield top


def _is_read_once(value: Instruction, users: Users) -> bool:
    return len(users[value]) == 1 and value is not value.computation.root


def _groups(part: Instruction, terms: Sequence[Instruction], users: Users, ordered: set[Instruction]) -> Groups:
    """The groups over which all `terms` are summed. Raises Unfit if a term is not a sum over these groups."""
    sums = [t for t in terms if t.opcode == "all-reduce" and len(t.operands) == 1 and is_sum(t) and not is_marked(t)]
    groups = {device_groups(term) if term.proto.channel_id else () for term in sums}
    if len(sums) < len(terms) or len(groups) != 1:
        raise Unfit(MIXED)
    if part in ordered or any(term in ordered or not _is_read_once(term, users) for term in terms):
        raise Unfit(READ)
    return groups.pop()


def _own_dimension(part: Instruction, groups: Groups, offsets: Offsets) -> int:
    """The dimension along which each device cuts out its own part.

    The own part of the device at position n of its group is part n.

    Along other dimensions, the part is as long as the whole array, so the offset does not matter. Raises Unfit if the
    part is not proved to be the device's own.
    """
    whole, devices = part.operands[0].shape.dimensions, sorted(device for group in groups for device in group)
    cut = [n for n, size in enumerate(part.shape.dimensions) if size != whole[n]]
    if not devices or devices != list(range(len(devices))) or len(cut) != 1 or len(part.operands) != 1 + len(whole):
        raise Unfit(ELSEWHERE)
    size, begin = part.shape.dimensions[cut[0]], part.operands[1 + cut[0]]
    if begin not in offsets:
        offsets[begin] = _on_devices(begin, len(devices))
    found = offsets[begin]
    own = {device: number * size for group in groups for number, device in enumerate(group)}
    if any(len(group) * size != whole[cut[0]] for group in groups) or found != [own[device] for device in devices]:
        raise Unfit(ELSEWHERE)
    return cut[0]


def _on_devices(value: Instruction, devices: int) -> list[int] | None:
    """The scalar `value` on each device; None if it cannot be computed from the device's number and constants."""
    try:
        needed = _needed(value)
        return [_on_device(value, needed, device) for device in range(devices)]
    except Unknown:
        return None


def _needed(value: Instruction) -> list[Instruction]:
    """All instructions that a scalar depends on. Raises Unknown if there are more than `_MOST_NEEDED`."""
    found = {value: None}
    pending = [value]
    while pending:
        for operand in pending.pop().operands:
            if operand not in found:
                found[operand] = None
                pending.append(operand)
        if len(found) > _MOST_NEEDED:
            raise Unknown
    return list(found)


def _on_device(value: Instruction, needed: Sequence[Instruction], device: int) -> int:
    """The scalar `value` on a device.

    It is computed from the device's number, constants, and constant arrays with an element for each device.
    """
    known = {i: device for i in needed if i.opcode == "partition-id"}
    tables = [i for i in needed if i.opcode == "dynamic-slice" and i.operands[0].opcode == "constant"]
    rows = {table: _row(table, evaluate(table.operands[1], {}, known)) for table in tables}
    return evaluate(value, {}, {**known, **rows})


def _row(table: Instruction, number: int) -> int:
    """Element `number` of a one-dimensional constant array of integers. Raises Unknown for other tables."""
    literal, dimensions = table.operands[0].proto.literal, table.operands[0].shape.dimensions
    values = literal.s32s or literal.u32s or literal.s64s or literal.u64s
    if len(dimensions) != 1 or list(table.shape.dimensions) != [1] or not 0 <= number < len(values):
        raise Unknown
    return values[number]
