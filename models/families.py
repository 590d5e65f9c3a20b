"""The functions that a train step needs from each family of models, and which family a configuration belongs to."""

from typing import Any, Protocol

import jax

from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.common.parallel import Parallel
from dhelix.models.common.training import Metrics, Params
from dhelix.models.gpt import model as gpt
from dhelix.models.gpt.gpt_config import GptConfig
from dhelix.models.llama import model as llama
from dhelix.models.llama.llama_config import LlamaConfig
from dhelix.models.moe import model as moe
from dhelix.models.moe.moe_config import MoeConfig


class Family(Protocol):
    """A module of a model. `config` is of the family's own type."""

    @property
    def METRICS(self) -> tuple[str, ...]:  # noqa: N802 (the name of a constant of the module)
        """The names of the metrics of `objective`."""
        ...

    def param_specs(self, config: Any, pipeline: str | None = None, shared_ends: bool = True) -> Params:
        """The `PartitionSpec` of each parameter (`llama.param_specs`)."""
        ...

    def init_params(self, config: Any, key: jax.Array) -> Params:
        """Initial parameters in `param_dtype`. The values do not depend on the sharding."""
        ...

    def trainable(self, config: Any, params: Params, parallel: Parallel) -> Params:
        """The parameters as `objective` takes them: in the compute dtype. A step calls this function once."""
        ...

    def objective(
        self,
        config: Any,
        params: Params,
        tokens: jax.Array,
        targets: jax.Array,
        parallel: Parallel,
        segments: jax.Array | None = None,
        weights: jax.Array | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """What to differentiate, and this device's metrics. `metrics["loss"]` is the loss in nats per token.

        Args:
          tokens, targets: int32 `[batch, seq / cp]`, this device's part of the sequence.
          segments: int32 `[batch, seq]`, the document of each token of whole rows, or None.
          weights: float32 `[batch, seq / cp]`, the weight of each token in the mean; None: equal weights.
        """
        ...


def family_of(config: DecoderConfig) -> Family:
    """The functions for models of the type of `config`.

    Raises:
      TypeError: no family has such a configuration.
    """
    families: tuple[tuple[type, Family], ...] = ((MoeConfig, moe), (LlamaConfig, llama), (GptConfig, gpt))
    for kind, family in families:
        if isinstance(config, kind):
            return family
    raise TypeError(f"{type(config).__name__} is no configuration of a model of dhelix; use dhelix.models.preset(...)")
