"""Who updates which tensor: the split of optimizer states over the devices of a group (AMSP sections IV-C2 and V-A).

    owners = between([1000, 400, 300, 300], 2)
    owners.tensors          # ((0,), (1, 2, 3)): device 0 owns the first tensor
    owners.padding          # 0: elements that equal buffers add

Between tensors, a tensor has one owner, which updates and broadcasts it whole. FP8 scales need whole tensors, so the
paper prefers this split. The largest tensor goes first, to the owner with the least load. Inside tensors, every device
has an even piece of each tensor, and an all-gather replaces the broadcasts.

All devices of an SPMD program have equal shapes. So an owner's tensors are a flat buffer that is padded to the largest
one. The executor broadcasts in forward order, and an owner's tensors are listed in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from dhelix.passes.sharding.factors import ShardingError


@dataclass(frozen=True)
class Owners:
    """A split of tensors over owners.

    Attributes:
      tensors: for each owner, the numbers of its tensors in forward order. Inside tensors, every owner has all.
      loads: for each owner, its number of elements.
      length: elements of every owner's buffer: the largest load.
      padding: elements that all buffers have too many.
    """

    tensors: tuple[tuple[int, ...], ...]
    loads: tuple[int, ...]
    length: int
    padding: int

    @property
    def share(self) -> float:
        """Padding over the size of all buffers."""
        return self.padding / (self.length * len(self.loads)) if self.length else 0.0

    def owner_of(self, tensor: int) -> int:
        """The owner of a tensor; the first one if the split is inside tensors."""
        return next(owner for owner, owned in enumerate(self.tensors) if tensor in owned)


def between(sizes: Sequence[int], owners: int) -> Owners:
    """Whole tensors for each owner, balanced greedily.

    The largest load is at most 4/3 of the least possible one, by Graham's bound for this greedy order. Equal loads go
    to the owner that was served longest ago, so that neighbours in forward order have different owners.

    Args:
      sizes: elements of each tensor, in forward order.
      owners: number of devices of the group.

    Raises:
      ShardingError: a size is negative, or there is no owner.
    """
    _check(sizes, owners)
    heap = [(0, 0, owner) for owner in range(owners)]  # load, when it was served last, owner
    heapify(heap)
    owned: list[list[int]] = [[] for _ in range(owners)]
    for turn, number in enumerate(sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)), 1):
        load, _, owner = heap[0]
        heapreplace(heap, (load + sizes[number], turn, owner))
        owned[owner].append(number)
    loads = tuple(sum(sizes[number] for number in numbers) for numbers in owned)
    length = max(loads)
    tensors = tuple(tuple(sorted(numbers)) for numbers in owned)
    return Owners(tensors, loads, length, length * owners - sum(loads))


def inside(sizes: Sequence[int], owners: int) -> Owners:
    """An even piece of every tensor for each owner. The last owner's piece is padded.

    Raises:
      ShardingError: a size is negative, or there is no owner.
    """
    _check(sizes, owners)
    pieces = [-(-size // owners) for size in sizes]
    length = sum(pieces)
    loads = tuple(
        sum(min(piece, max(size - owner * piece, 0)) for size, piece in zip(sizes, pieces, strict=True))
        for owner in range(owners)
    )
    return Owners((tuple(range(len(sizes))),) * owners, loads, length, length * owners - sum(loads))


def _check(sizes: Sequence[int], owners: int) -> None:
    if owners < 1:
        raise ShardingError(f"{owners} owners cannot hold tensors; give at least 1")
    if wrong := [size for size in sizes if size < 0]:
        raise ShardingError(f"a tensor of {wrong[0]} elements cannot be owned; sizes are at least 0")
