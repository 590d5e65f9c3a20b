"""The form of a fused computation: a text of what it computes, without names and sizes, and a list of its sizes.

Two fusions with the same form run the same kernel on different sizes. Example: `x * w` with `x` of f32[2048,4096] and
`w` of f32[4096] has the sizes 4096, 2048 and the text

    0=parameter() f32[d0]; 1=broadcast(0) f32[d1,d0]; 2=parameter() f32[d1,d0]; 3=multiply(1,2) f32[d1,d0]; -> 3

The computation is converted to a graph. The text lists what the results need, operands before their users:

1. Drop what costs nothing: dimensions of size 1, bitcasts that only add or remove these, values of constants, and
   indices of slices. Put dimensions in memory order, so that only a transposition in memory counts as a transposition.
   Merge repeated expressions, and read nested fusions as part of the whole.
2. Count a sliced parameter as the slice, and a buffer updated in place as the update. So a layer's operator has the
   same form and sizes for any number of stacked layers.
3. Give one letter to dimensions that must be equal, such as those of an addition's operands and result. So there are
   few sizes, and chance equalities (sequence length = width) do not count. If everything is elementwise over arrays of
   the same size and dimension order, join all their dimensions into one.
4. Number the nodes. What the operands of a commutative operation compute decides their order. So the order in which XLA
   writes instructions does not count.
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
# Opcodes whose result dimensions are not the operands' dimensions at the same position.
_MIXING = frozenset("dot scaled-dot ragged-dot gather scatter convolution custom-call reduce-window fft".split())
# Opcodes that keep dimensions, but move elements to other positions.
_MOVING = frozenset("strided reverse sort".split())
# Opcodes that describe a fusion best, most telling first.
_TELLING = "scatter sort dot convolution custom-call reduce reduce-window transpose concatenate gather pad".split()


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a fused computation.

    Attributes:
      opcode: HLO's opcode, or `parameter` (contiguous memory), `strided` (a part of each row), `update` (written into
        a buffer).
      detail: what the opcode leaves open, such as the function of a reduction or the target of a call.
      type: element type.
      dims: sizes other than 1, from the slowest dimension in memory to the fastest.
      operands: numbers of the operand nodes.
      links: (own dimension, operand position, operand dimension) for dimensions that the operation makes equal.
      products: dimensions that a bitcast splits or joins, as (0, own dimension) or (1, operand dimension). Their sizes
        follow from other dimensions.
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
    """A form and its sizes.

    Attributes:
      text: the computation, without sizes.
      sizes: sizes in the order in which their letters first appear in the text.
      opcodes: opcodes of all nodes.
      result: opcode of the node that makes the first result.
    """

    text: str
    sizes: tuple[int, ...]
    opcodes: frozenset[str]
    result: str

    @property
    def label(self) -> str:
        """The most telling opcode, for people to read."""
        found = next((opcode for opcode in _TELLING if opcode in self.opcodes), self.result)
        return "read" if found in ("parameter", "strided") else found

    @cached_property
    def digest(self) -> str:
        return blake2b(self.text.encode(), digest_size=5).hexdigest()


def form_of(instruction: Instruction) -> Form:
    """Form of a fusion, or of any other instruction as if it were alone in a fusion."""
    graph = _Graph()
    values = {o: graph.parameter(o.shape) for o in dict.fromkeys(instruction.operands)}
    return _write(graph.nodes, graph.include(instruction, values))


def in_memory(shape: Any) -> tuple[tuple[int, ...], dict[int, int]]:
    """A shape's sizes other than 1, slowest dimension first (`Node.dims`), and a map from dimensions to places in them.

    Of a tuple, the first element counts.
    """
    shape = shapes.first(shape)
    if not shape.dimensions:
        return (), {}
    layout = shape.layout.minor_to_major or range(len(shape.dimensions) - 1, -1, -1)
    kept = [d for d in reversed(layout) if shape.dimensions[d] != 1]
    return tuple(shape.dimensions[d] for d in kept), {d: place for place, d in enumerate(kept)}


class _Graph:
    """Collects the nodes of a computation. Equal nodes are collected once."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._known: dict[Any, int] = {}

    def _add(self, node: Node, identity: Any = None) -> int:
        """Adds `node` if it is new, and returns its number. Nodes with different `identity` are never merged."""
        number = self._known.setdefault((node, identity), len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(node)
        return number

    def parameter(self, shape: Any, opcode: str = "parameter", identity: Any = None) -> int:
        """Adds a load from memory, unless one with this `identity` exists. Returns its number."""
        return self._add(Node(opcode, "", _types(shape), in_memory(shape)[0]), identity or len(self.nodes))

    def include(self, instruction: Instruction, values: dict[Instruction, int]) -> list[int]:
        """Adds an instruction. Returns the numbers of its results: one per output of a fusion, else one."""
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
        # 2. A sliced parameter counts as the slice, a buffer updated in place as the update.
        source = self._behind(operands[0], ("bitcast",)) if operands else -1
        found = self.nodes[source].opcode if operands else ""
        if opcode in _SLICES and found == "parameter":
            whole = _contiguous(shape, instruction.operands[0].shape)
            start = operands[1:] or instruction.name  # a static slice: its name is its identity
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
        # 1. Drop dimensions of size 1 and bitcasts between them.
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
        """Adds the node of an update in place. An earlier update of the same buffer stays an operand."""
        value = self.nodes[operands[1]]
        earlier = [operands[0]] if self.nodes[operands[0]].opcode == "update" else []
        links = tuple((n, 0, n) for n in range(len(value.dims)))
        return self._add(Node("update", "", value.type, value.dims, (operands[1], *earlier), links), tuple(operands))


def _contiguous(part: Any, whole: Any) -> bool:
    """Whether `part` is contiguous memory: whole in the fast dimensions, one element in the slow ones."""
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
    result = shapes.first(instruction.shape).dimensions
    for position, (operand, node) in enumerate(zip(instruction.operands, operands, strict=False)):
        dims, theirs = in_memory(operand.shape)
        if not dims or dims != node.dims:  # a scalar, or an update that is smaller than the operand
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
    """`Node.links` and `Node.products` of a bitcast. Cuts both sides, slowest first, into groups of equal size."""
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
    # 3. If everything is elementwise, join the dimensions.
    skipped: dict[int, int] = {}
    if _is_flat(nodes, live := _reachable(nodes, roots, {})):
        skipped = {n: nodes[n].operands[0] for n in live if nodes[n].opcode == "bitcast"}
        nodes = [_flattened(node) for node in nodes]
    # 4. Number the nodes by their structure.
    ranks = _ranks(nodes, skipped)
    roots = sorted((_resolve(r, skipped) for r in roots), key=lambda r: ranks[r])
    live = _reachable(nodes, roots, skipped, ranks)
    letters = _Letters(nodes, live, skipped)  # 3. one letter for dimensions that must be equal
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
    """Whether everything is elementwise over arrays of the same size, with dimensions in the same order."""
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
    """A digest of what each node computes, independent of the order of commutative operands."""
    ranks: list[bytes] = []
    for node in nodes:  # operands come before users
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
    """Nodes that the roots need, operands first. With `ranks`, only the nodes' structure decides the order."""
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
    """Gives the same letter to all dimensions that must have the same size because an operation links them."""

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
