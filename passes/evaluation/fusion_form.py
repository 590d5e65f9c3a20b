"""The form of a fused computation: what it computes, without names and sizes, and the sizes beside it.

Two fusions of one form run the same kernel on other sizes. As an example, `x * w` with `x` of f32[2048,4096] and
`w` of f32[4096] has the sizes 4096, 2048 and the text

    0=parameter() f32[d0]; 1=broadcast(0) f32[d1,d0]; 2=parameter() f32[d1,d0]; 3=multiply(1,2) f32[d1,d0]; -> 3

How it is made: the computation is read as a graph from its results back to what it loads from memory.

1. What costs nothing goes: dimensions of size 1, bitcasts between them, the values of constants, the indices of
   slices. Dimensions stand in the order of memory, so that a transposition is one only if memory is transposed.
   Repeated expressions are one, nested fusions are read as part of the whole.
2. A parameter that is sliced counts as the slice, a buffer updated in place as the update. So a layer's operator
   has one form and one size whether 4 or 8 layers are stacked.
3. Dimensions that must be equal (of the operands and the result of an addition, say) share one letter, so that
   the sizes are few, and chance equalities (sequence length = width) do not count. Where everything is
   elementwise over arrays of one arrangement, all their dimensions together are one.
4. Nodes are numbered from the results, the operands of a commutative operation in an order that their own
   structure gives, so that the order in which XLA writes instructions does not count either.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Any

from dhelix.passes.hlo import Computation, Instruction, shapes

_SLICES = ("dynamic-slice", "slice")
_COMMUTATIVE = frozenset("add multiply maximum minimum and or xor".split())
# Results whose dimensions are not those of the operands at the same place.
_MIXING = frozenset("dot scaled-dot ragged-dot gather scatter convolution custom-call reduce-window fft".split())
# Same dimensions, and yet an element does not come from the same place.
_MOVING = frozenset("strided reverse sort".split())
# What best describes a fusion that holds several.
_TELLING = "scatter sort dot convolution custom-call reduce reduce-window transpose concatenate gather pad".split()


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a fused computation.

    Attributes:
      opcode: HLO's, or `parameter` (contiguous memory), `strided` (a part of each row), `update` (written into a
        buffer).
      detail: what the opcode leaves open: the function of a reduction, the target of a call.
      type: of the elements.
      dims: sizes without the 1s, from the slowest varying in memory to the fastest.
      operands: numbers of nodes.
      links: (own dimension, operand, its dimension), where the two are equal by what the operation is.
      products: own (0) or the operand's (1) dimensions that a bitcast splits or joins: they follow from others.
    """

    opcode: str
    detail: str
    type: str
    dims: tuple[int, ...]
    operands: tuple[int, ...] = ()
    links: tuple[tuple[int, int, int], ...] = ()
    products: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Form:
    """`text` without any size, and `sizes` in the order in which the text's letters appear first.

    `opcodes`: of the nodes; `result`: the one that makes the first result.
    """

    text: str
    sizes: tuple[int, ...]
    opcodes: frozenset[str]
    result: str

    @property
    def label(self) -> str:
        """A word for readers: the most telling opcode."""
        found = next((opcode for opcode in _TELLING if opcode in self.opcodes), self.result)
        return "read" if found in ("parameter", "strided") else found

    @cached_property
    def digest(self) -> str:
        return blake2b(self.text.encode(), digest_size=5).hexdigest()


def form_of(instruction: Instruction) -> Form:
    """Form of a fusion, or of any other instruction as if it stood in a fusion of its own."""
    graph = _Graph()
    values = {o: graph.parameter(o.shape) for o in dict.fromkeys(instruction.operands)}
    return _write(graph.nodes, graph.include(instruction, values))


def in_memory(shape: Any) -> tuple[tuple[int, ...], dict[int, int]]:
    """`dims` as in Node, of a tuple those of its first element, and for each dimension kept its place in them."""
    shape = first(shape)
    if not shape.dimensions:
        return (), {}
    layout = shape.layout.minor_to_major or range(len(shape.dimensions) - 1, -1, -1)
    kept = [d for d in reversed(layout) if shape.dimensions[d] != 1]
    return tuple(shape.dimensions[d] for d in kept), {d: place for place, d in enumerate(kept)}


