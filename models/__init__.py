"""Models with their shardings and presets. They use JAX, Flax and Optax, and know nothing of the passes.

Names are loaded on first use, so the names of presets are known without JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dhelix.models.llama import Llama
    from dhelix.models.llama_config import PRESETS, LlamaConfig, preset
    from dhelix.models.parallel import make_mesh
    from dhelix.models.train_step import Training, TrainState, make_train_step

__all__ = [
    "PRESETS",
    "Llama",
    "LlamaConfig",
    "TrainState",
    "Training",
    "make_mesh",
    "make_train_step",
    "preset",
]

_HOMES = {
    "PRESETS": "llama_config",
    "LlamaConfig": "llama_config",
    "preset": "llama_config",
    "Llama": "llama",
    "make_mesh": "parallel",
    "TrainState": "train_step",
    "Training": "train_step",
    "make_train_step": "train_step",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dhelix.models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dhelix.models.{_HOMES[name]}"), name)
