"""A possible collective matmul in a program: what it computes (`Pattern`), and its instructions (`Match`).

    x [batch, rows of one device or of all, K]     w [K, columns]     result [batch, rows, columns]

A form is a way to execute a collective matmul, such as a ring. A `Pattern` and a form together determine the
replacement of a match. Equal matches share one pattern, so their replacement is lowered once. Whether a replacement
saves time also depends on what else could overlap with the collective. So matches at places where both strands run get
a decision of their own (`Placed`). `sites.py` finds matches; this module checks which collectives and products qualify.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.unknown_fields import UnknownFieldSet

from dhelix.passes.analysis.collectives import Groups, device_groups
from dhelix.passes.analysis.dimension_factors import Rearrangement
from dhelix.passes.analysis.names import ALPHA, BETA
from dhelix.passes.evaluation.collective_matmul_kernels import MARK
from dhelix.passes.hlo import Computation, Instruction, shapes
from dhelix.profiles.collective_matmul.sites import Site

ORDERED = "it has control dependencies"
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_PRECISION = 51  # field of HloInstructionProto
_DEFAULT_PRECISIONS = (b"", b"\n\x02\0\0")


@dataclass(frozen=True)
class Pattern:
    """The function that a collective matmul computes. Its form (such as a ring) is chosen elsewhere.

    Its operands are x [batch, m, K] and w [K, columns]. Its results are [batch, m, columns]. Before a gather and after
    a scatter, m is the number of rows of one device. Otherwise, m is the number of rows of the whole group.

    Attributes:
      site: the key for costs. Its contraction and columns are sums over the products.
      batch: leading dimension that the collective does not touch.
      contractions: K of each product; the results of several products are summed.
      columns: columns of each weight; several weights share the gathered x.
      gathered: whether the gathered x is an additional last result.
      transposed: whether all weights are given as [columns, K].
      axis: sizes (outside, axis, inside) of the row-major mesh of device ids. The collective runs along the second
        axis.
    """

    site: Site
    batch: int
    contractions: tuple[int, ...]
    columns: tuple[int, ...]
    gathered: bool
    transposed: bool
    axis: tuple[int, int, int]


@dataclass(frozen=True)
class Placed:
    """A pattern, and whether both strands run at its place. One decision covers all matches with the same `Placed`.

    Attributes:
      co_executed: whether both strands run at the place (`co_executes`). The other strand could then hide the
        collectives.
    """

    pattern: Pattern
    co_executed: bool = False

    @property
    def key(self) -> str:
        """The site's key, followed by ", co-executed" if both strands run at the place."""
        return self.pattern.site.key + ", co-executed" * self.co_executed


@dataclass(frozen=True, eq=False)
class Product:
    """A dot of a match, with the rearrangements of its operands.

    Attributes:
      result: the instruction that the pattern's result replaces. This is the dot, or, after a gather, the conversion
        that narrows the dot to the type of x.
      x: 0 or 1, the operand number of x; the other operand is w.
      order_x: rearranges x to [batch, rows, K].
      order_w: rearranges w to [K, columns].
      turned_w: rearranges w to [columns, K].
    """

    dot: Instruction
    result: Instruction
    x: int
    order_x: Rearrangement
    order_w: Rearrangement
    turned_w: Rearrangement

    @property
    def w(self) -> Instruction:
        return self.dot.operands[1 - self.x]

    @property
    def contraction(self) -> int:
        return self.order_w.result[0]

    @property
    def columns(self) -> int:
        return self.order_w.result[1]


@dataclass(frozen=True, eq=False)
class Match:
    """A collective with its products.

    Attributes:
      results: rearrangements of the pattern's results to the program's arrays. For a gather, there is one for each
        product and, if `pattern.gathered`, one for the gathered array. For other kinds, there is only one.
      kind: HLO's number of the element type that is multiplied.
    """

    collective: Instruction
    products: tuple[Product, ...]
    results: tuple[Rearrangement, ...]
    pattern: Pattern
    kind: int

    @property
    def replaced(self) -> list[Instruction]:
        """The instructions that the results replace, in the order of `results`."""
        if self.collective.opcode != "all-gather":
            return [self.collective]
        return [p.result for p in self.products] + [self.collective] * self.pattern.gathered


def co_executes(computation: Computation) -> bool:
    """Whether a computation itself contains products of both strands, as the merged loop over layers does.

    False for the first forward pass, the last backward pass and the head: only products of one strand could hide a
    collective there. Also False for the body of the loop over micro-batches, whose products are in callees.
    """
    names = [i.op_name for i in computation.instructions if i.opcode == "dot"]
    return all(any(f"{strand}/" in name for name in names) for strand in (ALPHA, BETA))


class Unfit(Exception):
    """Says why a collective is left alone."""


