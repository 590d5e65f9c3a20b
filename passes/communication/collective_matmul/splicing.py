"""Splices the entry of one module into a computation of another.

    module A                              module B                         A after
      p, q                                  entry(x, w)                      p, q
      r = old(p, q)          +                t = slice(x)          ->       t.3 = slice(p)
      s = tanh(r)                             ROOT tuple(dot(t, w))          dot.7 = dot(t.3, q)
                                                                             s = tanh(dot.7)

`Splicer.import_entry` appends copies of the instructions of B's entry to a computation of A, and copies their callees.
It returns the results of B's entry. Names become unique. Every collective gets its own channel and lists its groups
explicitly, because B's mesh is not A's. Of B's metadata, only the name stack stays, below a name stack that the caller
gives. Stack frames and source lines are dropped, because they are indices into B's tables.

`canonical_dots` gives products the form that XLA's simplifier produces (one row dimension, one column dimension and one
contracting dimension). XLA expects this form in a module that has passed the simplifier.

Why it is legal: B was lowered for one device of the mesh that A is partitioned for, so both use the same device ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import GROUP_FIELDS, device_groups, free_channel
from dhelix.passes.analysis.dimension_factors import dense, reshaped
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, edit
from dhelix.passes.hlo.edit import inline_calls, replace_uses

_GROUP = "_collectives_group"
_FOREIGN = ("xla.sdy.", "Sharding", "SPMD")  # custom calls that only the partitioner can process


def prepare(module: HloModule) -> HloModule:
    """Inlines the calls of a module that will be spliced in, and makes its dots canonical. Returns the module.

    Raises:
      DhelixError: the module contains a custom call that a partitioned module must not contain.
    """
    inline_calls(module.entry, keep=_is_group)
    edit.drop_dead(module.entry)
    module.to_bytes()  # drops the inlined computations
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.proto.custom_call_target.startswith(_FOREIGN):
                target = instruction.proto.custom_call_target
                raise DhelixError(f"the inserted program calls {target}, which only the partitioner can process")
        canonical_dots(computation)
    return module


def _is_group(call: Instruction) -> bool:
    """Whether a call holds collectives that XLA runs as one group."""
    return _GROUP in call.proto.frontend_attributes.map


class Splicer:
    """Copies other modules into `module`. While it is in use, nothing else may assign channels in `module`."""

    def __init__(self, module: HloModule) -> None:
        self.module = module
        self.channel = free_channel(module)

    def import_entry(
        self, source: HloModule, computation: Computation, arguments: Sequence[Instruction], stack: str
    ) -> list[Instruction]:
        """Appends copies of the instructions of `source`'s entry to `computation`.

        Args:
          source: a module from `prepare`; it is not changed.
          computation: the computation to extend.
          arguments: values for the entry's parameters.
          stack: name stack that is put in front of the copies' own name stacks.

        Returns:
          The results of the entry: the elements of its tuple, or its one value.

        Raises:
          DhelixError: the arguments do not fit the entry's parameters.
        """
        parameters = source.entry.parameters
        given = [(a.shape.element_type, list(a.shape.dimensions)) for a in arguments]
        wanted = [(p.shape.element_type, list(p.shape.dimensions)) for p in parameters]
        if given != wanted:
            raise DhelixError(f"the inserted program takes {parameters}, not {list(arguments)}")
        values = dict(zip(parameters, arguments, strict=True))
        self._copy(source.entry, Builder(computation), values, stack, {})
        root = source.entry.root
        return [values[o] for o in root.operands] if root.opcode == "tuple" else [values[root]]

    def _copy(
        self,
        source: Computation,
        builder: Builder,
        values: dict[Instruction, Instruction],
        stack: str,
        known: dict[Computation, Computation],
    ) -> None:
        """Copies the instructions of `source` that are not in `values`. Also copies each of their callees once."""
        made = [i for i in source.instructions if i not in values]
        for instruction in made:
            for called in instruction.called:
                if called not in known:
                    copy = known[called] = self.module.new_computation(called.name)
                    inner: dict[Instruction, Instruction] = {}
                    self._copy(called, Builder(copy), inner, stack, known)
                    copy.root = inner[called.root]
            operands = [values[o] for o in instruction.operands]
            values[instruction] = builder.copy(instruction, operands, [known[c] for c in instruction.called])
            self._clean(values[instruction], stack)
        for instruction in made:
            values[instruction].control_predecessors = [values[p] for p in instruction.control_predecessors]

    def _clean(self, copy: Instruction, stack: str) -> None:
        """Clears fields of a copy that refer to the other module."""
        name = copy.op_name
        copy.proto.metadata.Clear()
        copy.proto.metadata.op_name = f"{stack}/{name}" if name else stack
        for key in [k for k in copy.proto.frontend_attributes.map if k.startswith("xla.sdy")]:
            del copy.proto.frontend_attributes.map[key]
        if copy.proto.channel_id:
            copy.proto.channel_id = self.channel
            self.channel += 1
        if any(copy.proto.HasField(field) for field in GROUP_FIELDS[1:]):
            groups = device_groups(copy)
            for field in GROUP_FIELDS:
                copy.proto.ClearField(field)
            for group in groups:
                copy.proto.replica_groups.add(replica_ids=group)


def canonical_dots(computation: Computation) -> None:
    """Reshapes each dot without batch dimensions to one row, one column and one contracting dimension.

    Dots whose contracting dimensions are not adjacent at one end of an operand stay unchanged.
    """
    for dot in [i for i in computation.instructions if i.opcode == "dot"]:
        numbers = dot.proto.dot_dimension_numbers
        sides = [
            _two_dimensions(operand.shape.dimensions, list(contracted))
            for operand, contracted in zip(
                dot.operands, (numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions), strict=True
            )
        ]
        lhs, rhs = sides
        if numbers.lhs_batch_dimensions or lhs is None or rhs is None:
            continue
        if all(len(o.shape.dimensions) == 2 for o in dot.operands):
            continue
        _replace_dot(dot, lhs, rhs)


def _two_dimensions(dimensions: Sequence[int], contracted: list[int]) -> tuple[list[int], int] | None:
    """An operand as a matrix: (sizes, contracting dimension). None if the operand would need a transpose."""
    count, k = len(dimensions), len(contracted)
    depth = math.prod(dimensions[n] for n in contracted)
    rest = math.prod(dimensions) // depth if depth else 0
    if contracted == list(range(count - k, count)):
        return [rest, depth], 1
    return ([depth, rest], 0) if contracted == list(range(k)) else None


def _replace_dot(dot: Instruction, lhs: tuple[list[int], int], rhs: tuple[list[int], int]) -> None:
    computation = dot.computation
    builder, start = Builder(computation), len(computation.instructions)
    operands = [reshaped(builder, o, sizes) for o, (sizes, _) in zip(dot.operands, (lhs, rhs), strict=True)]
    product = builder.copy(dot, operands)
    rows, columns = lhs[0][1 - lhs[1]], rhs[0][1 - rhs[1]]
    product.proto.shape.CopyFrom(dense(dot.shape.element_type, (rows, columns)))
    numbers = product.proto.dot_dimension_numbers
    numbers.lhs_contracting_dimensions[:], numbers.rhs_contracting_dimensions[:] = [lhs[1]], [rhs[1]]
    result = reshaped(builder, product, dot.shape.dimensions)
    for made in computation.instructions[start:]:
        made.proto.metadata.CopyFrom(dot.proto.metadata)
    replace_uses(computation, dot, result)
    computation.instructions.remove(dot)
    computation.sort()
