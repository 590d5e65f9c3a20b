"""Helpers for `Shape` messages, which have an `element_type` and `dimensions`; tuples have `tuple_shapes`."""

import math
from collections.abc import Iterable
from typing import Any

from dhelix.passes.hlo.schema import Shape

PRED, S32, S64, U32, U64, F16, F32, F64, TUPLE, BF16, TOKEN = 1, 4, 5, 8, 9, 10, 11, 12, 13, 16, 17

# xla_data.proto PrimitiveType: number -> (name, bits)
_TYPES: dict[int, tuple[str, int]] = {
    1: ("pred", 8), 2: ("s8", 8), 3: ("s16", 16), 4: ("s32", 32), 5: ("s64", 64), 6: ("u8", 8),
    7: ("u16", 16), 8: ("u32", 32), 9: ("u64", 64), 10: ("f16", 16), 11: ("f32", 32), 12: ("f64", 64),
    14: ("opaque", 0), 15: ("c64", 64), 16: ("bf16", 16), 17: ("token", 0), 18: ("c128", 128),
    19: ("f8e5m2", 8), 20: ("f8e4m3fn", 8), 21: ("s4", 4), 22: ("u4", 4), 23: ("f8e4m3b11fnuz", 8),
    24: ("f8e5m2fnuz", 8), 25: ("f8e4m3fnuz", 8), 26: ("s2", 2), 27: ("u2", 2), 28: ("f8e4m3", 8),
    29: ("f8e3m4", 8), 30: ("s1", 1), 31: ("u1", 1), 32: ("f4e2m1fn", 4), 33: ("f8e8m0fnu", 8),
}  # fmt: skip


def scalar(element_type: int) -> Any:
    shape = Shape(element_type=element_type)
    shape.layout.SetInParent()  # XLA rejects a literal without a layout, even for a scalar
    return shape


def array(element_type: int, dimensions: Iterable[int]) -> Any:
    """An array shape in the default layout: the last dimension is the minor one."""
    sizes = list(dimensions)
    shape = Shape(element_type=element_type, dimensions=sizes)
    shape.layout.minor_to_major.extend(reversed(range(len(sizes))))
    return shape


def tuple_of(elements: Iterable[Any]) -> Any:
    return Shape(element_type=TUPLE, tuple_shapes=elements)


def is_tuple(shape: Any) -> bool:
    return shape.element_type == TUPLE


def first(shape: Any) -> Any:
    """The first array of a tuple, at any depth; a shape without arrays, or of an array, itself."""
    return first(shape.tuple_shapes[0]) if is_tuple(shape) and shape.tuple_shapes else shape


def element_count(shape: Any) -> int:
    return math.prod(shape.dimensions)


def byte_size(shape: Any) -> int:
    """Size in bytes of an array, or of all leaves of a tuple."""
    if shape.element_type == TUPLE:
        return sum(byte_size(s) for s in shape.tuple_shapes)
    return (math.prod(shape.dimensions) * _TYPES.get(shape.element_type, ("", 8))[1] + 7) // 8


def type_name(shape: Any) -> str:
    return _TYPES.get(shape.element_type, (f"type{shape.element_type}", 0))[0]


def is_floating(shape: Any) -> bool:
    return "f" in type_name(shape) and shape.element_type != 1


def text(shape: Any) -> str:
    """A shape in XLA's notation without layout: `bf16[8,128]`, `(f32[], s32[4])`."""
    if shape.element_type == TUPLE:
        return "(" + ", ".join(text(s) for s in shape.tuple_shapes) + ")"
    return f"{type_name(shape)}[{','.join(map(str, shape.dimensions))}]"


def same(a: Any, b: Any) -> bool:
    """Whether two shapes have the same element types and dimensions. Ignores layouts, which the compiler chooses."""
    if a.element_type != b.element_type or a.dimensions != b.dimensions:
        return False
    if a.element_type != TUPLE:
        return True
    return len(a.tuple_shapes) == len(b.tuple_shapes) and all(map(same, a.tuple_shapes, b.tuple_shapes))
