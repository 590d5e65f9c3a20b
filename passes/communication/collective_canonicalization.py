"""Writes the collectives that XLA's partitioner makes of sharding annotations as a shard_map would have them.

Before, with rows sharded over 4 devices:                After:
    n = bf16[2,64] convert(...)                              m = bf16[2,64] multiply(n, broadcast(scale))
    g = bf16[8,64] all-gather(n)                             g = bf16[8,64] all-gather(m)
    m = bf16[8,64] multiply(g, broadcast(scale))             y = bf16[8,16] dot(g, w)
    y = bf16[8,16] dot(m, w)

    a = bf16[8,64] all-reduce(dot(x, v))                     s = bf16[8,64] add(dot(x, v), dot(y, w))
    b = bf16[8,64] all-reduce(dot(y, w))                     r = bf16[2,64] reduce-scatter(s)
    r = bf16[2,64] dynamic-slice(add(a, b), my rows)

The partitioner gathers the operand of an elementwise operation as soon as its result is wanted whole, and sums whole
arrays of which each device keeps a part. A collective beside its matrix product can be replaced
(`passes/communication/collective_matmul/collective_matmul.py`); with an elementwise operation between them, or as an
all-reduce, it cannot.

Contract
    Consumes  a partitioned program: plain collectives, before they are asynchronous. PRE_SCHEDULER is that place.
    Makes     1. all-gathers of what is elementwise behind them, where a product reads that;
              2. a reduce-scatter of all-reduces, summed, moved and then cut into each device's part.
    Leaves    the rest, with one note for each reason why what looks like these is none.

Why it is legal
    1. An element of the result follows from one gathered element and from operands that are the same for all rows
       (scalars, and what is broadcast along the gathered dimension) and on all devices that gather, which is proved
       (`passes/analysis/replication.py`). So each device computes its rows of the same numbers, instead of all devices
       all rows. Nothing else reads the gathered array, so it is gathered once.
    2. Sums and moves of sums over devices are sums over devices of sums and moves; additions may round in another
       order. That a device cuts out the part that a reduce-scatter would give it is not read off names: the offset is
       evaluated for each device, from partition-id and constants, with XLA's integer arithmetic.

Cost: none. Elementwise operations run once per row and fuse with what made the row; where types get wider behind the
gather, and more would be gathered, it stays. The reduce-scatter is the one that XLA makes itself, later (its
all-reduce reassociation and reduce-scatter creator), and is here before `collective-matmul`.
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

WIDER = "what is computed of an all-gather is wider than what is gathered"
OTHERS = "what is computed of an all-gather reads more that is not known to be the same on all devices"
READ = "a sum over devices is cut into parts, and read by others or ordered, too"
MIXED = "what is cut into parts is the sum of more than sums over devices"
ELSEWHERE = "the part of a sum over devices that is cut out is not known to be the device's own"
_ELEMENTWISE = ELEMENTWISE | {"ceil", "floor"}
_LINEAR = frozenset("add copy reshape transpose".split())
_MOST_NEEDED = 64  # instructions that an offset may follow from
Users = dict[Instruction, list[Instruction]]
Offsets = dict[Instruction, list[int] | None]
"""Scalars as each device has them, for they are the same in many places."""


@dataclass(frozen=True)
class CollectiveCanonicalization:
    """No options."""

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
            context.note("all-gathers behind what is elementwise", count=late)
        if scattered:
            context.note("reduce-scatters of all-reduces that were cut into parts", count=scattered)
        return bool(late or scattered)


def _put_in_place(computation: Computation, stands_for: Mapping[Instruction, Instruction]) -> None:
    """Whatever reads the keys reads what stands for them, and they go."""

    def last(value: Instruction) -> Instruction:  # a part of a sum over one axis may be summed over another one
        while value in stands_for:
            value = stands_for[value]
        return value

    if stands_for:
        replace_all_uses(computation, {old: last(new) for old, new in stands_for.items()})
        drop_dead(computation)


# all-gather -> elementwise


def _gather_late(computation: Computation, replication: Replication, left: Counter[str]) -> int:
    """Moves all-gathers of a computation behind what is elementwise. Returns how many."""
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
    """Elementwise instructions behind a gather, each the only reader of the one before, up to the last."""
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
    """What the instructions behind a gather read beside each other and the gather."""
    chain = {gather, *behind}
    return list(dict.fromkeys(o for instruction in behind for o in instruction.operands if o not in chain))


def _meets_product(value: Instruction, users: Users) -> bool:
    """Whether a matrix product reads `value` through moves."""
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
    """The instructions `behind` a gather, of what a device has before it."""
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


# all-reduce -> dynamic-slice


def _scatter_sums(computation: Computation, left: Counter[str]) -> int:
    """Makes reduce-scatters of all-reduces that are cut into parts. Returns how many."""
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
        scatter.proto.opcode = "reduce-scatter"
        scatter.proto.shape.CopyFrom(part.shape)
        scatter.proto.dimensions[:] = [dimension]
        stands_for.update({part: scatter, **{term: term.operands[0] for term in terms}})
        made += 1
    _put_in_place(computation, stands_for)
    return made


def _terms(value: Instruction, users: Users, ordered: set[Instruction]) -> Iterator[Instruction]:
    """What `value` is the sum of, through moves, as far as nothing else reads what stands between."""
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
    """Those over which all of `terms` are summed. Raises Unfit where the part is not of such sums alone."""
    sums = [t for t in terms if t.opcode == "all-reduce" and len(t.operands) == 1 and is_sum(t) and not is_marked(t)]
    groups = {device_groups(term) if term.proto.channel_id else () for term in sums}
    if len(sums) < len(terms) or len(groups) != 1:
        raise Unfit(MIXED)
    if part in ordered or any(term in ordered or not _is_read_once(term, users) for term in terms):
        raise Unfit(READ)
    return groups.pop()


def _own_dimension(part: Instruction, groups: Groups, offsets: Offsets) -> int:
    """The dimension of which each device cuts out the part that has its number in its group; Unfit if it does not.

    Along the others the part is whole, wherever it is said to begin.
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
    """A scalar as each of so many devices has it; None where it does not follow from their numbers."""
    try:
        needed = _needed(value)
        return [_on_device(value, needed, device) for device in range(devices)]
    except Unknown:
        return None


def _needed(value: Instruction) -> list[Instruction]:
    """All that a scalar follows from. Raises Unknown where that is much."""
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
    """A scalar as a device has it: of its number, of constants, and of tables with a row for each device."""
    known = {i: device for i in needed if i.opcode == "partition-id"}
    tables = [i for i in needed if i.opcode == "dynamic-slice" and i.operands[0].opcode == "constant"]
    rows = {table: _row(table, evaluate(table.operands[1], {}, known)) for table in tables}
    return evaluate(value, {}, {**known, **rows})


def _row(table: Instruction, number: int) -> int:
    """An element of a constant array of integers. Raises Unknown for other tables."""
    literal, dimensions = table.operands[0].proto.literal, table.operands[0].shape.dimensions
    values = literal.s32s or literal.u32s or literal.s64s or literal.u64s
    if len(dimensions) != 1 or list(table.shape.dimensions) != [1] or not 0 <= number < len(values):
        raise Unknown
    return values[number]
