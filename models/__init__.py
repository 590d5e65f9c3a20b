"""Models with their shardings and presets. They import JAX, Flax and Optax, and nothing of the passes."""

from dhelix.models.config import PRESETS, LlamaConfig, preset
from dhelix.models.llama import Llama
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
