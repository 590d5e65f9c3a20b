"""A program whose kernels come from an earlier compilation is the same program, and its kernels are not made again."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.passes import jax_compat
from dhelix.runtime.compiler import deviceless, kernel_cache, memory_need


def lowered(target: str = "h100") -> jax.stages.Lowered:
    sharding = NamedSharding(deviceless.mesh({"tp": 2}, target), P(None, "tp"))
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=sharding)
    return jax.jit(lambda x: jnp.tanh(x @ x) - jnp.max(x, axis=0)).lower(x)


@pytest.mark.deviceless
def test_known_kernels_change_neither_program_nor_memory() -> None:
    step = lowered()
    (file,) = map(Path, kernel_cache.options(step).values())
    file.unlink(missing_ok=True)
    alone = deviceless.compile(step)
    known = []
    for _ in range(2):
        found = deviceless.compile(jax_compat.apart(step), **kernel_cache.options(step))
        assert memory_need.of_compiled(found) == memory_need.of_compiled(alone)
        assert found.as_text() == alone.as_text()
        known.append(file.read_bytes())
    assert known[0] and known[0] == known[1]


@pytest.mark.deviceless
def test_a_file_for_each_gpu_that_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    (file,), (other,) = (map(Path, kernel_cache.options(lowered(gpu)).values()) for gpu in ("h100", "a100"))
    assert file != other and file.parent == other.parent
    file.write_bytes(b"1234")
    monkeypatch.setattr(kernel_cache, "_MOST_BYTES", 4)
    kernel_cache.options(lowered())
    assert file.exists()
    monkeypatch.setattr(kernel_cache, "_MOST_BYTES", 3)
    kernel_cache.options(lowered())
    assert not file.exists()
