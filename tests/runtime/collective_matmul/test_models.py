"""A Llama step whose layers use collective matmuls through `ManualParallel(collective_matmuls=...)`."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from dhelix.models import LlamaConfig, make_mesh
from dhelix.models.common.parallel import ManualParallel
from dhelix.models.llama import model as llama
from dhelix.models.train_step import accumulate_gradients, over_mesh
from dhelix.runtime.collective_matmul import CollectiveMatmuls
from dhelix.tests.models.tiny import TINY
from dhelix.tests.runtime.collective_matmul.programs import assert_close, fast_jit

CONFIG = TINY
MESH = make_mesh(1, 4)


@functools.cache
def arguments() -> tuple[Any, Any]:
    """Parameters away from zero, so that no gradient is small, and a batch."""
    generator = np.random.default_rng(7)
    shapes = jax.eval_shape(functools.partial(llama.init_params, CONFIG), jax.random.key(0))
    params = jax.tree.map(lambda leaf: generator.normal(0.2, 0.1, leaf.shape).astype(leaf.dtype), shapes)
    return params, {"tokens": generator.integers(0, CONFIG.vocab, (4, CONFIG.seq + 1)).astype(np.int32)}


def step(config: LlamaConfig, collective_matmuls: CollectiveMatmuls | None) -> Any:
    """Loss and gradients of two micro-batches over four devices, jitted."""
    specs = llama.param_specs(config)

    def local(params: Any, batch: Any) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        parallel = ManualParallel(collective_matmuls=collective_matmuls)
        gradients, metrics = accumulate_gradients(llama, config, parallel, 2, params, batch)
        return metrics["loss"], gradients, {}

    return fast_jit(over_mesh(local, config, MESH, specs))


@functools.cache
def plain() -> Any:
    return step(CONFIG, None)(*arguments())


@pytest.mark.parametrize(
    ("form", "collective", "remat"),
    [pytest.param("ring", "permute", "none", marks=pytest.mark.slow), ("hybrid:2", "gather", "full")],
)
def test_losses_and_gradients_are_those_of_the_plain_step(form: str, collective: str, remat: Any) -> None:
    compiled = step(dataclasses.replace(CONFIG, remat=remat), CollectiveMatmuls(form)).lower(*arguments()).compile()
    assert f"{collective}(" in compiled.as_text()
    assert_close(compiled(*arguments()), plain(), 1e-5)