def first(shape: Any) -> Any:
    """The first element of a tuple, an array as it is."""
    return shape.tuple_shapes[0] if shapes.is_tuple(shape) else shape


class _Graph:
    """Nodes while a computation is read; equal ones once."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._known: dict[Any, int] = {}

    def _add(self, node: Node, identity: Any = None) -> int:
        """The number of `node`; nodes that differ in `identity` are never one."""
        number = self._known.setdefault((node, identity), len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(node)
        return number

    def parameter(self, shape: Any, opcode: str = "parameter", identity: Any = None) -> int:
        """Something new to be read from memory, unless `identity` has been read before."""
        return self._add(Node(opcode, "", _types(shape), in_memory(shape)[0]), identity or len(self.nodes))

    def include(self, instruction: Instruction, values: dict[Instruction, int]) -> list[int]:
        """The numbers of an instruction's results, one for each element of a tuple."""
        if instruction.opcode == "fusion":
            return self._include_all(instruction.called[0], [values[o] for o in instruction.operands])
        return [self._read(instruction, [values[o] for o in instruction.operands])]

    def _include_all(self, fused: Computation, arguments: Sequence[int]) -> list[int]:
        values: dict[Instruction, list[int]] = {}
        for instruction in fused.instructions:
            opcode, operands = instruction.opcode, instruction.operands
            if opcode == "parameter":
                values[instruction] = [arguments[instruction.proto.parameter_number]]
            elif opcode == "tuple":
                values[instruction] = [values[o][0] for o in operands]
            elif opcode == "get-tuple-element":
                found = values[operands[0]]
                values[instruction] = [found[min(instruction.tuple_index, len(found) - 1)]]
            else:
                values[instruction] = self.include(instruction, {o: values[o][0] for o in operands})
        return values[fused.root]

    def _read(self, instruction: Instruction, operands: list[int]) -> int:
        opcode, shape = instruction.opcode, instruction.shape
        source = self._behind(operands[0], ("bitcast",)) if operands else -1
        found = self.nodes[source].opcode if operands else ""
        if opcode in _SLICES and found == "parameter":
            whole = _contiguous(shape, instruction.operands[0].shape)
            start = operands[1:] or instruction.name  # of a static slice the schema does not know where it begins
            return self.parameter(shape, "parameter" if whole else "strided", (source, *start))
        if opcode == "dynamic-update-slice" and self._is_in_place(operands[0]):
            return self._update(operands)
        if opcode in ("bitcast", "copy", "convert") and found == "update":
            return source
        if opcode == "scatter" and self._is_in_place(operands[0]):
            operands, shape = operands[1:], instruction.operands[-1].shape
        elif opcode == "gather" and found == "parameter":
            operands = operands[1:]
        elif opcode in _SLICES:
            operands = operands[:1]
        dims, places = in_memory(shape)
        if opcode not in ("bitcast", "reshape"):
            links = tuple(_links(instruction, places, [self.nodes[o] for o in operands]))
            return self._add(Node(opcode, _detail(instruction), _types(shape), dims, tuple(operands), links))
        if dims == self.nodes[operands[0]].dims:
            return operands[0]
        links, products = _regrouped(dims, self.nodes[operands[0]].dims)
        return self._add(Node("bitcast", "", _types(shape), dims, tuple(operands), links, products))

    def _behind(self, number: int, opcodes: Sequence[str]) -> int:
        while self.nodes[number].opcode in opcodes:
            number = self.nodes[number].operands[0]
        return number

    def _is_in_place(self, buffer: int) -> bool:
        found = self.nodes[self._behind(buffer, ("bitcast", "copy", "convert"))].opcode
        return found in ("parameter", "update", "scatter")

    def _update(self, operands: Sequence[int]) -> int:
        """What is written; an earlier update of the same buffer stays an operand."""
        value = self.nodes[operands[1]]
        earlier = [operands[0]] if self.nodes[operands[0]].opcode == "update" else []
        links = tuple((n, 0, n) for n in range(len(value.dims)))
        return self._add(Node("update", "", value.type, value.dims, (operands[1], *earlier), links), tuple(operands))


