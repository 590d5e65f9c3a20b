"""Edits that move, copy or remove instructions: copying computations, inlining calls, dropping dead code."""

from collections.abc import Callable, Iterable, Mapping

from dhelix.passes.hlo.builder import Builder
from dhelix.passes.hlo.module import Computation, Instruction

# Opcodes that apply a scalar computation to elements of their operands. Several instructions may share the computation.
_APPLIED = frozenset(
    "all-reduce all-reduce-start map reduce reduce-scatter reduce-window scatter select-and-scatter sort".split()
)
ELEMENTWISE = frozenset(
    "abs add clamp compare convert cosine divide erf exponential exponential-minus-one log log-plus-one logistic "
    "maximum minimum multiply negate power rsqrt select sign sine sqrt subtract tanh".split()
)
"""Arithmetic opcodes that compute each result element from the operand elements at the same position."""
_EFFECTS = frozenset("infeed outfeed send send-done recv recv-done rng rng-get-and-update-state".split())
TO_LOCAL, TO_GLOBAL = "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape"
"""Custom calls before and after the call of a `shard_map`. Both are marked as side effects, so no pass drops only one.
"""
SHARDING = "Sharding"
"""Custom call of a sharding constraint. If its array still has to be summed, it is marked as a side effect, too."""


def combines_by(reduction: Instruction) -> str:
    """The opcode with which a reduction, scatter or all-reduce combines two numbers.

    The result is empty if the combination takes more than one operation.
    """
    root = reduction.called[0].root
    return root.opcode if set(root.operands) == set(reduction.called[0].parameters) else ""


def has_side_effect(instruction: Instruction) -> bool:
    """Whether the instruction does more than compute its result.

    Side effects of called computations count. Side-effect marks of `SHARDING`, `TO_LOCAL` and `TO_GLOBAL` do not.
    """
    pending = [instruction]
    seen: set[Computation] = set()
    while pending:
        top = pending.pop()
        if top.opcode in _EFFECTS or _has_effect(top):
            return True
        for called in top.called:
            if called not in seen:
                seen.add(called)
                pending.extend(called.instructions)
    return False


def _has_effect(call: Instruction) -> bool:
    annotates = call.proto.custom_call_target in (TO_LOCAL, TO_GLOBAL, SHARDING)
    return call.proto.custom_call_has_side_effect and not annotates


def copy_called(instruction: Instruction) -> list[Computation]:
    """The called computations for a copy of `instruction`. Loops, branches, calls and fusions get their own copies."""
    if instruction.opcode in _APPLIED:
        return instruction.called
    return [copy_computation(c) for c in instruction.called]


def copy_computation(original: Computation) -> Computation:
    """Copies a computation, the computations of its loops, branches, calls and fusions, and all their schedules."""
    module = original.module
    copy = module.new_computation(original.name)
    name, number = copy.name, copy.id
    copy.proto.CopyFrom(original.proto)
    copy.proto.name, copy.proto.id = name, number
    copies: dict[Instruction, Instruction] = {}
    copy_instructions(Builder(copy), original.instructions, copies)
    if original in module.schedule:
        module.schedule[copy] = [copies[i] for i in module.schedule[original]]
    copy.root = copies[original.root]
    return copy


def copy_instructions(
    builder: Builder, instructions: Iterable[Instruction], copies: dict[Instruction, Instruction]
) -> None:
    """Appends copies of `instructions`, which list operands before users.

    Args:
      copies: for each value that `instructions` read from outside, the value that the copies read instead. Receives
        each new copy. Instructions that are in `copies` already are not copied.
    """
    made = [i for i in instructions if i not in copies]
    for instruction in made:
        operands = [copies[o] for o in instruction.operands]
        copies[instruction] = builder.copy(instruction, operands, copy_called(instruction))
    for instruction in made:
        kept = [copies[p] for p in instruction.control_predecessors if p in copies]
        copies[instruction].control_predecessors = kept


def replace_uses(computation: Computation, old: Instruction, new: Instruction) -> None:
    """Makes every user of `old` except `new` itself read `new`. If `old` is the root, `new` becomes the root."""
    replace_all_uses(computation, {old: new})


def replace_all_uses(computation: Computation, stands_for: Mapping[Instruction, Instruction]) -> None:
    """Does `replace_uses` for many instructions in one sweep. `stands_for` maps old instructions to new ones."""
    for instruction in computation.instructions:
        if any(o in stands_for for o in instruction.operands):
            instruction.operands = [
                o if stands_for.get(o, instruction) is instruction else stands_for[o] for o in instruction.operands
            ]
    computation.root = stands_for.get(computation.root, computation.root)


def read_through(computation: Computation) -> None:
    """Makes readers of a `get-tuple-element` of a `tuple` instruction read the tuple's operand directly."""
    computation.sort()
    stands_for: dict[Instruction, Instruction] = {}
    for i in computation.instructions:
        i.operands = [stands_for.get(o, o) for o in i.operands]
        if i.opcode == "get-tuple-element" and i.operands[0].opcode == "tuple":
            stands_for[i] = i.operands[0].operands[i.tuple_index]
    computation.root = stands_for.get(computation.root, computation.root)