def row_major_axis(groups: Groups) -> tuple[int, int, int] | None:
    """Sizes (outside, axis, inside) of the row-major mesh of device ids whose middle axis has the groups `groups`.

    None if no mesh fits.
    """
    size, count = len(groups[0]), sum(map(len, groups))
    if size < 2 or any(len(group) != size for group in groups):
        return None
    inside = groups[0][1] - groups[0][0]
    if inside < 1 or count % (size * inside):
        return None
    shape = count // (size * inside), size, inside
    rows = [[o * size * inside + k * inside + i for k in range(size)] for o in range(shape[0]) for i in range(inside)]
    return shape if sorted(rows) == sorted(map(list, groups)) else None


def mesh_axis(collective: Instruction) -> tuple[int, int, int]:
    """`row_major_axis` of a collective. Raises Unfit if no separate program can replace the collective."""
    if len(collective.operands) != 1 or shapes.is_tuple(collective.shape):
        raise Unfit("it has several operands")
    if _kind_name(collective) not in _DTYPES:
        raise Unfit("its type is not a float of 16 or 32 bits")
    if 0 in (*collective.operands[0].shape.dimensions, *collective.shape.dimensions):
        raise Unfit("its array is empty")
    if not collective.proto.channel_id:
        raise Unfit("it runs over replicas, not partitions")
    if collective.control_predecessors:
        raise Unfit(ORDERED)
    groups = device_groups(collective)
    if groups and max(map(len, groups)) == 1:
        raise Unfit("its groups have one device each")
    axis = row_major_axis(groups) if groups else None
    if axis is None:
        raise Unfit("its groups are not an axis of a row-major mesh")
    if collective.opcode != "all-reduce":
        number = collective.proto.dimensions[0]
        before, after = collective.operands[0].shape.dimensions[number], collective.shape.dimensions[number]
        if max(before, after) != axis[1] * min(before, after) or not min(before, after):
            raise Unfit("its group size does not match its shapes")
    return axis


def is_marked(instruction: Instruction) -> bool:
    """Whether `instruction` is already part of a collective matmul.

    If so, its name stack contains `MARK`, or `transpose(jvp(MARK))` in a derivative.
    """
    parts = instruction.op_name.split("/")
    return any(part.rstrip(")").rpartition("(")[2] == MARK and "jit(" not in part for part in parts)


def only_moves(instruction: Instruction) -> bool:
    """Whether `instruction` only moves the values of its operand, or only narrows them from float32."""
    if instruction.control_predecessors or instruction.opcode not in ("reshape", "transpose", "copy", "convert"):
        return False
    if instruction.opcode != "convert":
        return True
    before, after = instruction.operands[0].shape, instruction.shape
    return _kind_name(instruction) in _DTYPES and shapes.type_name(before) == "f32" and after.element_type != shapes.F32


def is_product(dot: Instruction) -> bool:
    """Whether `dot` is a matrix product with default precision.

    Operands may have any number of dimensions, but batch dimensions must have size 1.
    """
    if dot.opcode != "dot" or dot.control_predecessors or is_marked(dot):
        return False
    kinds = {o.shape.element_type for o in dot.operands}
    batch = [o.shape.dimensions[n] for side, o in enumerate(dot.operands) for n in batched(dot, side)]
    settings = [f.data for f in UnknownFieldSet(dot.proto) if f.field_number == _PRECISION]
    known = all(setting in _DEFAULT_PRECISIONS for setting in settings)
    bound = bool(contracted(dot, 0)) and all(shapes.element_count(o.shape) for o in dot.operands)
    return len(kinds) == 1 and _kind_name(dot.operands[0]) in _DTYPES and set(batch) <= {1} and known and bound


def contracted(dot: Instruction, side: int) -> list[int]:
    """Contracting dimensions of operand `side`."""
    numbers = dot.proto.dot_dimension_numbers
    return list(numbers.rhs_contracting_dimensions if side else numbers.lhs_contracting_dimensions)


def batched(dot: Instruction, side: int) -> list[int]:
    """Batch dimensions of operand `side`."""
    numbers = dot.proto.dot_dimension_numbers
    return list(numbers.rhs_batch_dimensions if side else numbers.lhs_batch_dimensions)


def is_sum(collective: Instruction) -> bool:
    """Whether the reduction of `collective` is an addition."""
    root = collective.called[0].root
    return root.opcode == "add" and all(o.opcode == "parameter" for o in root.operands)


def _kind_name(instruction: Instruction) -> str:
    return shapes.type_name(instruction.shape)


def dtype_name(kind: int) -> str:
    """NumPy's name of an HLO element type, such as `bfloat16`."""
    return _DTYPES[shapes.type_name(shapes.scalar(kind))]
