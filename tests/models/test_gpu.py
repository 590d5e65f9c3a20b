"""The train step compiled for 4 H200s that this machine need not have: attention, collectives and memory."""

import functools
import re
from typing import Any

import jax
import optax
import pytest

from dhelix.models import LlamaConfig, make_train_step
from dhelix.runtime.compiler import deviceless
from dhelix.tests.quick import slow_but

TP = 4


def gpu_config(**overrides: Any) -> LlamaConfig:
    sizes = dict(vocab=8192, hidden=1024, layers=4, heads=8, kv_heads=4, head_dim=128, ffn=3072, seq=2048)
    return LlamaConfig(**{**sizes, **overrides})


@functools.cache
def compile_step(config: LlamaConfig, sharding: Any = "shard_map") -> jax.stages.Compiled:
    training = make_train_step(config, deviceless.mesh({"dp": 1, "tp": TP}), optax.sgd(0.1), 2, sharding)
    step = jax.jit(training.train_step, donate_argnums=0)
    return deviceless.compile(step.lower(training.abstract_state(), training.abstract_batch(batch=2)))


def layer_loops(compiled: jax.stages.Compiled) -> list[str]:
    """Bodies of the forward and the backward loop over layers: those that call cuDNN's attention."""
    text = compiled.as_text() or ""
    return [body for body in re.split(r"\n\n", text) if "__cudnn$fmha" in body]


@pytest.mark.deviceless
@pytest.mark.parametrize("sharding", slow_but(["shard_map"], ["shard_map", "auto"]))
def test_a_layer_has_four_gathers_and_four_scatters(sharding: str) -> None:
    loops = layer_loops(compile_step(gpu_config(), sharding))
    assert len(loops) == 2
    for body in loops:
        assert len(re.findall(r" all-gather(-start)?\(", body)) == 2
        assert len(re.findall(r" reduce-scatter(-start)?\(", body)) == 2
        # The sequence-sharded gradients of the norms are summed at the end of the step. XLA's partitioner may sum them
        # in the loop.
        assert sharding == "auto" or " all-reduce" not in body


@pytest.mark.deviceless
def test_a_layer_costs_its_residuals_and_its_gradients() -> None:
    """Residuals are stored once, in 16 bits, and no layer copies its weights."""

    def temporary(layers: int) -> int:
        stats = compile_step(gpu_config(layers=layers)).memory_analysis()
        assert stats is not None
        return stats.temp_size_in_bytes

    config = gpu_config()
    width = (config.heads + config.kv_heads) * config.head_dim
    per_token = 2 * config.hidden / TP + 2 * config.hidden + 2 * width / TP + 2 * config.ffn / TP
    weights = (gpu_config(layers=5).parameter_count - config.parameter_count) / TP
    # Bytes per weight: 2 for the weight, 2 for a micro-batch's gradient, 4 for the sum over micro-batches.
    expected = 2 * per_token * config.seq + (2 + 2 + 4) * weights
    assert (temporary(8) - temporary(4)) / 4 < 1.05 * expected
