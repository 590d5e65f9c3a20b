"""The models and the plans of AMSP (arXiv 2311.00257): what its planner was given, and what table IV says it chose.

    amsp.MODELS["llama-30b"].parameters      # about 27.6e9
    amsp.TABLE_IV["llama-7b"].optimizer      # (8, 1): all GPUs of a node

The paper names LLaMA-7B, 13B and 30B and gives no sizes. 7B and 13B have those of the first LLaMA (arXiv 2302.13971).
30B is inferred: its MFU and tokens per second lead to the operations of 60 layers of hidden size 6144. LLaMA's own
"30B" has hidden size 6656 and 32.5 billion parameters; it is `llama-30b-6656` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

SEQUENCE = 4096
"""Tokens of a sequence. A micro-batch is one sequence (section VI-A)."""

SEQUENCES = 1024
"""Sequences of a step: 4 million tokens. So there are 1024 / GPUs micro-batches."""

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Numbers of GPUs in figures 11 and 12."""


@dataclass(frozen=True)
class Model:
    """A decoder with gated feed-forward and as many key heads as query heads.

    Attributes:
      name: its name in dhelix.
      published: its name in the paper's numbers (`published.AMSP`).
      layers, hidden, ffn: number of layers, width, and width of the feed-forward.
      recompute: whether the paper recomputes activations (section VI-A).
      source: where the sizes come from.
    """

    name: str
    published: str
    layers: int
    hidden: int
    ffn: int
    recompute: bool
    source: str
    vocabulary: int = 32_000

    @property
    def attention(self) -> int:
        """Parameters of a layer's attention with its norm."""
        return 4 * self.hidden * self.hidden + self.hidden

    @property
    def feed_forward(self) -> int:
        """Parameters of a layer's feed-forward with its norm."""
        return 3 * self.hidden * self.ffn + self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        layer = self.attention + self.feed_forward
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


_LLAMA = "LLaMA (arXiv 2302.13971), table 2"
MODELS: Mapping[str, Model] = MappingProxyType({
    model.name: model
    for model in (
        Model("llama-7b", "LLaMA-7B", 32, 4096, 11_008, False, _LLAMA),
        Model("llama-13b", "LLaMA-13B", 40, 5120, 13_824, False, _LLAMA),
        Model("llama-30b", "LLaMA-30B", 60, 6144, 16_384, True, "inferred from MFU and tokens per second of table V"),
        Model("llama-30b-6656", "LLaMA-30B", 60, 6656, 17_920, True, _LLAMA),
    )
})  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Factors of table IV as (GPUs of a node, nodes)."""

    parameters: tuple[int, int]
    gradients: tuple[int, int]
    optimizer: tuple[int, int]
    note: str = ""


_LOST = "the nodes of the optimizer states are lost in the text; 2 is inferred from table V's broadcast"
TABLE_IV: Mapping[str, Plan] = MappingProxyType({
    "llama-7b": Plan((1, 1), (1, 1), (8, 1)),
    "llama-13b": Plan((4, 1), (4, 1), (8, 1)),
    "llama-30b": Plan((8, 1), (8, 1), (8, 2), _LOST),
    "llama-30b-6656": Plan((8, 1), (8, 1), (8, 2), _LOST),
})  # fmt: skip
"""AMSP's plans, the same for all numbers of GPUs."""

MICS: Mapping[str, tuple[int, int]] = MappingProxyType({
    "llama-7b": (8, 1), "llama-13b": (8, 1), "llama-30b": (8, 2), "llama-30b-6656": (8, 2),
})  # fmt: skip
"""The group that holds one copy of all states under MiCS (table IV)."""

ZEROPP_SECONDARY = (8, 1)
"""The group over which ZeRO++ gathers in backward (section VI-A)."""
