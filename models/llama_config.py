"""Sizes of the Llama family: the configuration, its presets, and counts of parameters and FLOPs."""

import dataclasses
from types import MappingProxyType
from typing import Any, Literal

LLAMA3_VOCABULARY = 128_256


def _is_policy(name: str) -> bool:
    import jax  # imported late, so that the names of presets are known without JAX

    return hasattr(jax.checkpoint_policies, name)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """A Llama 3 model: sizes, precision, and how its layers are compiled.

    Layers compute in `dtype`. Parameters are kept in `param_dtype`; gradients and optimizer state are float32. `seq` is
    the sequence length that the preset trains with, not a limit.
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
    """Llama 3.1 stretches low rotary frequencies by 8; 1 leaves them as they are."""
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    remat: str = "none"
    """`none`, `full`, or the name of a policy in `jax.checkpoint_policies` such as `dots_saveable`."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """`xla`, `cudnn`, or `auto`: cuDNN on GPUs in 16-bit precision, else XLA."""
    scan_layers: bool = True
    """True: layers are one `lax.scan` over stacked parameters. False: unrolled, with one parameter dict per layer."""

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
        """Parameters of the whole model. A tied embedding counts once."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        tables = (1 if self.tie_embeddings else 2) * self.vocab * self.hidden
        return tables + self.layers * layer + self.hidden

    def flops_per_token(self, seq: int | None = None) -> int:
        """Floating-point operations to train on one token, forward and backward, for MFU.

        Counts 6 per multiplied parameter, so not the embedding's look-up. Attention adds 12 * seq * heads * head_dim
        per layer, not halved for the causal mask. Recomputation under remat does not count.
        """
        lookup = 0 if self.tie_embeddings else self.vocab * self.hidden
        scores = 12 * self.layers * self.heads * self.head_dim * (seq or self.seq)
        return 6 * (self.parameter_count - lookup) + scores


_LLAMA_70B = LlamaConfig(hidden=8192, layers=80, heads=64, ffn=28672)
_LLAMA_405B = LlamaConfig(hidden=16384, layers=126, heads=128, ffn=53248)

# 8B to 66B are from Table 3 of the DHelix paper. 25B and 66B are Llama-3.1-70B with other numbers of layers; 39B is
# Llama-3.1-405B with fewer layers.
PRESETS = MappingProxyType({
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


def preset(name: str, layers: int | None = None, **overrides: Any) -> LlamaConfig:
    """The preset `name`, with its number of layers or any other field of `LlamaConfig` replaced.

    Raises:
      ValueError: the preset or a field is unknown.
    """
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown; use one of {', '.join(PRESETS)}")
    unknown = sorted(set(overrides) - {field.name for field in dataclasses.fields(LlamaConfig)})
    if unknown:
        raise ValueError(f"LlamaConfig has no field {unknown[0]!r}; override one of its fields")
    if layers is not None:
        overrides["layers"] = layers
    return dataclasses.replace(PRESETS[name], **overrides)
