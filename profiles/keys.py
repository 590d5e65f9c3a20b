"""Keys that name everything that costs time: operators, collectives, and pairs of them.

A key holds exactly what decides the time. Two instructions that cost the same share one key, and a key means the same
in every program. `dhelix.passes.evaluation.operator_keys` makes keys of HLO instructions. As text:

    gemm bf16,bf16->bf16:nt:cublaslt 8192x4096x1536
    all-gather 67108864B 4x1 groups=1 nccl
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dhelix.errors import DhelixError

OPERATOR_KINDS = ("gemm", "grouped-gemm", "attention", "attention-backward", "fusion", "copy", "other")
COLLECTIVE_KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
IMPLEMENTATIONS = ("nccl", "symmetric", "user-buffers", "triton")

_CLOCKED = ("gemm", "grouped-gemm", "attention", "attention-backward")

_OPERATOR = re.compile(rf"({'|'.join(OPERATOR_KINDS)}) (\S+) (\d+(?:x\d+)*)?")
_COLLECTIVE = re.compile(
    rf"({'|'.join(COLLECTIVE_KINDS)}) (\d+)B (\d+)x(\d+) groups=(\d+) ({'|'.join(IMPLEMENTATIONS)})"
)


@dataclass(frozen=True, order=True, slots=True)
class OperatorKey:
    """The kernel, or the few kernels, that one instruction launches on one GPU.

    Attributes:
      kind: one of OPERATOR_KINDS.
      family: everything but the sizes, without spaces: types, layouts, epilogue, library; for a fusion, a hash of its
        computation. Operators of a family differ only in size, so times interpolate between them.
      sizes: the sizes, in an order that the family fixes; for a product M, N, K, then batch.
      flops, bytes: operations, and device memory read and written. They follow from the other fields.
    """

    kind: str
    family: str
    sizes: tuple[int, ...]
    flops: float = field(default=0.0, compare=False)
    bytes: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.family} {'x'.join(map(str, self.sizes))}"

    @property
    def clocked(self) -> bool:
        """Whether the operator slows down when the power limit lowers the GPU's clock; memory-bound ones do not."""
        return self.kind in _CLOCKED


@dataclass(frozen=True, order=True, slots=True)
class CollectiveKey:
    """A collective that all groups of the mesh run at the same time.

    Attributes:
      kind: one of COLLECTIVE_KINDS.
      bytes: the whole buffer on one GPU: after an all-gather, or before a reduction.
      gpus_per_node, nodes: a group has `gpus_per_node` GPUs on each of `nodes` nodes (AMSP's p0 x p1).
      groups: number of such groups that communicate at the same time. They share links if their paths cross.
      implementation: `nccl`: NCCL's kernels. `symmetric`: NCCL on symmetric memory, by copy engines where NCCL has
        them. `user-buffers`: NCCL without copies through its own buffers. `triton`: a kernel that XLA generates for
        small collectives.
    """

    kind: str
    bytes: int
    gpus_per_node: int
    nodes: int = 1
    groups: int = 1
    implementation: str = "nccl"

    @property
    def group_size(self) -> int:
        return self.gpus_per_node * self.nodes

    def __str__(self) -> str:
        mesh = f"{self.gpus_per_node}x{self.nodes} groups={self.groups}"
        return f"{self.kind} {self.bytes}B {mesh} {self.implementation}"


type Key = OperatorKey | CollectiveKey


@dataclass(frozen=True, slots=True)
class PairKey:
    """Two independent operators that run at once. `first` is launched first; the order is part of the measurement."""

    first: Key
    second: Key

    def __str__(self) -> str:
        return f"{self.first} + {self.second}"


def parse(text: str) -> Key:
    """The key whose `str` is `text`. An operator comes back without its operations and bytes.

    Raises:
      DhelixError: the text is no key.
    """
    if found := _OPERATOR.fullmatch(text):
        kind, family, sizes = found.groups()
        return OperatorKey(kind, family, tuple(map(int, sizes.split("x"))) if sizes else ())
    if found := _COLLECTIVE.fullmatch(text):
        kind, size, per_node, nodes, groups, implementation = found.groups()
        return CollectiveKey(kind, int(size), int(per_node), int(nodes), int(groups), implementation)
    raise DhelixError(f"{text[:100]!r} is not the key of an operator or a collective")
