"""Moves a loop over micro-batches into a shard_map, if the loop calls shard_maps for its forward and backward pass.

JAX makes such a loop from `value_and_grad` of a loss that is a shard_map. Outside of the shard_maps, the loop computes
on whole (global) arrays. A shard_map is a chain of three instructions (`passes/hlo/manual_computation.py`).

Before:                                                  After:

    acc = zeros                                              acc, .. = shard_map(w, batch):       of this device's parts
    while i < M:                                                 acc = zeros
        x         = dynamic-slice(batch, i)                      while i < M:
        loss, res = shard_map(forward)(w, x)                         x         = dynamic-slice(batch, i)
        grads     = shard_map(backward)(res)                         loss, res = forward(w, x)
        acc      += grads                                            grads     = backward(res)
                                                                     acc      += grads

Other passes do not look into a shard_map that the loop calls. So they do not see its layers, residuals and
accumulators. After the move, the program looks as if its author had written the shard_map around the loop, and every
pass works as usual. `microbatch_loops` calls `move_inside` if a shard_map that the loop calls holds a backward pass.

Contract
    Consumes  a loop whose body holds shard_maps over the same axes of one mesh. All other operations of the body must
              do the same to each device's parts as to whole arrays. These are elementwise operations, slices along
              dimensions that are not split, and sums, maxima and minima. On arrays that are not split at all, most
              operations are allowed.
    Makes     one shard_map around the loop. A reduction along a split dimension becomes a reduction of the parts and an
              all-reduce.
    Leaves    every other loop. In that case, `move_inside` raises PassRefusal with the reason.

Why it is legal: the shard_maps and the operations around them determine one split of each array of the body, loop state
included. So the operations around a shard_map make the same parts that the shard_map takes, and read the same parts
that it returns. With these parts, each device computes what the partitioner would make it compute.
Cost: time linear in the number of instructions. Loop-carried arrays are split before the loop, as the shard_maps split
them. This rewrite is not based on a paper.
"""

from __future__ import annotations

from typing import Any

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.collectives import free_channel
from dhelix.passes.hlo import Builder, Computation, Instruction, WhileLoop, shapes
from dhelix.passes.hlo.constraints import is_sharding_constraint
from dhelix.passes.hlo.edit import drop_dead, inline_calls, replace_all_uses, replace_uses
from dhelix.passes.hlo.manual_computation import (
    ManualComputation,
    Split,
    elements,
    groups_over,
    make_manual,
    manual_computations,
    stays_a_call,
)
from dhelix.passes.hlo.stacks import is_constant
from dhelix.passes.strands.microbatches.manual_splits import Splits


def move_inside(computation: Computation, loop: Instruction) -> tuple[Computation, Instruction]:
    """Moves `loop`, which is in `computation` and calls shard_maps, into one shard_map.

    Returns:
      The computation that holds the loop now, and the loop.

    Raises:
      PassRefusal: the loop cannot move.
    """
    whole = WhileLoop(loop)
    held = manual_computations(whole.body)
    if whole.trip_count is None:
        raise PassRefusal("its trip count is not proved", loop)
    if any(s.element_type == shapes.TOKEN for s in loop.shape.tuple_shapes):
        raise PassRefusal("it has ordered effects", loop)
    drop_dead(whole.condition)
    if other := next((m for m in held if m.axes != held[0].axes), None):
        raise PassRefusal("its shard_maps are over different axes", other.call)
    sharding = Splits(whole, held)
    _inline(whole, held, sharding)
    return _wrap(computation, whole, held[0], sharding)


def _inline(loop: WhileLoop, held: list[ManualComputation], sharding: Splits) -> None:
    """Makes the loop's body compute on parts: inlines its shard_maps, and shrinks all shapes outside of shard_maps."""
    body = loop.body
    users = body.users()
    calls = {one.call for one in held}
    inside = {i for one in held for i in one.instructions}
    inside |= {value for i in inside for value, _ in elements(i, users)}
    outside = [i for i in body.instructions if i not in inside]
    stands_for: dict[Instruction, Instruction] = {}
    for one in held:
        if one.to_local is not None:
            given = one.to_local.operands
            stands_for |= {value: given[n] for value, n in elements(one.to_local, users)}
        if one.to_global is not None:
            stands_for |= {value: one.to_global.operands[n] for value, n in elements(one.to_global, users)}
    if not sharding.partial:
        for i in filter(is_sharding_constraint, outside):
            stands_for[i] = i.operands[0]
    for value in body.instructions:  # operands first
        if value in stands_for:
            source = stands_for[value]
            stands_for[value] = stands_for.get(source, source)
    sums = {i: axes for i in outside if i.opcode == "reduce" and (axes := sharding.summed(i))}
    groups = {i: groups_over(body.module, sharding.mesh, axes) for i, axes in sums.items()}
    for i in outside:
        _shrink(i, sharding)
    for i, together in groups.items():
        replace_uses(body, i, _over_devices(i, together))
    for i in loop.condition.instructions:
        if i.opcode == "parameter":
            i.shape.CopyFrom(body.parameters[0].shape)
        elif i.opcode == "get-tuple-element" and i.operands[0].opcode == "parameter":
            i.shape.CopyFrom(body.parameters[0].shape.tuple_shapes[i.tuple_index])
    replace_all_uses(body, stands_for)
    edges = {edge for one in held for edge in (one.to_local, one.to_global)}
    body.instructions = [i for i in body.instructions if i not in edges and i not in stands_for]
    body.sort()
    inline_calls(body, keep=lambda call: call not in calls and stays_a_call(call))
    drop_dead(body)


