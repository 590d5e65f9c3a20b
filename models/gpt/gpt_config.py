"""Sizes of GPT and of decoders like it: the configuration, its presets, and counts of parameters."""

import dataclasses
from types import MappingProxyType
from typing import Literal

from dhelix.models.common.decoder_config import DecoderConfig

MEGATRON_VOCABULARY = 51_200
"""GPT-2's 50257 tokens, padded by Megatron-LM to a multiple of 128 x 8."""


@dataclasses.dataclass(frozen=True)
class GptConfig(DecoderConfig):
    """The configuration of a decoder with LayerNorms and GELU. The defaults are GPT-6.7B.

    Attributes:
      positions: where the order of tokens comes from. "learned": a table of `seq` rows is added to the embedding.
        "rotary": pairs of elements of queries and keys are rotated. "alibi": scores fall with the distance.
      rotary_dim: with "rotary", how many elements of each head are rotated. An even number up to `head_dim`.
      rope_theta: base of the rotary embedding's wavelengths.
      bias: whether all norms and all linear layers but the head have a bias.
      head_bias: whether the head has a bias.
      parallel_block: whether attention and feed-forward read the same normalised input. Otherwise the feed-forward
        reads what attention has added to.
      activation: "gelu_tanh" is the approximation by a tanh, and "gelu" is exact.
    """

    vocab: int = MEGATRON_VOCABULARY
    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    ffn: int = 16_384
    seq: int = 8192
    tie_embeddings: bool = True
    positions: Literal["learned", "rotary", "alibi"] = "learned"
    rotary_dim: int = 0
    rope_theta: float = 10_000.0
    bias: bool = True
    head_bias: bool = False
    parallel_block: bool = False
    activation: Literal["gelu", "gelu_tanh"] = "gelu_tanh"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions not in ("learned", "rotary", "alibi"):
            raise ValueError(f"positions={self.positions!r} is unknown; use 'learned', 'rotary' or 'alibi'")
        if self.activation not in ("gelu", "gelu_tanh"):
            raise ValueError(f"activation={self.activation!r} is unknown; use 'gelu' or 'gelu_tanh'")
        if self.positions == "rotary" and (self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim):
            raise ValueError(
                f"rotary_dim = {self.rotary_dim} of {self.head_dim} elements cannot be rotated in pairs; use an even "
                f"number from 2 to {self.head_dim}"
            )

    @property
    def sizes_of_ends(self) -> tuple[str, ...]:
        return ("vocab", "seq") if self.positions == "learned" else ("vocab",)

    @property
    def parameter_count(self) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norm = self.hidden * (2 if self.bias else 1)
        layer = 2 * self.hidden * (queries + keys + self.ffn) + norm * (1 if self.parallel_block else 2)
        if self.bias:
            layer += queries + 2 * keys + self.ffn + 2 * self.hidden
        tables = (1 if self.tie_embeddings else 2) * self.vocab * self.hidden + self._positions_count
        return tables + (self.vocab if self.head_bias else 0) + self.layers * layer + norm

    @property
    def looked_up_count(self) -> int:
        return super().looked_up_count + self._positions_count

    @property
    def _positions_count(self) -> int:
        return self.seq * self.hidden if self.positions == "learned" else 0


# GPT-6.7B, 18B and 30B are from Table 4 of the DHelix paper (arXiv 2411.15871), which gives hidden sizes, layers and
# sequence lengths. It leaves heads, vocabulary and positions open. Heads have 128 elements, as in GPT-3 6.7B and 175B
# (arXiv 2005.14165, table 2.1) and in Megatron-LM's 18.4B (arXiv 2104.04473, table 1). All else is as in Megatron-LM:
# its padded vocabulary, a learned table of positions as long as the sequence, and a tied embedding.
#
# Phi-2 is its configuration (microsoft/phi-2, config.json). MPT-7B has the sizes of llm-foundry's mpt-7b.yaml, and the
# vocabulary of the published model's card, which is padded to 50,432 instead of 50,368. Both are among the models of
# the Lagom paper, which leaves the sequence length open.
GPT_PRESETS = MappingProxyType({
    "gpt-demo": GptConfig(
        vocab=256, hidden=128, layers=4, heads=8, kv_heads=8, head_dim=16, ffn=512, seq=128,
        dtype="float32", param_dtype="float32",
    ),
    "gpt-6.7b": GptConfig(),
    "gpt-18b": GptConfig(hidden=6144, layers=40, heads=48, kv_heads=48, ffn=24_576),
    "gpt-30b": GptConfig(hidden=12_288, layers=16, heads=96, kv_heads=96, ffn=49_152),
    "phi-2": GptConfig(
        hidden=2560, head_dim=80, ffn=10_240, seq=2048, tie_embeddings=False, positions="rotary", rotary_dim=32,
        head_bias=True, parallel_block=True,
    ),
    "mpt-7b": GptConfig(vocab=50_432, seq=2048, positions="alibi", bias=False, activation="gelu"),
})  # fmt: skip
