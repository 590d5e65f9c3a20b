"""Sizes that all decoders of this package have, and the counts that follow from these sizes."""

import abc
import dataclasses
from typing import Literal


def _is_policy(name: str) -> bool:
    import jax  # imported here, so that other functions of this file work without JAX

    return hasattr(jax.checkpoint_policies, name)


@dataclasses.dataclass(frozen=True)
class DecoderConfig(abc.ABC):
    """The configuration of a decoder: its sizes, its precision, and how its layers are compiled.

    Layers compute in `dtype`. Parameters are stored in `param_dtype`. Gradients and optimizer state are float32. `seq`
    is the sequence length in training, not a limit.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    seq: int
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    remat: str = "none"
    """Rematerialization: `none`, `full`, or the name of a `jax.checkpoint_policies` policy, such as `dots_saveable`."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Implementation of attention. `auto`: cuDNN in 16-bit precision on GPUs if it supports `head_dim`, else XLA."""
    z_loss: float = 0.0
    """Weight of the square of the log of the softmax's denominator, which the loss then includes (PaLM, section 5)."""
    scan_layers: bool = True
    """Whether the layers are one `lax.scan` over stacked parameters. If not, each layer has its own parameter dict."""

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{type(self).__name__}.{name} is {getattr(self, name)}; give a number of at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads do not divide into {self.kv_heads} groups; use a multiple of kv_heads"
            )
        if not 0.0 <= self.z_loss <= 1.0:
            raise ValueError(f"z_loss is {self.z_loss}; give a weight from 0 to 1, such as 1e-4")
        if self.attention not in ("auto", "xla", "cudnn"):
            raise ValueError(f"attention={self.attention!r} is unknown; use 'auto', 'xla' or 'cudnn'")
        if self.remat not in ("none", "full") and not _is_policy(self.remat):
            raise ValueError(
                f"remat={self.remat!r} is unknown; use 'none', 'full' or a name in jax.checkpoint_policies"
            )

    @property
    def sizes_of_ends(self) -> tuple[str, ...]:
        """The names of the sizes that the devices of the ends split: those of the tables of embedding and head."""
        return ("vocab",)

    @property
    @abc.abstractmethod
    def parameter_count(self) -> int:
        """The number of parameters of the whole model. A tied embedding counts once."""

    @property
    def active_parameter_count(self) -> int:
        """The number of parameters that compute one token. With experts, it is below `parameter_count`."""
        return self.parameter_count

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of one layer's parameters, by name. Empty if the configuration does not say them."""
        return {}

    @property
    def kept_bytes(self) -> float | None:
        """Bytes for each token that backward needs of one layer's forward, without rematerialization.

        Attention is cuDNN's, which stores no scores. None if the configuration does not say it.
        """
        return None

    @property
    def looked_up_count(self) -> int:
        """The number of parameters that are only looked up, and multiply nothing. A tied embedding multiplies."""
        return 0 if self.tie_embeddings else self.vocab * self.hidden

    def flops_per_token(self, seq: int | None = None) -> int:
        """The number of floating-point operations to train on one token, forward and backward, for MFU.

        Every parameter that is multiplied counts 6 operations. With experts, only the experts that compute the token
        count, and dropped tokens count as computed. Attention adds 12 * seq * heads * head_dim operations for each
        layer, not halved for the causal mask. Recomputation under remat does not count.
        """
        scores = 12 * self.layers * self.heads * self.head_dim * (seq or self.seq)
        return 6 * (self.active_parameter_count - self.looked_up_count) + scores