def _contiguous(part: Any, whole: Any) -> bool:
    """Whether `part` is one piece of memory: whole in the fast dimensions, one element in the slow ones."""
    cut = False
    for n in whole.layout.minor_to_major or range(len(whole.dimensions) - 1, -1, -1):
        if cut and part.dimensions[n] != 1:
            return False
        cut = cut or part.dimensions[n] != whole.dimensions[n]
    return True


def _links(
    instruction: Instruction, places: dict[int, int], operands: Sequence[Node]
) -> Iterator[tuple[int, int, int]]:
    opcode, numbers = instruction.opcode, instruction.proto.dimensions
    if opcode in _MIXING or not places:
        return
    result = first(instruction.shape).dimensions
    for position, (operand, node) in enumerate(zip(instruction.operands, operands, strict=False)):
        dims, theirs = in_memory(operand.shape)
        if not dims or dims != node.dims:  # a scalar, or less than the operand: an update of it
            continue
        rank = len(operand.shape.dimensions)
        if opcode == "broadcast":
            pairs = list(zip(numbers, range(rank), strict=True))
        elif opcode == "transpose":
            pairs = list(enumerate(numbers))
        elif opcode == "reduce":
            pairs = list(enumerate(n for n in range(rank) if n not in numbers))
        else:
            pairs = [(n, n) for n in range(rank)] if rank == len(result) else []
        for own, other in pairs:
            if own in places and other in theirs and result[own] == operand.shape.dimensions[other]:
                yield places[own], position, theirs[other]


def _regrouped(
    dims: tuple[int, ...], source: tuple[int, ...]
) -> tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int], ...]]:
    """Links and products of a bitcast: both sides cut, from the slowest on, into groups of equal size."""
    links: list[tuple[int, int, int]] = []
    products: list[tuple[int, int]] = []
    i = j = 0
    while i < len(dims) and j < len(source):
        left, right, a, b = dims[i], source[j], i + 1, j + 1
        while left != right and (a < len(dims) if left < right else b < len(source)):
            if left < right:
                left, a = left * dims[a], a + 1
            else:
                right, b = right * source[b], b + 1
        if (a, b) == (i + 1, j + 1):
            links.append((i, 0, j))
        elif a == i + 1:
            products.append((0, i))
        elif b == j + 1:
            products.append((1, j))
        i, j = a, b
    return tuple(links), tuple(products)


def _write(nodes: list[Node], roots: list[int]) -> Form:
    skipped: dict[int, int] = {}
    if _is_flat(nodes, live := _reachable(nodes, roots, {})):
        skipped = {n: nodes[n].operands[0] for n in live if nodes[n].opcode == "bitcast"}
        nodes = [_flattened(node) for node in nodes]
    ranks = _ranks(nodes, skipped)
    roots = sorted((_resolve(r, skipped) for r in roots), key=lambda r: ranks[r])
    live = _reachable(nodes, roots, skipped, ranks)
    letters = _Letters(nodes, live, skipped)
    number = {n: k for k, n in enumerate(live)}
    lines = []
    for n in live:
        node = nodes[n]
        operands = ",".join(str(number[o]) for o in _operands(node, skipped, ranks))
        dims = ",".join(letters.of(n, d) for d in range(len(node.dims)))
        lines.append(f"{number[n]}={node.opcode}{node.detail}({operands}) {node.type}[{dims}]")
    text = "; ".join([*lines, "-> " + ",".join(str(number[r]) for r in roots)])
    return Form(text, letters.sizes, frozenset(nodes[n].opcode for n in live), nodes[roots[0]].opcode)


def _is_flat(nodes: list[Node], live: list[int]) -> bool:
    """Whether all is elementwise over arrays of one size and arrangement."""
    arrays = [nodes[n] for n in live if nodes[n].dims]
    return len({prod(a.dims) for a in arrays}) == 1 and all(
        array.opcode == "bitcast" or (array.opcode not in _MOVING and _is_elementwise(array, nodes)) for array in arrays
    )


