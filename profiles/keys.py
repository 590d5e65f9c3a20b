"""Keys for everything that has a time in a profile: operators, collectives, and pairs.

A key contains what decides the time, and nothing else. So equal instructions of different programs have the same key.
`dhelix.passes.evaluation.operator_keys` makes keys from HLO instructions. Three keys as text:

    gemm bf16,bf16->bf16:nt:cublaslt 8192x4096x1536
    all-gather 67108864B 4x1 groups=1 nccl
    all-gather 67108864B 4x1 groups=1 nccl ring/simple channels=4        with a setting of its own (`dhelix tune`)
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field

from dhelix.errors import DhelixError
from dhelix.profiles.channels.nccl_setting import AS_NCCL_HAS_IT, ChannelError, NcclSetting

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
    rf"({'|'.join(COLLECTIVE_KINDS)}) (\d+)B (\d+)x(\d+) groups=(\d+) ({'|'.join(IMPLEMENTATIONS)})(?: (.+))?"
)


@dataclass(frozen=True, order=True, slots=True)
class OperatorKey:
    """The key of the kernel, or of the few kernels, that one instruction launches on one GPU.

    Attributes:
      kind: one of OPERATOR_KINDS.
      family: text without spaces for everything but the sizes: types, layouts, epilogue and library. The family of a
        fusion contains a hash of its computation. Operators of a family differ only in size, so times can be
        interpolated.
      sizes: the sizes, in an order that the family determines. For a product, they are M, N, K and the batch.
      flops, bytes: number of operations, and bytes of device memory that are read and written. They follow from the
        other fields.
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
        """Whether a lower clock of the GPU slows the operator down. Memory-bound operators do not slow down."""
        return self.kind in _CLOCKED


@dataclass(frozen=True, order=True, slots=True)
class CollectiveKey:
    """The key of a collective that all groups of a mesh run at the same time.

    Attributes:
      kind: one of COLLECTIVE_KINDS.
      bytes: size of the whole buffer on one GPU: the result of an all-gather, or the operand of a reduction.
      gpus_per_node, nodes: a group has `gpus_per_node` GPUs on each of `nodes` nodes (AMSP's p0 x p1).
      groups: number of groups that communicate at the same time. Groups may share links.
      implementation: one of IMPLEMENTATIONS. `nccl` stands for NCCL's kernels. `symmetric` stands for NCCL on symmetric
        memory, by copy engines where NCCL supports them. `user-buffers` stands for NCCL without copies through NCCL's
        own buffers. `triton` stands for a kernel that XLA generates for small collectives.
      configuration: algorithm, protocol, channels and chunks. By default, NCCL chooses them.
    """

    kind: str
    bytes: int
    gpus_per_node: int
    nodes: int = 1
    groups: int = 1
    implementation: str = "nccl"
    configuration: NcclSetting = AS_NCCL_HAS_IT

    @property
    def group_size(self) -> int:
        return self.gpus_per_node * self.nodes

    def __str__(self) -> str:
        mesh = f"{self.gpus_per_node}x{self.nodes} groups={self.groups}"
        return f"{self.kind} {self.bytes}B {mesh} {self.implementation} {self.configuration.text}".rstrip()


type Key = OperatorKey | CollectiveKey


@dataclass(frozen=True, slots=True)
class PairKey:
    """The key of two independent operators that run at once. `first` is launched first."""

    first: Key
    second: Key

    def __str__(self) -> str:
        return f"{self.first} + {self.second}"


def parse(text: str) -> Key:
    """The key whose `str` is `text`. The text does not contain the `flops` and `bytes` of an operator, so they are 0.

    Raises:
      DhelixError: the text is not the key of an operator or a collective.
    """
    if found := _OPERATOR.fullmatch(text):
        kind, family, sizes = found.groups()
        return OperatorKey(kind, family, tuple(map(int, sizes.split("x"))) if sizes else ())
    if found := _COLLECTIVE.fullmatch(text):
        kind, size, per_node, nodes, groups, implementation, configuration = found.groups()
        with contextlib.suppress(ChannelError):
            setting = AS_NCCL_HAS_IT if configuration is None else NcclSetting.parse(configuration)
            return CollectiveKey(kind, int(size), int(per_node), int(nodes), int(groups), implementation, setting)
    raise DhelixError(f"{text[:100]!r} is not the key of an operator or a collective")
