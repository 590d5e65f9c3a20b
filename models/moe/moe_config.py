"""Sizes of mixture-of-experts models: the configuration, its presets, and counts of parameters and FLOPs."""

import dataclasses
import math
from types import MappingProxyType
from typing import Literal

from dhelix.models.llama.llama_config import LlamaConfig


@dataclasses.dataclass(frozen=True)
class LongRope:
    """How a rotary embedding is stretched to longer rows (LongRoPE, arXiv 2402.13753).

    Attributes:
      short: factor on the wavelength of each pair, `head_dim / 2` numbers.
      long: the same for rows of more than `trained` tokens.
      short_scale: factor on cosines and sines.
      long_scale: the same for rows of more than `trained` tokens.
      trained: the longest row before the stretching, in tokens.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    short_scale: float
    long_scale: float
    trained: int


@dataclasses.dataclass(frozen=True)
class MoeConfig(LlamaConfig):
    """A decoder whose feed-forward networks are experts. Each token goes to some of them.

    `ffn` is the hidden size of one expert. Attention, norms, precision and loops are those of `LlamaConfig`.

    Attributes:
      experts: number of routed experts in a layer.
      chosen: experts that compute each token (top-k).
      shared: width of the experts that compute every token, as a number of routed experts; 0 for none.
      capacity_factor: rows of an expert, relative to a perfectly balanced load. An expert drops what exceeds its rows.
      normalise: whether the weights of a token's experts are scaled to a sum of 1.
      balance_weight: weight of the load-balancing loss.
      z_weight: weight of the router's z-loss.
      norm: "rms": RMS norms. "layer": LayerNorms with biases.
      attention_bias: whether the linear layers of attention have biases.
      head_bias: whether the head has a bias.
      routing: how a token's experts get their weights (`moe.routing`). "softmax": from one softmax. "sparsemixer": from
        one softmax for each choice, as in Phi-3.5-MoE; `normalise` then does nothing.
      jitter: with "sparsemixer", half of the relative distance to the best logit beyond which an expert does not count.
      long_rope: stretches the rotary embedding; None: only `rope_factor` does.
    """

    experts: int = 16
    chosen: int = 2
    shared: int = 0
    capacity_factor: float = 1.25
    normalise: bool = True
    balance_weight: float = 0.01
    z_weight: float = 0.001
    norm: Literal["rms", "layer"] = "rms"
    attention_bias: bool = False
    head_bias: bool = False
    routing: Literal["softmax", "sparsemixer"] = "softmax"
    jitter: float = 0.01
    long_rope: LongRope | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(f"{self.chosen} of {self.experts} experts cannot be chosen; use 1 to {self.experts}")
        if self.capacity_factor <= 0.0:
            raise ValueError(f"capacity_factor is {self.capacity_factor}; give a number above 0, such as 1.25")
        if self.norm not in ("rms", "layer"):
            raise ValueError(f"norm={self.norm!r} is unknown; use 'rms' or 'layer'")
        if self.routing not in ("softmax", "sparsemixer"):
            raise ValueError(f"routing={self.routing!r} is unknown; use 'softmax' or 'sparsemixer'")
        if rope := self.long_rope:
            counts = len(rope.short), len(rope.long)
            if counts != (self.head_dim // 2, self.head_dim // 2):
                raise ValueError(
                    f"long_rope has {counts[0]} short and {counts[1]} long factors; give head_dim / 2 = "
                    f"{self.head_dim // 2} of both"
                )

    def capacity(self, tokens: int) -> int:
        """Rows of each expert for `tokens` that one device routes: a multiple of 8, or less for few tokens.

        Raises:
          ValueError: the capacity is below one token.
        """
        rows = self.capacity_factor * tokens * self.chosen / self.experts
        if rows < 1.0:
            raise ValueError(
                f"an expert has room for {rows:.2f} of {tokens} tokens; use more tokens for each device, or a larger "
                "capacity factor"
            )
        return min(math.ceil(rows / 8) * 8 if rows >= 8 else math.ceil(rows), tokens)

    def check_chunks(self, chunks: int) -> None:
        """Checks that the layers divide into the chunks of a pipeline, because a padding layer would route tokens, too.

        Raises:
          ValueError: they do not.
        """
        if self.layers % chunks:
            raise ValueError(
                f"{self.layers} layers with experts do not divide into {chunks} chunks; use a number of layers that "
                "does, because a layer of padding would add to the routing losses"
            )

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        return {}  # not those of one dense layer; they are in `models.moe.model`

    @property
    def kept_bytes(self) -> float | None:
        return None

    @property
    def parameter_count(self) -> int:
        return self._parameters(self.experts)

    @property
    def active_parameter_count(self) -> int:
        return self._parameters(self.chosen)

    def _parameters(self, experts: int) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        expert = 3 * self.hidden * self.ffn
        if self.attention_bias:
            attention += self.head_dim * (self.heads + 2 * self.kv_heads) + self.hidden
        norm = self.hidden * (2 if self.norm == "layer" else 1)
        layer = attention + self.hidden * self.experts + (experts + self.shared) * expert + 2 * norm
        tables = (1 if self.tie_embeddings else 2) * self.vocab * self.hidden + (self.vocab if self.head_bias else 0)
        return tables + self.layers * layer + norm


_PHI = MoeConfig(
    vocab=32_064, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=6400, seq=4096, rope_theta=10_000.0,
)  # fmt: skip

# Phi: the sizes of Phi-3.5-MoE-instruct (microsoft/Phi-3.5-MoE-instruct, config.json), with other numbers of layers for
# the 31B and 16B models of the DHelix paper (arXiv 2411.15871, table 6). OLMoE-1B-7B-0924 and deepseek-moe-16b-base are
# their configurations; DeepSeek's first layer is dense in the original, and has experts here.
MOE_PRESETS = MappingProxyType({
    "phi-moe-demo": MoeConfig(
        vocab=256, hidden=128, layers=4, heads=8, kv_heads=4, head_dim=16, ffn=192, seq=128, experts=8,
        rope_theta=10_000.0, dtype="float32", param_dtype="float32",
    ),
    "phi-moe-16b": dataclasses.replace(_PHI, layers=12),
    "phi-moe-31b": dataclasses.replace(_PHI, layers=24),
    "phi-moe-42b": _PHI,
    "olmoe-1b-7b": MoeConfig(
        vocab=50_304, hidden=2048, layers=16, heads=16, kv_heads=16, ffn=1024, seq=4096, rope_theta=10_000.0,
        experts=64, chosen=8, normalise=False,
    ),
    "deepseek-moe-16b": MoeConfig(
        vocab=102_400, hidden=2048, layers=28, heads=16, kv_heads=16, ffn=1408, seq=4096, rope_theta=10_000.0,
        norm_eps=1e-6, experts=64, chosen=6, shared=2, normalise=False,
    ),
})  # fmt: skip