def take_over(computation: Computation, changed: Computation) -> None:
    """Moves the instructions and root of `changed` into `computation`. Do not use `changed` afterwards."""
    computation.instructions, computation.root = changed.instructions, changed.root
    for instruction in computation.instructions:
        instruction.computation = computation


def share_equal(computation: Computation) -> None:
    """Merges instructions that compute the same from the same operands. Does not merge calls or side effects."""
    computation.sort()
    first: dict[tuple[bytes, tuple[Instruction, ...]], Instruction] = {}
    stands_for: dict[Instruction, Instruction] = {}
    for i in computation.instructions:
        i.operands = [stands_for.get(o, o) for o in i.operands]
        if i.called or i.control_predecessors or i.opcode == "parameter" or has_side_effect(i):
            continue
        what = type(i.proto)()
        what.CopyFrom(i.proto)
        for field in ("name", "id", "metadata", "operand_ids"):
            what.ClearField(field)
        kept = first.setdefault((what.SerializeToString(deterministic=True), tuple(i.operands)), i)
        if kept is not i:
            stands_for[i] = kept
    computation.root = stands_for.get(computation.root, computation.root)
    drop_dead(computation)


def inline_calls(computation: Computation, keep: Callable[[Instruction], bool] = lambda call: False) -> int:
    """Replaces each `call` in `computation` by the callee's instructions, recursively, unless `keep(call)`.

    JAX lowers `jit`, `custom_vjp` and loop bodies to calls of functions. XLA inlines these functions later. As in XLA,
    the call's name stack is put before the callee's name stacks. Reads of elements of a `tuple` instruction become
    reads of its operands. Returns the number of calls replaced.
    """
    computation.sort()
    computation.module.reserve_names()
    instructions, computation.instructions = computation.instructions, []
    values: dict[Instruction, Instruction] = {}
    count = _inline(Builder(computation), instructions, values, keep, None)
    computation.root = values[computation.root]
    return count


def _inline(
    builder: Builder,
    instructions: Iterable[Instruction],
    values: dict[Instruction, Instruction],
    keep: Callable[[Instruction], bool],
    stack: str | None,
) -> int:
    """Appends `instructions` and replaces their calls. Returns the number of calls replaced.

    If `stack` is None, appends the instructions themselves. Otherwise, appends copies, with `stack` before their name
    stacks.

    `values` maps parameters to arguments, and receives the replacement of every instruction.
    """
    placed = builder.computation.instructions
    bodies: dict[Instruction, list[Instruction]] = {}
    count = 0
    for original in instructions:
        if original in values:
            continue
        operands = [values[o] for o in original.operands]
        after = [q for p in original.control_predecessors for q in bodies.get(p, [values[p]])]
        if original.opcode == "get-tuple-element" and operands[0].opcode == "tuple" and not after:
            values[original] = operands[0].operands[original.tuple_index]
        elif original.opcode == "call" and not keep(original):
            callee, start = original.called[0], len(placed)
            inner = dict(zip(callee.parameters, operands, strict=True))
            count += 1 + _inline(builder, callee.instructions, inner, keep, _join(stack, original.op_name))
            values[original] = inner[callee.root]
            for instruction in placed[start:] if after else ():
                instruction.control_predecessors.extend(after)
            bodies[original] = placed[start:] or after
        else:
            instruction = original
            if stack is None:
                original.operands = operands
                placed.append(original)
            else:
                instruction = builder.copy(original, operands, copy_called(original))
                put_under(stack, instruction)
            instruction.control_predecessors = after
            values[original] = instruction
    return count


def _join(outer: str | None, inner: str) -> str:
    return f"{outer}/{inner}" if outer and inner else outer or inner


def put_under(stack: str, instruction: Instruction) -> None:
    """Puts `stack` before the name stacks of `instruction` and of all instructions in its loop body or branches.

    Does not change the computations of calls, because inlining does that.
    """
    if instruction.op_name:
        instruction.proto.metadata.op_name = _join(stack, instruction.op_name)
    if instruction.opcode in ("while", "conditional"):
        for called in instruction.called:
            for inner in called.instructions:
                put_under(stack, inner)


def drop_dead(computation: Computation) -> int:
    """Removes instructions on which neither the root nor a side effect depends. Keeps parameters.

    Returns the number of removed instructions.
    """
    computation.sort()
    live: set[Instruction] = {computation.root}
    for instruction in reversed(computation.instructions):
        if instruction in live or instruction.opcode == "parameter" or has_side_effect(instruction):
            live.add(instruction)
            live.update(instruction.operands)
            live.update(instruction.control_predecessors)
    before = len(computation.instructions)
    computation.instructions = [i for i in computation.instructions if i in live]
    schedule = computation.module.schedule
    if computation in schedule:
        schedule[computation] = [i for i in schedule[computation] if i in live]
    return before - len(computation.instructions)
