"""Sizes of the Llama family: the configuration, its presets, and counts of parameters and FLOPs."""

import dataclasses
from types import MappingProxyType
from typing import Literal

LLAMA3_VOCABULARY = 128_256


def _is_policy(name: str) -> bool:
    import jax  # imported here, so that other functions of this file work without JAX

    return hasattr(jax.checkpoint_policies, name)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The configuration of a Llama 3 model: its sizes, its precision, and how its layers are compiled.

    Layers compute in `dtype`. Parameters are stored in `param_dtype`. Gradients and optimizer state are float32. `seq`
    is the sequence length in training, not a limit.
    """

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
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    remat: str = "none"
    """Rematerialization: `none`, `full`, or the name of a `jax.checkpoint_policies` policy, such as `dots_saveable`."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Implementation of attention. `auto`: cuDNN in 16-bit precision on GPUs if it supports `head_dim`, else XLA."""
    scan_layers: bool = True
    """Whether the layers are one `lax.scan` over stacked parameters. If not, each layer has its own parameter dict."""

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"LlamaConfig.{name} is {getattr(self, name)}; give a number of at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads do not divide into {self.kv_heads} groups; use a multiple of kv_heads"
            )
        if self.attention not in ("auto", "xla", "cudnn"):
            raise ValueError(f"attention={self.attention!r} is unknown; use 'auto', 'xla' or 'cudnn'")
        if self.remat not in ("none", "full") and not _is_policy(self.remat):
            raise ValueError(
                f"remat={self.remat!r} is unknown; use 'none', 'full' or a name in jax.checkpoint_policies"
            )

    @property
    def parameter_count(self) -> int:
        """The number of parameters of the whole model. A tied embedding counts once."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        tables = (1 if self.tie_embeddings else 2) * self.vocab * self.hidden
        return tables + self.layers * layer + self.hidden

    def flops_per_token(self, seq: int | None = None) -> int:
        """The number of floating-point operations to train on one token, forward and backward, for MFU.

        Every parameter that is multiplied counts 6 operations. The look-up in the embedding multiplies nothing and does
        not count. Attention adds 12 * seq * heads * head_dim operations for each layer, not halved for the causal mask.
        Recomputation under remat does not count.
        """
        lookup = 0 if self.tie_embeddings else self.vocab * self.hidden
        scores = 12 * self.layers * self.heads * self.head_dim * (seq or self.seq)
        return 6 * (self.parameter_count - lookup) + scores


_LLAMA_70B = LlamaConfig(hidden=8192, layers=80, heads=64, ffn=28672)
_LLAMA_405B = LlamaConfig(hidden=16384, layers=126, heads=128, ffn=53248)

# The presets from 8B to 66B are from Table 3 of the DHelix paper. 25B and 66B are Llama-3.1-70B with other numbers of
# layers. 39B is Llama-3.1-405B with fewer layers.
LLAMA_PRESETS = MappingProxyType({
    "llama-demo": LlamaConfig(
        vocab=256, hidden=128, layers=4, heads=8, kv_heads=4, head_dim=16, ffn=384, seq=128,
        rope_theta=10_000.0, dtype="float32", param_dtype="float32",
    ),
    "llama-8b": LlamaConfig(),
    "llama-25b": dataclasses.replace(_LLAMA_70B, layers=28),
    "llama-39b": dataclasses.replace(_LLAMA_405B, layers=12),
    "llama-66b": dataclasses.replace(_LLAMA_70B, layers=76, seq=16384),
    "llama-3.1-70b": dataclasses.replace(_LLAMA_70B, rope_factor=8.0),
    "llama-3.1-405b": dataclasses.replace(_LLAMA_405B, rope_factor=8.0),
})  # fmt: skip
