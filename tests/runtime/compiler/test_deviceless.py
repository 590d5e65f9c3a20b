"""GPU programs compiled without a GPU, and the messages if that cannot work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.runtime.compiler import deviceless, lowering, tuned


def _memory(compiled: jax.stages.Compiled) -> list[int]:
    stats = compiled.memory_analysis()
    return [getattr(stats, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")]


def _text(compiled: jax.stages.Compiled) -> str:
    text = compiled.as_text()
    assert text is not None
    return text


@pytest.mark.deviceless
@pytest.mark.parametrize(("axes", "hosts"), [({"tp": 4}, 1), ({"dp": 8, "tp": 8}, 8)])
def test_mesh_of_gpus_on_paper(axes: dict[str, int], hosts: int) -> None:
    mesh = deviceless.mesh(axes)
    assert dict(mesh.shape) == axes
    assert mesh.devices.flat[-1].process_index == hosts - 1
    assert mesh.devices.flat[-1].device_kind == "NVIDIA H200"
    assert deviceless.mesh(axes) == mesh


@pytest.mark.deviceless
def test_gpu_program_beside_cpu_devices() -> None:
    mesh = deviceless.mesh({"tp": 4})
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "tp")))
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("tp", None)))
    compiled = deviceless.compile(jax.jit(jnp.matmul).lower(x, w))
    assert "all-reduce" in _text(compiled) and "cublas" in _text(compiled)
    assert jax.devices()[0].platform == "cpu" and len(jax.devices()) == 8


@pytest.mark.deviceless
@pytest.mark.parametrize("compile", [deviceless.compile, tuned.compile])
@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        (jnp.bfloat16, (1024, 1024), "__cublas$lt$matmul"),
        (jnp.float8_e4m3fn, (1024, 1024), "__cublas$lt$matmul$f8"),
        (jnp.bfloat16, (4, 4), "__cublas$lt$matmul"),  # too small for XLA to fuse
        (jnp.complex64, (64, 64), "__cublas$lt$matmul"),  # not supported by Triton
    ],
)
def test_products_without_autotuning_results_are_left_to_cublas(
    compile: Any, dtype: Any, shape: tuple[int, int], expected: str
) -> None:
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(deviceless.mesh({"tp": 1}), P()))
    product = jax.jit(lambda a, b: jnp.tanh(jax.lax.dot(a, b, preferred_element_type=b.dtype)))
    assert f'"{expected}"' in _text(compile(product.lower(x, x)))


def test_the_users_own_autotuning_results_go_before_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def options() -> dict[str, Any]:
        return deviceless.compile(Recorder())  # type: ignore[arg-type]

    class Recorder:
        def compile(self, options: dict[str, Any]) -> dict[str, Any]:
            return options

    name = "xla_gpu_load_autotune_results_from"
    assert Path(options()[name]).name.endswith(".autotune.pbtxt")
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=mine.pbtxt")
    assert name not in options()


@pytest.mark.deviceless
@pytest.mark.parametrize("manual", [False, True])
def test_round_trip_of_cudnn_attention_gives_the_same_gpu_program(manual: bool) -> None:
    """The program has custom calls with several results, custom partitioning and the plugin's older StableHLO."""
    mesh, spec = deviceless.mesh({"tp": 4}), P(None, None, "tp")

    def step(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        def loss(*args: jax.Array) -> jax.Array:
            attention = jax.nn.dot_product_attention(*args, is_causal=True, implementation="cudnn")
            return attention.astype(jnp.float32).sum()

        def body(carry: Any, _: None) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss, (0, 1, 2))(q, k, v)), None

        return jax.lax.scan(body, (jnp.float32(0), (q, k, v)), None, length=3)[0]

    if manual:
        step = jax.shard_map(step, mesh=mesh, in_specs=(spec,) * 3, out_specs=(P(), (spec,) * 3), check_vma=False)
    x = jax.ShapeDtypeStruct((2, 1024, 16, 128), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    plain = jax.jit(step, donate_argnums=0).lower(x, x, x)
    changed = lowering.with_hlo(plain, lowering.hlo_bytes(plain), "jit_step__dhelix_1")
    compiled, recompiled = deviceless.compile(plain), deviceless.compile(changed)
    assert _memory(recompiled) == _memory(compiled)
    for operation in ("fmhaSoftmaxBackward", "all-reduce", "copy(", "fusion("):
        assert _text(recompiled).count(operation) == _text(compiled).count(operation), operation


@pytest.mark.deviceless
def test_malformed_requests_say_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(deviceless.DevicelessError, match="use one of .*h200"):
        deviceless.topology("h900")
    with pytest.raises(deviceless.DevicelessError, match="slices x hosts x GPUs"):
        deviceless.topology(shape="1x4")
    with pytest.raises(deviceless.DevicelessError, match="need 4 GPUs, but topology 1x1x8 has 8"):
        deviceless.mesh({"tp": 4}, shape="1x1x8")
    with pytest.raises(deviceless.DevicelessError, match="give each axis a name and a size of at least 1"):
        deviceless.mesh({"dp": 0, "tp": 4})
    (tmp_path / "other.pbtxt").write_text("no_such_field: 1")
    with pytest.raises(deviceless.DevicelessError, match="refuses this target"):
        deviceless.topology(str(tmp_path / "other.pbtxt"))


def test_missing_plugin_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pkgutil.iter_modules", lambda *_: [])
    with pytest.raises(deviceless.DevicelessError, match=r"pip install 'dhelix\[compile\]'"):
        deviceless.topology(shape="1x1x7")  # no other test has cached this topology


@pytest.mark.deviceless
def test_environment_is_prepared_before_devices_are_looked_for() -> None:
    program = (
        "import sys, jax\n"
        "from dhelix.runtime.compiler import deviceless\n"
        "if sys.argv[1] == 'late': jax.devices()\n"
        "print(len(deviceless.topology().devices))\n"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    runs = {
        when: subprocess.run([sys.executable, "-c", program, when], env=clean, capture_output=True, text=True)
        for when in ("early", "late")
    }
    assert runs["early"].stdout == "4\n" and "Unable to load" not in runs["early"].stderr
    assert "prepare_environment() at the start of the program" in runs["late"].stderr
