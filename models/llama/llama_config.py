"""Sizes of the Llama family: the configuration, its presets, and counts of parameters and FLOPs."""

import dataclasses
from types import MappingProxyType

from dhelix.models.common.decoder_config import DecoderConfig

LLAMA3_VOCABULARY = 128_256


@dataclasses.dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """The configuration of a Llama model. The defaults are the sizes of Llama 3 8B."""

    vocab: int = LLAMA3_VOCABULARY
    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 14336
    seq: int = 8192
    rope_theta: float = 500_000.0
    rope_factor: float = 1.0
    """Factor on the longest wavelengths of the rotary embedding: 8 for Llama 3.1, 1 for Llama 3."""

    @property
    def parameter_count(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        tables = (1 if self.tie_embeddings else 2) * self.vocab * self.hidden
        return tables + self.layers * layer + self.hidden

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        return dense_layer_shapes(self)

    @property
    def kept_bytes(self) -> float | None:
        residuals = 4 * self.hidden  # the inputs of both blocks, before and after their norms
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim  # queries and outputs, keys and values
        log_sums = 4 * self.heads  # of the softmax, float32
        return (4 if self.dtype == "float32" else 2) * (residuals + attention + 2 * self.ffn) + log_sums


def dense_layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of one layer without experts, by name."""
    hidden, ffn = config.hidden, config.ffn
    heads, kv_heads = (config.heads, config.head_dim), (config.kv_heads, config.head_dim)
    return {
        "attention_norm": (hidden,),
        "wq": (hidden, *heads),
        "wk": (hidden, *kv_heads),
        "wv": (hidden, *kv_heads),
        "wo": (*heads, hidden),
        "ffn_norm": (hidden,),
        "w_gate": (hidden, ffn),
        "w_up": (hidden, ffn),
        "w_down": (ffn, hidden),
    }


_LLAMA_70B = LlamaConfig(hidden=8192, layers=80, heads=64, ffn=28672)
_LLAMA_405B = LlamaConfig(hidden=16384, layers=126, heads=128, ffn=53248)
_LLAMA_7B = LlamaConfig(vocab=32_000, kv_heads=32, ffn=11_008, seq=4096, rope_theta=10_000.0, norm_eps=1e-6)

# The presets from 8B to 66B are from Table 3 of the DHelix paper. 25B and 66B are Llama-3.1-70B with other numbers of
# layers. 39B is Llama-3.1-405B with fewer layers.
#
# 7B, 13B and 30B are the models of AMSP (arXiv 2311.00257), which names them and gives no sizes. 7B and 13B have the
# sizes of the first LLaMA (arXiv 2302.13971). AMSP's MFU and tokens per second of 30B lead to the FLOPs of 60 layers of
# hidden size 6144: 27.6 billion parameters, not LLaMA's 32.5 billion with hidden size 6656. The feed-forward of 30B
# follows LLaMA's rule: 8/3 of the hidden size, a multiple of 256. Sequences have 4096 tokens, as in AMSP.
LLAMA_PRESETS = MappingProxyType({
    "llama-demo": LlamaConfig(
        vocab=256, hidden=128, layers=4, heads=8, kv_heads=4, head_dim=16, ffn=384, seq=128,
        rope_theta=10_000.0, dtype="float32", param_dtype="float32",
    ),
    "llama-8b": LlamaConfig(),
    "llama-25b": dataclasses.replace(_LLAMA_70B, layers=28),
    "llama-39b": dataclasses.replace(_LLAMA_405B, layers=12),
    "llama-66b": dataclasses.replace(_LLAMA_70B, layers=76, seq=16384),
    "llama-7b": _LLAMA_7B,
    "llama-13b": dataclasses.replace(_LLAMA_7B, hidden=5120, layers=40, heads=40, kv_heads=40, ffn=13_824),
    "llama-30b": dataclasses.replace(_LLAMA_7B, hidden=6144, layers=60, heads=48, kv_heads=48, ffn=16_384),
    "llama-3.1-70b": dataclasses.replace(_LLAMA_70B, rope_factor=8.0),
    "llama-3.1-405b": dataclasses.replace(_LLAMA_405B, rope_factor=8.0),
})  # fmt: skip
