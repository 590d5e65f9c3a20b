"""Tracks the dimensions of an array through reshapes and transposes.

A dimension is a product of factors, outermost first. Two numbers identify a factor: its dimension in the starting
array, and the product of the factors outside it in that dimension. These numbers stay the same when a reshape joins or
splits dimensions. Below, "1: 4" is a factor of size 4 of dimension 1 of the starting array:

    gathered   [8, 4 x 16, 32]            [0: 8]  [1: 4, 1: 16]  [2: 32]
    reshape    [32, 16, 32]               [0: 8, 1: 4]  [1: 16]  [2: 32]
    transpose  [32, 32, 16]               [2: 32]  [0: 8, 1: 4]  [1: 16]

The factors show which dimensions of a matrix product come from which dimensions of a gathered array, even with reshapes
and transposes between the two. A `Rearrangement` brings an array from one order of factors into another: it splits,
permutes and joins dimensions. Dimensions of size 1 have no factors.

`passes/communication/collective_matmul/sites.py` uses this module. It follows factors from operand to result, and from
result to operand. `regroup` serves both directions of a reshape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dhelix.passes.hlo import Builder, Instruction, Shape


@dataclass(frozen=True, order=True)
class Factor:
    """A factor of a dimension of the starting array.

    Attributes:
      dimension: number of the dimension.
      outside: product of the factors outside this one in the same dimension.
      size: the factor as a number.
    """

    dimension: int
    outside: int
    size: int

    def split(self, outer: int) -> tuple[Factor, Factor]:
        """Splits the factor into an outer factor of size `outer` and an inner factor. `outer` must divide `size`."""
        inner = self.size // outer
        return Factor(self.dimension, self.outside, outer), Factor(self.dimension, self.outside * outer, inner)


Factors = tuple[Factor, ...]


def whole(dimensions: Sequence[int]) -> list[Factors]:
    """For each dimension, one factor as large as the dimension; no factor if the size is 1."""
    return [(Factor(n, 1, size),) if size != 1 else () for n, size in enumerate(dimensions)]


def regroup(factors: Iterable[Factors], dimensions: Sequence[int]) -> list[Factors] | None:
    """The factors of each dimension after a reshape to `dimensions`; None if factors cannot be split to fit."""
    left = [f for group in reversed(list(factors)) for f in reversed(group)]
    groups: list[Factors] = []
    for size in dimensions:
        group: list[Factor] = []
        while size > 1:
            if not left:
                return None
            factor = left.pop()
            if size % factor.size:
                if factor.size % size:
                    return None
                factor, rest = factor.split(size)
                left.append(rest)
            group.append(factor)
            size //= factor.size
        groups.append(tuple(group))
    return None if left else groups


def sizes(factors: Iterable[Factor]) -> list[int]:
    return [f.size for f in factors]


def product(factors: Iterable[Factor]) -> int:
    return math.prod(f.size for f in factors)


@dataclass(frozen=True)
class Rearrangement:
    """A reshape to `split`, a transpose by `permutation` and a reshape to `result`."""

    split: tuple[int, ...]
    permutation: tuple[int, ...]
    result: tuple[int, ...]

    @staticmethod
    def of(held: Sequence[Factor], wanted: Sequence[Factor], result: Sequence[int]) -> Rearrangement | None:
        """The rearrangement from the order `held` to the order `wanted`; None if the two have different factors.

        `wanted` may split a factor of `held` into several.
        """
        split: list[Factor] = []
        for factor in held:
            parts = sorted(f for f in wanted if f.dimension == factor.dimension and _within(f, factor))
            if product(parts) != factor.size:
                return None
            split += parts
        if sorted(split) != sorted(wanted):
            return None
        return Rearrangement(*_joined(sizes(split), [split.index(f) for f in wanted]), tuple(result))

    @property
    def moves(self) -> bool:
        """Whether the order of values in memory changes."""
        return self.permutation != tuple(range(len(self.permutation)))

    def emit(self, builder: Builder, value: Instruction) -> Instruction:
        """Makes the instructions that rearrange `value`. Returns `value` itself if there is nothing to do."""
        kind = value.shape.element_type
        if self.moves:
            value = reshaped(builder, value, self.split)
            moved = [self.split[n] for n in self.permutation]
            value = builder.make("transpose", dense(kind, moved), [value], dimensions=list(self.permutation))
        return reshaped(builder, value, self.result)


def _joined(split: Sequence[int], permutation: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """An equivalent split and permutation, in which dimensions that stay adjacent are merged into one."""
    runs: list[list[int]] = []
    for n in permutation:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    in_order = sorted(runs)
    return tuple(math.prod(split[n] for n in run) for run in in_order), tuple(in_order.index(run) for run in runs)


def _within(part: Factor, factor: Factor) -> bool:
    return factor.outside <= part.outside and part.outside * part.size <= factor.outside * factor.size


def dense(element_type: int, dimensions: Sequence[int]) -> Any:
    """A row-major shape. XLA assigns layouts later, but some earlier passes read the layouts of collectives."""
    shape = Shape(element_type=element_type, dimensions=dimensions)
    shape.layout.minor_to_major.extend(reversed(range(len(dimensions))))
    return shape


def reshaped(builder: Builder, value: Instruction, dimensions: Sequence[int]) -> Instruction:
    """`value` reshaped to `dimensions`; `value` itself if it already has these dimensions."""
    if list(value.shape.dimensions) == list(dimensions):
        return value
    return builder.make("reshape", dense(value.shape.element_type, dimensions), [value])