def _over_devices(reduction: Instruction, groups: list[list[int]]) -> Instruction:
    """Appends the all-reduce that combines the devices' results of `reduction` by the same operation."""
    computation = reduction.computation
    everywhere = Builder(computation).make(
        "all-reduce",
        reduction.shape,
        [reduction],
        called=reduction.called,
        channel_id=free_channel(computation.module),
        use_global_device_ids=True,
    )
    everywhere.proto.metadata.CopyFrom(reduction.proto.metadata)
    for group in groups:
        everywhere.proto.replica_groups.add(replica_ids=group)
    return everywhere


def _shrink(value: Instruction, sharding: Splits) -> None:
    """Gives `value` the shape of one device's part."""
    leaves = value.shape.tuple_shapes if shapes.is_tuple(value.shape) else [value.shape]
    for leaf, shape in enumerate(leaves):
        for d in range(len(shape.dimensions)):
            parts = sharding.parts(value, leaf, d)
            shape.dimensions[d] //= parts
            if value.opcode == "dynamic-slice":
                value.proto.dynamic_slice_sizes[d] //= parts
            if value.opcode == "slice":
                value.proto.slice_dimensions[d].limit //= parts  # a split dimension is taken whole, from 0 on


def _wrap(
    computation: Computation, loop: WhileLoop, like: ManualComputation, sharding: Splits
) -> tuple[Computation, Instruction]:
    """Replaces the loop by a shard_map around the loop. Returns the body of the shard_map, and the loop inside it."""
    old = loop.instruction
    outside = Builder(computation)
    start = [outside.element(old.operands[0], k) for k in range(loop.size)]
    reads = [user for user in computation.users()[old] if user.opcode == "get-tuple-element"]
    read = {r.tuple_index for r in reads} if len(reads) == len(computation.users()[old]) else set(range(loop.size))
    read -= loop.invariants
    body = Builder(computation.module.new_computation(like.body.name))
    state = loop.body.parameters[0].shape.tuple_shapes
    given: list[tuple[Instruction, Split]] = []
    inner: list[Instruction] = []
    for k, value in enumerate(start):
        source = value.operands[0] if is_sharding_constraint(value) and not sharding.partial else value
        if made := _made_here(body, source, state[k]):
            inner.append(made)
        else:
            inner.append(body.parameter(len(given), state[k]))
            given.append((value, sharding.split(k)))
    moved = body.while_loop(body.tuple(inner), loop.body, loop.condition, old, "micro_batches")
    returned = sorted(read)
    made = body.finish(body.tuple([body.element(moved, k) for k in returned]))
    results = [(old.shape.tuple_shapes[k], sharding.split(k)) for k in returned]
    around, whole = make_manual(computation, like, given, made, results)
    around.call.proto.metadata.op_name = old.op_name.partition("/")[0]  # the instructions inside have full names
    values = start
    for k, value in zip(returned, whole, strict=True):
        values[k] = value
    replaced: dict[Instruction, Instruction] = {r: values[r.tuple_index] for r in reads}
    if len(read | loop.invariants) == loop.size:
        replaced[old] = outside.tuple(values)
    replace_all_uses(computation, replaced)
    computation.instructions = [i for i in computation.instructions if i is not old]
    computation.sort()
    drop_dead(computation)
    return made, moved


def _made_here(builder: Builder, value: Instruction, local: Any) -> Instruction | None:
    """Copies an initial value into the shard_map, if one constant fills it. Returns None for other values.

    Because of the copy, passes see where counters start, and that stacks are empty.
    """
    if value.opcode == "constant" and not value.shape.dimensions:
        return builder.copy(value, [])
    if is_constant(value):
        made = builder.copy(value, [builder.copy(value.operands[0], [])])
        made.shape.dimensions[:] = local.dimensions
        return made
    return None
