"""Finds collectives of an HLO computation that a collective matmul could replace together with their products.

    all_gather_matmul        gather -> dot, dot, ...       all products that contract a dimension that is not gathered
    matmul_reduce_scatter    dot + dot + ... -> scatter    a sum of products, such as dy w^T + dz v^T
    matmul_all_reduce        dot + dot + ... -> all-reduce

Between collective and product only moves (reshape, transpose, copy) and a conversion to a narrower type are allowed. A
product of 16-bit numbers with a float32 result also qualifies, if its only user narrows the result again. A collective
matmul rounds in the same way: it sums in float32 and rounds once. `passes/analysis/dimension_factors.py` follows
dimensions through the moves, so rows, contraction and columns are known in any arrangement. A `Match` rearranges
operands and results into one order:

    x [batch, rows of one device or of all, K]     w [K, columns]     result [batch, rows, columns]

A gathered array may have other users. For example, the product for a weight's gradient contracts the gathered rows.
Then the gathered array is an additional result of the pattern. An earlier pass
(`passes/communication/collective_canonicalization.py`) moves operations of XLA's partitioner out of the way.

`find` changes nothing. A replacement of its matches is correct, but not always faster. Each reason why collectives are
left alone has one fixed text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dhelix.passes.analysis.dimension_factors import Factor, Factors, Rearrangement, product, regroup, whole
from dhelix.passes.communication.collective_matmul.pattern import (
    ORDERED,
    Match,
    Pattern,
    Product,
    Unfit,
    batched,
    contracted,
    dtype_name,
    is_marked,
    is_product,
    is_sum,
    mesh_axis,
    only_moves,
)
from dhelix.passes.hlo import Computation, Instruction
from dhelix.profiles.collective_matmul.sites import Site

SCATTERED = "its sum is sliced, so XLA turns it into a reduce-scatter"
MIXED = "a reshape mixes rows and columns"
WIDER = "its product's result type is wider than the operands' type"
_KINDS = {
    "all-gather": "all_gather_matmul",
    "reduce-scatter": "matmul_reduce_scatter",
    "all-reduce": "matmul_all_reduce",
}
Users = dict[Instruction, list[Instruction]]


def find(computation: Computation) -> Iterator[Match | str]:
    """For each all-gather, reduce-scatter and all-reduce: its `Match`, or the reason why it is left alone.

    Skips collectives that already are part of a collective matmul.
    """
    users = computation.users()
    ordered = {p for i in computation.instructions for p in i.control_predecessors}
    position = {i: n for n, i in enumerate(computation.instructions)}
    for instruction in computation.instructions:
        if instruction.opcode not in _KINDS or is_marked(instruction):
            continue
        try:
            if instruction.opcode == "all-gather":
                if instruction in ordered:
                    raise Unfit(ORDERED)
                yield _match_gather(instruction, users, position)
            else:
                yield _match_reduction(instruction, users)
        except Unfit as reason:
            yield str(reason)


# all-gather -> dot


@dataclass(frozen=True, eq=False)
class _Reader:
    """A product of a gathered array.

    Attributes:
      kind: element type that is multiplied.
      order: dimensions of the gathered array in the order of x: rows, then K.
      result: rearranges the pattern's result to the shape of the dot.
    """

    product: Product
    kind: int
    order: tuple[int, ...]
    result: Rearrangement


def _match_gather(gather: Instruction, users: Users, position: Mapping[Instruction, int]) -> Match:
    axis = mesh_axis(gather)
    dimension, dimensions = gather.proto.dimensions[0], gather.shape.dimensions
    source = whole(dimensions)
    source[dimension] = _parts(dimension, dimensions[dimension], axis[1])
    found: list[_Reader] = []
    others = wider = False
    for reader, value, factors in _readers(gather, source, users):
        one = None if reader is None else _reader(reader, value, factors, gather, users)
        wider |= one is WIDER
        if (
            not isinstance(one, _Reader)
            or _depends(one.product.w, gather, position)
            or found
            and (one.order, one.kind) != (found[0].order, found[0].kind)
        ):
            others = True
        else:
            found.append(one)
    if not found:
        raise Unfit(WIDER if wider else "no product reads it and contracts another dimension than the gathered one")
    first, products = found[0], tuple(one.product for one in found)
    if others and first.kind != gather.shape.element_type:
        raise Unfit("a product reads it converted, and other readers do not")
    results = tuple(one.result for one in found)
    if others:
        held = [f for n in first.order for f in _free(n, dimensions[n])]
        results += (_rearrangement(held, sorted(held), dimensions),)
    return _match(gather, products, results, axis, first.kind, others)


def _depends(value: Instruction, on: Instruction, position: Mapping[Instruction, int]) -> bool:
    """Whether `value` depends on `on`.

    The search does not follow operands that come before `on`, so it is short for weights.
    """
    pending, seen = [value], {value}
    while pending:
        top = pending.pop()
        if top is on:
            return True
        for needed in (*top.operands, *top.control_predecessors):
            if needed not in seen and position[needed] >= position[on]:
                seen.add(needed)
                pending.append(needed)
    return False


def _readers(
    gather: Instruction, source: list[Factors], users: Users
) -> Iterator[tuple[Instruction | None, Instruction, list[Factors]]]:
    """The readers of the gathered array, direct or through moves: (reader, value that it reads, factors of the value).

    The reader is None if the value is the result of the computation.
    """
    pending = [(gather, source)]
    while pending:
        value, factors = pending.pop(0)
        if value is value.computation.root:
            yield None, value, factors
        for user in users[value]:
            moved = _follow(user, factors)
            if moved is None or user.opcode == "convert" and value.shape.element_type != gather.shape.element_type:
                yield user, value, factors
            else:
                pending.append((user, moved))


def _follow(user: Instruction, factors: list[Factors]) -> list[Factors] | None:
    """The factors after an instruction that only moves or narrows values; None for other instructions."""
    if not only_moves(user):
        return None
    if user.opcode == "reshape":
        return regroup(factors, user.shape.dimensions)
    return [factors[n] for n in user.proto.dimensions] if user.opcode == "transpose" else factors


def _result(dot: Instruction, value: Instruction, users: Users) -> Instruction | None:
    """The product in the type of `value`: `dot` itself, or its only user if this user narrows the dot; else None."""
    kind, computation = value.shape.element_type, dot.computation
    if dot.shape.element_type == kind:
        return dot
    narrowed = users[dot][0] if len(users[dot]) == 1 and dot is not computation.root else dot
    if narrowed.opcode != "convert" or narrowed.shape.element_type != kind or not only_moves(narrowed):
        return None
    return None if any(dot in i.control_predecessors for i in computation.instructions) else narrowed


def _reader(
    dot: Instruction, value: Instruction, factors: list[Factors], gather: Instruction, users: Users
) -> _Reader | str | None:
    """`dot` as a product of `value`, which is a view of the gathered array.

    Returns None if `dot` does not qualify, and WIDER if its result has a wider type than `value`.
    """
    if dot.operands.count(value) != 1 or not is_product(dot):
        return None
    x, own = dot.operands.index(value), gather.operands[0].shape.dimensions
    pairs = dict(zip(contracted(dot, 1 - x), contracted(dot, x), strict=True))
    k = [f for n in pairs.values() for f in factors[n]]
    rows = [f for n, group in enumerate(factors) if n not in pairs.values() for f in group]
    of_k, of_rows = ({f.dimension for f in part} for part in (k, rows))
    gathered = gather.proto.dimensions[0]
    if gathered not in of_rows or of_k & of_rows or not k:
        return None
    if (stands_for := _result(dot, value, users)) is None:
        return WIDER
    order = (*sorted(of_rows), *sorted(of_k))
    batch = math.prod(own[n] for n in of_rows if n < gathered)
    shard = math.prod(own[n] for n in of_rows)
    w = dot.operands[1 - x].shape.dimensions
    sides = [factors[pairs[n]] if n in pairs else _free(len(own) + n, size) for n, size in enumerate(w)]
    columns = [f for n, group in enumerate(sides) if n not in pairs for f in group]
    held_x = [f for n, size in enumerate(own) for f in _free(n, size)]
    wanted_x = [f for n in order for f in _free(n, own[n])]
    held_w = [f for side in sides for f in side]
    found = _product(dot, stands_for, x, (held_x, wanted_x), (batch, shard // batch), (held_w, sorted(k), columns))
    both = (rows, columns) if x == 0 else (columns, rows)
    result = _rearrangement([*sorted(rows), *columns], [*both[0], *both[1]], dot.shape.dimensions)
    return _Reader(found, value.shape.element_type, order, result)


# dot -> reduce-scatter, dot -> all-reduce


def _match_reduction(collective: Instruction, users: Users) -> Match:
    axis = mesh_axis(collective)
    if not is_sum(collective):
        raise Unfit("its reduction is not a sum")
    operand = collective.operands[0]
    dimensions, source = operand.shape.dimensions, whole(operand.shape.dimensions)
    scattered = None
    if collective.opcode == "reduce-scatter":
        scattered = collective.proto.dimensions[0]
        source[scattered] = _parts(scattered, dimensions[scattered], axis[1])
    elif _is_sliced(collective, users):
        raise Unfit(SCATTERED)
    terms = list(_terms(operand, source, users, operand.shape.element_type))
    x_dimensions = _x_dimensions(*terms[0], scattered)
    products = tuple(_term(dot, factors, x_dimensions, scattered, dimensions) for dot, factors in terms)
    rest = [n for n, size in enumerate(dimensions) if n not in x_dimensions and size > 1]
    own = collective.shape.dimensions
    held = [f for n in (*sorted(x_dimensions), *rest) for f in _free(n, own[n])]
    result = _rearrangement(held, sorted(held), own)
    return _match(collective, products, (result,), axis, collective.shape.element_type)


def _is_sliced(value: Instruction, users: Users) -> bool:
    """Whether a dynamic-slice cuts `value`, directly or after moves and additions."""
    pending, seen = [value], {value}
    while pending:
        for user in users[pending.pop()]:
            if user.opcode == "dynamic-slice":
                return True
            if (only_moves(user) or user.opcode == "add") and user not in seen:
                seen.add(user)
                pending.append(user)
    return False


def _terms(
    value: Instruction, factors: list[Factors], users: Users, kind: int
) -> Iterator[tuple[Instruction, list[Factors]]]:
    """The products whose sum is `value`, with the factors of their results. Operands must have the type `kind`."""
    if len(users[value]) != 1 or value is value.computation.root:
        raise Unfit("the product has other readers")
    if value.opcode == "add" and not value.control_predecessors and value.operands[0] is not value.operands[1]:
        for operand in value.operands:
            yield from _terms(operand, factors, users, kind)
    elif only_moves(value):
        (operand,) = value.operands
        before: list[Factors] | None = factors
        if value.opcode == "reshape":
            before = regroup(factors, operand.shape.dimensions)
        elif value.opcode == "transpose":
            before = [factors[list(value.proto.dimensions).index(n)] for n in range(len(factors))]
        if before is None:
            raise Unfit(MIXED)
        yield from _terms(operand, before, users, kind)
    elif is_product(value):
        if value.operands[0].shape.element_type != kind:
            raise Unfit("it sums in a type other than the product's operands'")
        yield value, factors
    else:
        raise Unfit("a summed term is not a product")


def _sides(dot: Instruction, factors: list[Factors]) -> tuple[dict[int, Factors], dict[int, Factors]]:
    """For both operands of a product, the factors of their free dimensions, by dimension number."""
    sides = []
    position = len(dot.proto.dot_dimension_numbers.lhs_batch_dimensions)
    for side in (0, 1):
        bound = {*contracted(dot, side), *batched(dot, side)}
        free = [n for n in range(len(dot.operands[side].shape.dimensions)) if n not in bound]
        sides.append(dict(zip(free, factors[position : position + len(free)], strict=True)))
        position += len(free)
    return sides[0], sides[1]


def _x_dimensions(dot: Instruction, factors: list[Factors], scattered: int | None) -> set[int]:
    """The dimensions of the sum that come from x.

    The operand with the scattered dimension is x. If nothing is scattered, the left operand is x.
    """
    of = [{f.dimension for group in side.values() for f in group} for side in _sides(dot, factors)]
    if of[0] & of[1]:
        raise Unfit(MIXED)
    return of[1] if scattered in of[1] else of[0]


def _term(
    dot: Instruction, factors: list[Factors], x_dimensions: set[int], scattered: int | None, whole_sum: Sequence[int]
) -> Product:
    sides = _sides(dot, factors)
    of = [{f.dimension for group in side.values() for f in group} for side in sides]
    if x_dimensions not in of or scattered is not None and scattered not in x_dimensions or of[0] & of[1]:
        raise Unfit("its products differ in rows and columns")
    x = of.index(x_dimensions)
    pairs = list(zip(*sorted(zip(contracted(dot, x), contracted(dot, 1 - x), strict=True)), strict=True))
    sizes = dot.operands[x].shape.dimensions
    names = [_free(len(whole_sum) + n, sizes[c]) for n, c in enumerate(pairs[0])]
    k = [f for group in names for f in group]
    rows, columns = (sorted(f for group in sides[side].values() for f in group) for side in (x, 1 - x))
    batch = math.prod(whole_sum[n] for n in x_dimensions if scattered is not None and n < scattered)
    held = []
    for side, bound in ((x, pairs[0]), (1 - x, pairs[1])):
        named = {**sides[side], **dict(zip(bound, names, strict=True))}
        held.append([f for n in range(len(dot.operands[side].shape.dimensions)) for f in named.get(n, ())])
    return _product(dot, dot, x, (held[0], [*rows, *k]), (batch, product(rows) // batch), (held[1], k, columns))


# Shared by gathers and reductions


def _product(
    dot: Instruction,
    result: Instruction,
    x: int,
    order_x: tuple[list[Factor], list[Factor]],
    rows: tuple[int, int],
    order_w: tuple[list[Factor], list[Factor], list[Factor]],
) -> Product:
    """Makes a `Product` from factors.

    Args:
      dot: the product.
      result: the instruction that the pattern's result replaces.
      x: operand number of x.
      order_x: factors of x in the program's order, and in the pattern's order.
      rows: (batch, rows) of x.
      order_w: factors of w in the program's order, factors of K, and factors of the columns.
    """
    held, k, columns = order_w
    sizes = product(k), product(columns)
    to_x = _rearrangement(*order_x, (*rows, sizes[0]))
    if to_x.moves:
        raise Unfit("its rows would need a transpose")
    straight = _rearrangement(held, [*k, *columns], sizes)
    return Product(dot, result, x, to_x, straight, _rearrangement(held, [*columns, *k], sizes[::-1]))


def _match(
    collective: Instruction,
    products: tuple[Product, ...],
    results: tuple[Rearrangement, ...],
    axis: tuple[int, int, int],
    kind: int,
    gathered: bool = False,
) -> Match:
    batch, rows, _ = products[0].order_x.result
    all_rows = batch * rows * (axis[1] if collective.opcode == "all-gather" else 1)
    transposed = all(p.order_w.moves and not p.turned_w.moves for p in products)
    if collective.opcode == "all-gather":
        contractions, columns = (products[0].contraction,), tuple(p.columns for p in products)
    else:
        contractions, columns = tuple(p.contraction for p in products), (products[0].columns,)
    sizes = all_rows, sum(contractions), sum(columns)
    site = Site(_KINDS[collective.opcode], *sizes, dtype_name(kind), axis[1])
    pattern = Pattern(site, batch, contractions, columns, gathered, transposed, axis)
    return Match(collective, products, results, pattern, kind)


def _parts(dimension: int, size: int, parts: int) -> Factors:
    """The factors of a gathered or scattered dimension: device, and position on the device."""
    return tuple(f for f in Factor(dimension, 1, size).split(parts) if f.size > 1)


def _free(number: int, size: int) -> Factors:
    return (Factor(number, 1, size),) if size > 1 else ()


def _rearrangement(held: Sequence[Factor], wanted: Sequence[Factor], result: Sequence[int]) -> Rearrangement:
    found = Rearrangement.of(held, wanted, result)
    if found is None:
        raise Unfit(MIXED)
    return found
