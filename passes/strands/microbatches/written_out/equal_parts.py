"""Finds unrolled micro-batches in a program, and proves that they are equal.

    what a Python loop and unroll= write:            found here, for k = 0 .. N-1:
      g0 = backward(w, slice(x, 0), key0)              input        slice(x, k), key_k
      g1 = backward(w, slice(x, 1), key1)      ->      shared       w
      g  = g0 + g1                                     computed     g_k = backward(w, input, ..)
      losses = concatenate(l0, l1)                     sum          g = g + g_k
                                                       results      l_k

1. Find anchors (`anchors.py`): one operation of each part. Instructions that lead to one anchor alone belong to its
   part. So do instructions that depend on that part alone.
2. Find sums (`sums.py`): values that combine one part after another by one operation, `total = total + g_k`. They give
   the order of the parts.
3. Walk from the anchors, summands and other results to their operands, in all parts at once. Operands have a fixed
   order, so it is known which instructions correspond. The walk ends at values that all parts share (shared), and at
   values that differ (inputs).

N instructions of N parts become one instruction if they are equal. They must have the same opcode, shape, attributes
and called computations, and their operands must be equal, too. Inputs must depend on no anchor, and on no matrix
product of a part. No part may have a matrix product that other parts lack. Otherwise the parts are not equal, and
`Unequal` says where they differ.
Cost: time linear in the number of instructions, for each kind of operation that may be an anchor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import Computation, Instruction, graph, shapes
from dhelix.passes.hlo.constraints import is_sharding_constraint
from dhelix.passes.hlo.edit import has_side_effect
from dhelix.passes.strands.microbatches.written_out.anchors import anchors, constants, labels
from dhelix.passes.strands.microbatches.written_out.signatures import Signatures
from dhelix.passes.strands.microbatches.written_out.sums import Chain, chains

_LARGE = 64 * 2**20  # limit in bytes for stacks of results, and for stacks of inputs that are not slices of one array
_MOVING = ("reshape", "convert", "transpose", "copy")
_CUTTING = ("slice", "dynamic-slice", "gather")
_HEAVY = ("dot", "convolution")
_ADVICE = "loop with lax.scan, or use dhelix.value_and_grad with microbatches="

type Row = tuple[Instruction | None, ...]
"""The instructions that become one value: one per part, or None for a part that has none."""


class Unequal(PassRefusal):
    """Parts of a program look like micro-batches, but are not proved to be equal.

    Attributes:
      why: what differs.
    """

    def __init__(self, count: int, why: str, at: Instruction | None = None) -> None:
        super().__init__(
            f"the step takes {count} independent gradients: if these are micro-batches that a Python loop or unroll= "
            f"has unrolled, they cannot become a loop, because {why}; " + _ADVICE,
            at,
        )
        self.why = why


@dataclass(eq=False)
class Value:
    """One value of the loop's body.

    Attributes:
      row: the value's instruction in each part; None for a part that does not use the value.
      role: "computed" (by each part from `operands`), "shared" (by all parts) or "input" (differs by part).
      operands: the operands of a computed value.
    """

    row: Row
    role: str
    operands: list[Value] = field(default_factory=list)

    @property
    def instances(self) -> list[Instruction]:
        return [i for i in self.row if i is not None]

    @property
    def first(self) -> Instruction:
        """The instruction that represents all instances."""
        return self.instances[0]


@dataclass(frozen=True)
class Sum:
    """A sum to which the parts are added one after another. Its operation may also be another one, such as a maximum.

    Attributes:
      start: the value that the first part is added to; None if the sum starts as the first part.
      chain: the additions.
      summand: the value that is added.
    """

    start: Instruction | None
    chain: Chain
    summand: Value


@dataclass(frozen=True)
class Result:
    """A value that is read outside of its part: the value, the number of the part, and the instruction of the value."""

    value: Value
    part: int
    instruction: Instruction


@dataclass(frozen=True)
class Parts:
    """`count` equal parts of `computation`. `values` lists operands first. `name` is the name stack of the parts."""

    computation: Computation
    count: int
    values: list[Value]
    sums: list[Sum]
    results: list[Result]
    name: str

    @property
    def inputs(self) -> list[Value]:
        return [value for value in self.values if value.role == "input"]

    @property
    def shared(self) -> list[Value]:
        return [value for value in self.values if value.role == "shared"]

    @property
    def kept(self) -> list[Value]:
        """The values that are read outside of their parts."""
        return list(dict.fromkeys(result.value for result in self.results))


def equal_parts(computation: Computation) -> Parts | None:
    """The equal parts of `computation`; None if it does not hold several independent backward passes.

    Raises:
      Unequal: the computation holds several independent backward passes, but they are not proved to be equal.
    """
    found = anchors(computation)  # Step 1
    return _Search(computation, found).parts() if len(found) > 1 else None


class _Search:
    def __init__(self, computation: Computation, found: list[Instruction]) -> None:
        self.computation = computation
        self.anchors = found
        self.count = len(found)
        self.label = labels(computation, found)
        self.signatures = Signatures()
        self.behind = graph.descendants(computation, found)
        self.constants = constants(computation)
        self.values: list[Value] = []
        self.known: dict[Row, Value] = {}
        self.of_part: list[dict[Instruction, Value]] = [{} for _ in found]

    def parts(self) -> Parts:
        self._refuse_effects()
        found = chains(self.computation, self.label, self.count, self.signatures)  # Step 2
        if found:
            order = found[0].order
            found = [chain for chain in found if chain.order == order]
            self.anchors = [self.anchors[k] for k in order]
            self.label = labels(self.computation, self.anchors)
        self._walk(tuple(self.anchors))  # Step 3
        sums = [self._sum(chain) for chain in found]
        results = self._results({i for chain in found for i in chain.instructions})
        before = self._before_inputs()
        results = [result for result in results if result.instruction not in before]  # these stay in place
        self._refuse_large(results)
        name = self.anchors[0].op_name.partition("jvp(")[0].partition("transpose(")[0].rpartition("/")[0]
        return Parts(self.computation, self.count, self.values, sums, results, name)

    def _refuse(self, why: str, at: Instruction | None = None) -> Unequal:
        return Unequal(self.count, why, at)

    def _refuse_effects(self) -> None:
        for i in self.computation.instructions:
            if self.label[i].bit_count() == 1 and (has_side_effect(i) or i.control_predecessors):
                what = i.proto.custom_call_target or i.opcode
                raise self._refuse(f"{what} has ordered side effects", i)

    def _private(self, row: Row) -> bool:
        """Whether, for each k, instruction k of the row is None or belongs to part k alone."""
        return all(i is None or self.label[i] == 1 << k for k, i in enumerate(row))

    def _alike(self, row: Row) -> bool:
        """Whether all instructions do the same to their operands."""
        present = [i for i in row if i is not None]
        if present[0].opcode == "parameter" or any(i.opcode != present[0].opcode for i in present):
            return False
        return all(self.signatures.of(i) == self.signatures.of(present[0]) for i in present[1:])

    def _walk(self, row: Row) -> Value:
        """Makes one value from the instructions of `row`, and values from their operands.

        Raises Unequal if the instructions or their operands are not equal.
        """
        stack = [row]
        while stack:
            top = stack[-1]
            if top in self.known:
                stack.pop()
                continue
            value = self._end(top)
            if value is None:
                operands = self._operands(top)
                waiting = [o for o in operands if o not in self.known]
                if waiting:
                    stack.extend(reversed(waiting))
                    continue
                value = Value(top, "computed", [self.known[o] for o in operands])
            self.known[top] = value
            self.values.append(value)
            for known, i in zip(self.of_part, top, strict=True):
                if i is not None:
                    known.setdefault(i, value)
        return self.known[row]

    def _operands(self, row: Row) -> list[Row]:
        present = [(k, i) for k, i in enumerate(row) if i is not None]
        if len(present) == self.count:
            return list(zip(*(i.operands for _, i in present), strict=True))
        (part, alone), known = present[0], self.of_part[present[0][0]]
        return [known[o].row if o in known else self._alone(part, o) for o in alone.operands]

    def _alone(self, part: int, instruction: Instruction) -> Row:
        """The row of an instruction that only part `part` reads.

        If the label of the instruction is this part, other parts have None in the row. Otherwise all parts share it.
        """
        own = self.label[instruction] == 1 << part
        return tuple(instruction if not own or k == part else None for k in range(self.count))

    def _end(self, row: Row) -> Value | None:
        """The shared value or input at which the walk ends; None if the walk goes on to the operands of `row`."""
        first = next(i for i in row if i is not None)
        if all(i is first for i in row):
            if first in self.constants or first.opcode == "tuple":
                return None  # recomputed in the loop, because trip counts of inner loops follow from constants
            if shapes.is_tuple(first.shape):
                raise self._refuse(f"all of them read {first.opcode} as a whole", first)
            return Value(row, "shared")
        if None in row:
            if self.constants.isdisjoint([first]) and is_heavy(first):
                where = f"micro-batch {row.index(first) + 1}"
                raise self._refuse(f"{where} computes {_text(first)}, and others do not", first)
            return None
        if self._alike(row) and (self._private(row) or self.constants.issuperset(row)):
            return None
        full = [i for i in row if i is not None]
        same = all(shapes.same(i.shape, first.shape) for i in full) and not shapes.is_tuple(first.shape)
        if not same or not self.behind.isdisjoint(full):
            raise self._differ(full)
        return Value(row, "input")

    def _differ(self, row: list[Instruction]) -> Unequal:
        """The refusal that names an instruction of `row` that differs from the first one."""
        odd = next((k for k, i in enumerate(row) if self.signatures.of(i) != self.signatures.of(row[0])), 1)
        first, other = row[0], row[odd]
        if other.opcode == first.opcode and not shapes.same(other.shape, first.shape):
            one, two = shapes.text(first.shape), shapes.text(other.shape)
            why = (
                f"micro-batch {odd + 1} has another shape than the first one: {two} instead of {one}, in {_text(other)}"
            )
            return self._refuse(why, other)
        return self._refuse(f"micro-batch {odd + 1} has {_text(other)} where the first one has {_text(first)}", other)

    def _sum(self, chain: Chain) -> Sum:
        start, first = chain.first_summand(self.label, self.signatures)
        return Sum(start, chain, self._walk((first, *chain.summands)))

    def _results(self, additions: set[Instruction]) -> list[Result]:
        """The results: values of parts that are read by instructions outside of the parts and sums."""
        found: list[dict[Instruction, None]] = [{} for _ in self.anchors]
        single = {1 << k: k for k in range(self.count)}
        for reader in self.computation.instructions:
            if self.label[reader] in single or reader in additions:
                continue
            for operand in reader.operands:
                if self.label[operand] in single:
                    found[single[self.label[operand]]][operand] = None
        new: dict[bytes, list[list[Instruction]]] = {}
        for k, of in enumerate(found):
            for i in of:
                if i not in self.of_part[k]:
                    new.setdefault(self.signatures.of(i), [[] for _ in found])[k].append(i)
        for of_parts in new.values():
            if len({len(of) for of in of_parts}) == 1:
                for row in zip(*of_parts, strict=True):
                    self._walk(row)
        results = []
        for k, of in enumerate(found):
            for i in of:
                value = self.of_part[k].get(i) or self._walk(self._alone(k, i))
                if value.role == "computed":
                    results.append(Result(value, k, i))
        return results

    def _before_inputs(self) -> set[Instruction]:
        """The instructions that make inputs. Raises Unequal if a matrix product of a part is among them."""
        inputs = [v for v in self.values if v.role == "input"]
        before = graph.ancestors(self.computation, [i for v in inputs for i in v.instances])
        heavy = next((i for i in before if self.label[i] and is_heavy(i)), None)
        for value in inputs if heavy is not None else ():
            leading = graph.ancestors(self.computation, value.instances)
            if any(self.label[i] and is_heavy(i) for i in leading):
                raise self._differ(value.instances)
        return before

    def _refuse_large(self, results: list[Result]) -> None:
        """Raises Unequal if stacks would need too much memory."""
        stacked = [v for v in self.values if v.role == "input" and not _slices_of_one(v.row)]
        kept = list(dict.fromkeys(result.value for result in results))
        for values, why in (
            (stacked, "differs by micro-batch and is not a slice of one array"),
            (kept, "is kept of each micro-batch and not summed one after another"),
        ):
            sizes = [shapes.byte_size(v.first.shape) * self.count for v in values]
            if sum(sizes) > _LARGE:
                largest = values[sizes.index(max(sizes))].first
                raise self._refuse(f"{_text(largest)} {why}, and stacking it would take too much memory", largest)


def is_heavy(instruction: Instruction) -> bool:
    """Whether the instruction is a matrix product or a convolution, or calls a computation that holds such a product.

    Custom calls count as products, except sharding constraints and calls that draw random numbers.
    """
    if instruction.opcode == "custom-call":
        drawn = "threefry" in instruction.proto.custom_call_target  # random numbers on GPUs
        return not (drawn or is_sharding_constraint(instruction))
    return instruction.opcode in _HEAVY or any(
        is_heavy(i) for called in instruction.called for i in called.instructions
    )


def _slices_of_one(row: Row) -> bool:
    """Whether all instructions of `row` take elements of one array, by slices or gathers."""
    sources = set()
    for i in row:
        assert i is not None
        cut = False
        while i.opcode in (*_MOVING, *_CUTTING) or is_sharding_constraint(i):
            cut |= i.opcode in _CUTTING
            i = i.operands[0]
        sources.add(i if cut else None)
    return len(sources) == 1 and None not in sources


def _text(instruction: Instruction) -> str:
    where = f" ({instruction.op_name})" if instruction.op_name else ""
    return f"{shapes.text(instruction.shape)} {instruction.opcode}{where}"
