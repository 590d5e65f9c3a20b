"""Names for what costs time: operators, collectives, and two of them at once.

A key holds what decides the time and nothing else, so that two instructions that cost the same share one key,
and a key means the same in every program. `dhelix.passes.evaluation.operator_keys` makes keys of HLO instructions. As
text:

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
    """A kernel, or the few kernels, that one instruction launches on one GPU.

    Attributes:
      kind: one of OPERATOR_KINDS.
      family: everything but the sizes, without spaces: types, layouts, epilogue, library; for a fusion a hash
        of what it computes. Operators of a family differ in size only, so times interpolate between them.
      sizes: the sizes, in an order that the family fixes: M, N, K, then batch for a product.
      flops, bytes: operations, and device memory read and written; they follow from the rest.
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
        """Whether it takes longer where the limit of power lowers the GPU's clock; what waits for memory does not."""
        return self.kind in _CLOCKED


@dataclass(frozen=True, order=True, slots=True)
class CollectiveKey:
    """A collective as all groups of the mesh run it at once.

    Attributes:
      kind: one of COLLECTIVE_KINDS.
      bytes: the whole buffer on one GPU: gathered, or before it is reduced.
      gpus_per_node, nodes: a group is so many GPUs on each of so many nodes: AMSP's p0 x p1.
      groups: how many such groups communicate at the same time, and share links where these cross.
      implementation: `nccl` kernels, NCCL on `symmetric` memory (copy engines where NCCL has them), or NCCL on
        `user-buffers`, that is, without copies through NCCL's own; `triton`: a kernel that XLA makes of small ones.
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
    """Two independent operators at once; `first` is launched first. The order is part of what is measured."""

    first: Key
    second: Key

    def __str__(self) -> str:
        return f"{self.first} + {self.second}"


def parse(text: str) -> Key:
    """The key that `str` gave; an operator comes back without its operations and bytes.

    Raises DhelixError for anything else.
    """
    if found := _OPERATOR.fullmatch(text):
        kind, family, sizes = found.groups()
        return OperatorKey(kind, family, tuple(map(int, sizes.split("x"))) if sizes else ())
    if found := _COLLECTIVE.fullmatch(text):
        kind, size, per_node, nodes, groups, implementation = found.groups()
        return CollectiveKey(kind, int(size), int(per_node), int(nodes), int(groups), implementation)
    raise DhelixError(f"{text[:100]!r} is no key of an operator or a collective")