def _is_elementwise(node: Node, nodes: list[Node]) -> bool:
    needed = sum(len(nodes[o].dims) for o in node.operands)
    return len(node.links) == needed and all(own == other for own, _, other in node.links)


def _flattened(node: Node) -> Node:
    if not node.dims:
        return node
    links = tuple((0, position, 0) for position in range(len(node.operands)))
    return replace(node, dims=(prod(node.dims),), links=links, products=())


def _resolve(number: int, skipped: dict[int, int]) -> int:
    while number in skipped:
        number = skipped[number]
    return number


def _ranks(nodes: list[Node], skipped: dict[int, int]) -> list[bytes]:
    """A digest of what each node computes, whatever the order of commutative operands."""
    ranks: list[bytes] = []
    for node in nodes:  # operands stand before users
        below = [ranks[o] for o in _operands(node, skipped, ranks)]
        own = f"{node.opcode}{node.detail} {node.type}{len(node.dims)}".encode()
        ranks.append(blake2b(b"".join([own, *below]), digest_size=8).digest())
    return ranks


def _operands(node: Node, skipped: dict[int, int], ranks: Sequence[bytes]) -> list[int]:
    operands = [_resolve(o, skipped) for o in node.operands]
    return sorted(operands, key=lambda o: ranks[o]) if ranks and node.opcode in _COMMUTATIVE else operands


def _reachable(
    nodes: list[Node], roots: Sequence[int], skipped: dict[int, int], ranks: Sequence[bytes] = ()
) -> list[int]:
    """Nodes that the roots need, operands first, in an order that only their structure decides."""
    done: dict[int, None] = {}
    stack = list(reversed(roots))
    while stack:
        top = stack[-1]
        waiting = [] if top in done else [o for o in _operands(nodes[top], skipped, ranks) if o not in done]
        if waiting:
            stack.extend(reversed(waiting))
        else:
            done[stack.pop()] = None
    return list(done)


class _Letters:
    """One letter for all dimensions that are equal by what the operations are, and its size."""

    def __init__(self, nodes: list[Node], live: list[int], skipped: dict[int, int]) -> None:
        self._nodes = nodes
        self._same: dict[tuple[int, int], tuple[int, int]] = {}
        self._letters: dict[tuple[int, int], str] = {}
        self.sizes: tuple[int, ...] = ()
        for n in live:
            for own, position, other in nodes[n].links:
                operand = _resolve(nodes[n].operands[position], skipped)
                if nodes[operand].dims:
                    self._same[self._find((n, own))] = self._find((operand, other))
        self._products = {
            self._find((nodes[n].operands[0] if side else n, d)) for n in live for side, d in nodes[n].products
        }

    def _find(self, dimension: tuple[int, int]) -> tuple[int, int]:
        while (up := self._same.get(dimension, dimension)) != dimension:
            dimension = up
        return dimension

    def of(self, node: int, dimension: int) -> str:
        found = self._find((node, dimension))
        if found not in self._letters:
            self._letters[found] = f"d{len(self._letters)}"
            if found not in self._products:
                self.sizes += (self._nodes[node].dims[dimension],)
        return self._letters[found]


def _detail(instruction: Instruction) -> str:
    if instruction.opcode == "custom-call":
        return f"[{instruction.proto.custom_call_target}]"
    if instruction.opcode in ("dot", "scaled-dot"):
        numbers = instruction.proto.dot_dimension_numbers
        contracting = numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions
        return f"[{'.'.join(','.join(map(str, c)) for c in contracting)}]"
    inside = [i.opcode for called in instruction.called for i in called.instructions if i.opcode != "parameter"]
    return f"[{','.join(inside)}]" if inside else ""


def _types(shape: Any) -> str:
    return "+".join(map(shapes.type_name, shape.tuple_shapes)) if shapes.is_tuple(shape) else shapes.type_name(shape)
