"""Finds tables that a program only looks up: all that it reads of them is rows at indices.

    t = convert(table)                       bf16[V, H]
    for m: rows = gather(t, tokens[m])       bf16[B, S, H]         rows_read(module)[0] == trips * B * S

Under automatic sharding, XLA need not gather such a table if it is split. Devices may exchange the rows instead.
A table that a shard_map takes in is gathered there, so it is none of these.
"""

from __future__ import annotations

from collections.abc import Iterator

from dhelix.passes.analysis.execution import executions
from dhelix.passes.hlo import HloModule, Instruction, shapes
from dhelix.passes.hlo.constraints import is_sharding_constraint
from dhelix.passes.sharding.states.moves import Users
from dhelix.passes.sharding.states.updates import Update, results

_MOVES = frozenset(("convert", "copy"))


def rows_read(module: HloModule) -> dict[int, int]:
    """How many rows a step looks up, on all devices, by the numbers of the arguments that are only looked up.

    Optimizer updates do not count as readers, and neither does a result. The calls of the program are inlined, as
    `find_states` leaves it.
    """
    entry, runs, users, found = module.entry, executions(module), Users(), dict[int, int]()
    others = {entry.root, *(step for result in results(entry) for step in Update.of(result).steps)}
    for table in (argument for argument in entry.parameters if len(argument.shape.dimensions) == 2):
        readers = [end for user in users.of(table) if user not in others for end in _readers(user, table, users)]
        if readers and all(_takes_rows(reader, table) for reader in readers):
            read = sum(runs.get(reader.computation, 0) * shapes.element_count(reader.shape) for reader in readers)
            found[table.proto.parameter_number] = read // table.shape.dimensions[1]
    return found


def _readers(user: Instruction, value: Instruction, users: Users) -> Iterator[Instruction]:
    """What reads the elements of `value`, if `user` does so: it may move them, or be the state of loops."""
    if user.opcode in _MOVES or is_sharding_constraint(user):
        for reader in users.of(user):
            yield from _readers(reader, user, users)
    elif user.opcode == "tuple" and users.of(user) and all(loop.opcode == "while" for loop in users.of(user)):
        for loop in users.of(user):
            for place in _places(user, value):
                yield from _in_loop(loop, place, users)
    else:
        yield user


def _in_loop(loop: Instruction, place: int, users: Users) -> Iterator[Instruction]:
    """What reads element `place` of a loop's state, in the loop or after it."""
    for holder in (*(called.parameters[0] for called in loop.called), loop):
        for element in (read for read in users.of(holder) if read.tuple_index == place):
            for reader in users.of(element):
                kept = holder is not loop and reader is loop.called[0].root and _places(reader, element) == [place]
                yield from () if kept else _readers(reader, element, users)


def _places(user: Instruction, value: Instruction) -> list[int]:
    return [k for k, operand in enumerate(user.operands) if operand is value]


def _takes_rows(reader: Instruction, table: Instruction) -> bool:
    """Whether an instruction gathers whole rows of `table`, which it may read after moves."""
    height_width = list(table.shape.dimensions)
    return (
        reader.opcode == "gather"
        and list(reader.operands[0].shape.dimensions) == height_width
        and list(reader.proto.gather_slice_sizes) == [1, height_width[1]]
    )
