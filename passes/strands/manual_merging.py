"""Merges pairs of shard_maps, one of each strand, into one shard_map, so that the loops inside can merge.

Before, in the merged layer loop:                      After:
    y  = shard_map(forward ring)(q, k, v)     beta         y, dx = shard_map(q, k, v, r, dy)
    dx = shard_map(backward ring)(r, dy)      alpha            both bodies; the loops over their hops are one loop

Here the shard_maps are ring attention, and a hop is one step of the ring. A shard_map is a call until XLA has
partitioned the program. So loops of two shard_maps cannot merge, and XLA runs them one after the other. The
communication of a ring attention loop could then overlap only with the loop's own matrix products.

Contract
    Consumes  pairs of shard_maps, one of each strand, over the same axes of one mesh. The two do not depend on each
              other, and both hold loops of equal trip counts.
    Makes     one shard_map with the operands, the instructions and the results of both. Its loops merge like other
              loops (`loop_merging`). Shard_maps inside merged loops are merged in the same way.
    Leaves    all other shard_maps. If a shard_map has no loop to merge, it can overlap with the other strand anyway,
              once XLA has partitioned the program.

Why it is legal: each device computes the same values from the same parts, and neither shard_map depends on the other.
Cost: an operation that depends on one of the two shard_maps waits for both.
Source: DHelix, section 3 (arXiv 2411.15871).
"""

from collections.abc import Iterable, Sequence

from dhelix.passes.analysis.names import ALPHA, BETA, STRANDS, merged_loops
from dhelix.passes.analysis.work import computation_work
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import Builder, Computation, Instruction, graph
from dhelix.passes.hlo.edit import copy_instructions, put_under, replace_all_uses
from dhelix.passes.hlo.loops import proved_trip_count
from dhelix.passes.hlo.manual_computation import (
    ManualComputation,
    elements,
    inline_all,
    make_manual,
    manual_computations,
)
from dhelix.passes.strands.loop_merging import inside, loops_of, merge_loops

_Copies = dict[Instruction, Instruction]


def merge_manual_computations(
    computation: Computation, forward: Iterable[Instruction], backward: Iterable[Instruction], context: PassContext
) -> list[str]:
    """Merges shard_maps of the two strands in `computation` and in its merged loops.

    The pair whose smaller shard_map has the most work comes first.

    Args:
      forward, backward: the instructions of each strand.

    Returns:
      One text for each loop that was merged inside a shard_map, as from `merge_loops`.
    """
    merged: list[str] = []
    ours, theirs = set(forward), set(backward)
    held = manual_computations(computation)
    pairs = [(f, b) for f in held if f.call in ours for b in held if b.call in theirs and _alike(f, b)]
    work = {one.call: computation_work(one.body) for pair in pairs for one in pair}
    pairs.sort(key=lambda pair: sorted(-work[one.call] for one in pair)[::-1])  # ties stay in program order
    used: set[Instruction] = set()
    for f, b in pairs:
        if used.isdisjoint((f.call, b.call)) and _independent(computation, f, b):
            used |= {f.call, b.call}
            merged += _merge(computation, f, b, context)
    for loop in merged_loops(computation):
        merged += inside(_in_each_strand(loop.called[0], context))
    return merged


def _in_each_strand(computation: Computation, context: PassContext) -> list[str]:
    """Calls `merge_manual_computations` for a computation whose instructions have their strand in `op_name`."""
    of = {
        strand: [i for i in computation.instructions if i.op_name.startswith(f"{strand}/")] for strand in (BETA, ALPHA)
    }
    return merge_manual_computations(computation, of[BETA], of[ALPHA], context)


def _alike(a: ManualComputation, b: ManualComputation) -> bool:
    """Whether two different shard_maps are over the same axes of one mesh, and hold loops of an equal trip count."""
    meshes = {split.mesh for one in (a, b) for _, split in (*one.operands, *one.results)}
    if a.call is b.call or a.axes != b.axes or len(meshes) != 1:
        return False
    return bool(_trip_counts(a) & _trip_counts(b))


def _trip_counts(one: ManualComputation) -> set[int]:
    inline_all(one.body)
    return {count for loop in loops_of(one.body) if (count := proved_trip_count(loop)) is not None}


def _independent(computation: Computation, a: ManualComputation, b: ManualComputation) -> bool:
    return all(
        graph.descendants(computation, one.instructions).isdisjoint(other.instructions)
        for one, other in ((a, b), (b, a))
    )


def _merge(computation: Computation, f: ManualComputation, b: ManualComputation, context: PassContext) -> list[str]:
    users = computation.users()
    body = Builder(computation.module.new_computation(f.body.name))
    values: list[Instruction] = []
    copies: list[_Copies] = [_copy_body(body, one) for one in (f, b)]
    for one, made in zip((f, b), copies, strict=True):
        root = one.body.root
        returned = root.operands if root.opcode == "tuple" else [root]
        values += [made[returned[k]] for k, _ in one.results]
    body.finish(body.tuple(values))
    whole = [
        (_shape(one.to_global, k), split) for one in (f, b) if one.to_global for k, (_, split) in enumerate(one.results)
    ]
    both, results = make_manual(computation, f, [*f.operands, *b.operands], body.computation, whole)
    both.call.proto.metadata.op_name = STRANDS  # each instruction inside has the name of its own strand
    _replace(computation, (f, b), results, users)
    body.computation.sort()
    ours, theirs = ([made[loop] for loop in loops_of(one.body)] for one, made in zip((f, b), copies, strict=True))
    merged = merge_loops(body.computation, ours, theirs, context)
    return merged + _in_each_strand(body.computation, context)


def _copy_body(builder: Builder, one: ManualComputation) -> _Copies:
    count = len(builder.computation.parameters)
    copies = {p: builder.parameter(count + k, p.shape) for k, p in enumerate(one.body.parameters)}
    left_out = {*one.body.parameters, *([one.body.root] if one.body.root.opcode == "tuple" else [])}
    own = [i for i in one.body.instructions if i not in left_out]
    copy_instructions(builder, own, copies)
    for i in own:
        put_under(one.call.op_name, copies[i])
    return copies


def _shape(to_global: Instruction, k: int) -> object:
    return to_global.shape.tuple_shapes[k] if to_global.shape.tuple_shapes else to_global.shape


def _replace(
    computation: Computation,
    old: Sequence[ManualComputation],
    results: Sequence[Instruction],
    users: dict[Instruction, list[Instruction]],
) -> None:
    """Removes the shard_maps `old`, and makes their readers read `results`: the new results, in the order of `old`."""
    stands_for: _Copies = {}
    first = 0
    for one in old:
        if one.to_global is not None:
            stands_for |= {value: results[first + k] for value, k in elements(one.to_global, users)}
        first += len(one.results)
    replace_all_uses(computation, stands_for)
    gone = {i for one in old for i in one.instructions}
    gone |= {value for i in gone for value, _ in elements(i, users)}
    computation.instructions = [i for i in computation.instructions if i not in gone]
    computation.sort()
