"""Models with their shardings and presets. The models use JAX, Flax and Optax, and do not depend on dhelix's passes.

A submodule is imported when one of its names is first used. So the names of presets are known without importing JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dhelix.models.common.mesh import make_mesh
    from dhelix.models.common.training import Training, TrainState
    from dhelix.models.gpt.gpt_config import GptConfig
    from dhelix.models.llama.llama_config import LlamaConfig
    from dhelix.models.llama.model import Llama
    from dhelix.models.moe.moe_config import MoeConfig
    from dhelix.models.presets import PRESETS, preset
    from dhelix.models.train_step import make_train_step

__all__ = [
    "PRESETS",
    "GptConfig",
    "Llama",
    "LlamaConfig",
    "MoeConfig",
    "TrainState",
    "Training",
    "make_mesh",
    "make_train_step",
    "preset",
]

_HOMES = {
    "PRESETS": "presets",
    "preset": "presets",
    "GptConfig": "gpt.gpt_config",
    "LlamaConfig": "llama.llama_config",
    "MoeConfig": "moe.moe_config",
    "Llama": "llama.model",
    "make_mesh": "common.mesh",
    "TrainState": "common.training",
    "Training": "common.training",
    "make_train_step": "train_step",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dhelix.models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dhelix.models.{_HOMES[name]}"), name)
