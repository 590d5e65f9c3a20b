"""Tracks the dimensions of an array through reshapes and transposes.

A dimension is a product of factors, outermost first. A factor is identified by its dimension in the starting array and
the product of the factors outside it there. This identity stays when a reshape joins or splits dimensions:

    gathered   [8, 4 x 16, 32]            factors  (0: 8)  (1: 4, 16)  (2: 32)
    reshape    [32, 16, 32]               [0: 8, 1: 4]  [1: 16]  [2: 32]
    transpose  [32, 32, 16]               [2: 32]  [0: 8, 1: 4]  [1: 16]

The factors show which dimensions of a matrix product are dimensions of a gathered array, in spite of the moves between
the two. A `Rearrangement` brings an array from one order of factors into another: split, permute, join. Dimensions of
size 1 have no factors.

Used by `passes/communication/collective_matmul/sites.py`. It works forward and backward, because a reshape regroups
factors in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dhelix.passes.hlo import Builder, Instruction, Shape


@dataclass(frozen=True, order=True)
class Factor:
    """A factor of a dimension of some array.

    Attributes:
      dimension: number of the dimension.
      outside: product of the factors of that dimension outside this one.
      size: number of values of its index.
    """

    dimension: int
    outside: int
    size: int

    def split(self, outer: int) -> tuple[Factor, Factor]:
        """The outer factor, of size `outer`, and the inner one. `outer` must divide `size`."""
        inner = self.size // outer
        return Factor(self.dimension, self.outside, outer), Factor(self.dimension, self.outside * outer, inner)


Factors = tuple[Factor, ...]


def whole(dimensions: Sequence[int]) -> list[Factors]:
    """Each dimension as one factor."""
    return [(Factor(n, 1, size),) if size != 1 else () for n, size in enumerate(dimensions)]


def regroup(factors: Iterable[Factors], dimensions: Sequence[int]) -> list[Factors] | None:
    """The factors after a reshape to `dimensions`; None if a dimension is not a product of (split) factors."""
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
        """From the order `held` to the order `wanted` of the same factors; None if the factors differ.

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
    """The same split and permutation, with dimensions that stay adjacent merged into one."""
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
    """A row-major shape. Layout assignment runs later, but passes that read collectives before it need a layout."""
    shape = Shape(element_type=element_type, dimensions=dimensions)
    shape.layout.minor_to_major.extend(reversed(range(len(dimensions))))
    return shape


def reshaped(builder: Builder, value: Instruction, dimensions: Sequence[int]) -> Instruction:
    """`value` reshaped to `dimensions`; `value` itself if it has them already."""
    if list(value.shape.dimensions) == list(dimensions):
        return value
    return builder.make("reshape", dense(value.shape.element_type, dimensions), [value])
