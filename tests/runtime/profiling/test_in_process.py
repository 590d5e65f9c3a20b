"""Profiling a decorated step in its own process: what is requested and measured, and what stays unchanged.

The step is compiled for GPUs that need not exist, or runs on CPU. A fake measurer provides the times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest

from dhelix.errors import DhelixError
from dhelix.passes.evaluation.replay.program import Item
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import HloModule
from dhelix.profiles.files import storage
from dhelix.profiles.keys import CollectiveKey
from dhelix.profiles.profile import SETTINGS, Profile, Provenance
from dhelix.runtime.compiler import deviceless, registration
from dhelix.runtime.profiling import in_process, measure
from dhelix.runtime.profiling.measure import Outcome, Sample
from dhelix.runtime.profiling.session import Step
from dhelix.runtime.step.interleaved_step import InterleavedStep
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.runtime import steps

WHERE = Provenance("NVIDIA H200", 2, "2026-01-31", nccl="2.28.9", jax=jax.__version__)


class Measurer:
    """A fake measurer: everything takes 100 us. Records the requested items."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.patience = 10**6  # items until an interrupt

    def measure(self, items: Sequence[Item], repeats: int) -> list[Outcome]:
        if len(self.items) + len(items) > self.patience:
            raise KeyboardInterrupt
        self.items += items
        return [(Sample(1e-4, 1e-4, 1e-4 if item.second else 0.0),) * repeats for item in items]


@dataclass(frozen=True)
class Cosine:
    """Turns sines into cosines, so that the step changes and its module gets a marked name."""

    name: ClassVar[str] = "cosine"
    stage: ClassVar[Stage] = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        for instruction in (i for c in module.computations for i in c.instructions if i.opcode == "sine"):
            instruction.opcode = "cosine"
        return True


@pytest.fixture
def measurer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Measurer]:
    """Replaces this process's GPUs by two H200s with a fake measurer."""
    fake = Measurer()
    monkeypatch.setenv(storage.SEARCH_PATH, str(tmp_path))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(in_process, "provenance", lambda: WHERE)
    monkeypatch.setattr(in_process, "gpu_measurer", lambda *_: fake)
    yield fake


@pytest.fixture(scope="module")
def gpu_step() -> tuple[InterleavedStep, tuple[Any, ...]]:
    """A step of two strands for two GPUs, and abstract arguments."""

    limit = 1 << 40  # two strands of so small a step need more than the plain one plus 3 %
    options = dict(deviceless.COMPILER_OPTIONS)
    return steps.of_two_layers(deviceless.mesh({"dp": 2}), memory_limit=limit, compiler_options=options)


def cpu_step(**options: Any) -> InterleavedStep:
    @strand_interleave(donate_argnums=0, strict=True, **options)
    def train_step(state: jax.Array, batch: jax.Array, *, scale: float = 1.0) -> jax.Array:
        return state + scale * jnp.sin(batch @ batch)

    return train_step


# ---- launch setting of the process


@pytest.mark.parametrize("name", SETTINGS)
def test_a_process_started_as_a_setting_says_runs_under_it(name: str) -> None:
    setting = SETTINGS[name]
    environment = {**setting.environment, "XLA_FLAGS": " ".join(("--xla_dump_to=dump", *setting.xla_flags))}
    assert in_process.setting_of(environment) is setting
    options = dict(flag.removeprefix("--").split("=") for flag in setting.xla_flags)
    assert in_process.setting_of(setting.environment, options) is setting


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "default"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8", "XLA_FLAGS": "--xla_gpu_enable_nccl_user_buffers=0"}, "default"),
        ({"XLA_FLAGS": "--xla_gpu_enable_nccl_user_buffers"}, "user-buffers"),
        ({"XLA_FLAGS": "--xla_gpu_enable_nccl_user_buffers=true --xla_gpu_enable_nccl_user_buffers=false"}, "default"),
        ({"XLA_FLAGS": "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer="}, "default"),
    ],
)
def test_ways_to_write_a_setting(environment: dict[str, str], name: str) -> None:
    assert in_process.setting_of(environment).name == name


def test_options_of_the_step_count_more_than_flags() -> None:
    environment = {"XLA_FLAGS": "--xla_gpu_enable_nccl_user_buffers=true"}
    assert in_process.setting_of(environment, {"xla_gpu_enable_nccl_user_buffers": False}).name == "default"
    assert in_process.setting_of({}, {"xla_gpu_enable_nccl_user_buffers": True}).name == "user-buffers"


@pytest.mark.parametrize(
    "environment",
    [
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "XLA_FLAGS": "--xla_gpu_enable_nccl_user_buffers=true"},
        {"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        {"XLA_FLAGS": "--xla_gpu_experimental_enable_nccl_symmetric_buffers=true"},  # without copy engines
    ],
)
def test_what_no_setting_describes_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(DhelixError, match="no launch setting") as error:
        in_process.setting_of(environment)
    assert all(name in str(error.value) for name in SETTINGS) and "\n" not in str(error.value)
    assert environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "symmetric") in str(error.value).partition("; start")[0]


def test_link() -> None:
    assert in_process.link_of({}) == in_process.link_of({"NCCL_P2P_DISABLE": "0"}) == "nvlink"
    assert in_process.link_of({"NCCL_P2P_DISABLE": "1"}) == in_process.link_of({}, "no-p2p") == "no-p2p"
    for environment, link in (({}, "two-nodes"), ({"NCCL_P2P_DISABLE": "1"}, "nvlink")):
        with pytest.raises(DhelixError, match=link):
            in_process.link_of(environment, link)


def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(DhelixError, match="needs GPUs, but this process runs on cpu"):
        in_process.this_process()


@pytest.mark.parametrize("name", ["default", "command-buffers", "copy-engine"])
def test_measurer_of_a_setting_on_the_gpus_of_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(measure, "GpuMeasurer", lambda *args, **kwargs: made.append((*args, *kwargs.values())))
    gpu, far = (
        SimpleNamespace(process_index=process, memory_stats=lambda: {"bytes_limit": 1000, "bytes_in_use": 400})
        for process in (0, 1)
    )
    options = {"command-buffers": {}}.get(name, {"xla_gpu_enable_command_buffer": ""})
    in_process.gpu_measurer(SETTINGS[name])
    in_process.gpu_measurer(SETTINGS[name], [far, gpu], {"xla_other": 1})
    marks = name != "default"
    assert made == [(options, marks), ([far, gpu], {"xla_other": 1, **options}, 300, marks)]


# ---- what is measured


@pytest.mark.deviceless
def test_a_step_is_measured_once(gpu_step: Any, measurer: Measurer, tmp_path: Path) -> None:
    step, arguments = gpu_step
    report, environment, hooks = step.report(*arguments), dict(os.environ), dict(registration._registered)
    profile = step.profile(*arguments, progress=False)
    assert (profile.hardware, profile.link, profile.measured_on) == ("H200", "nvlink", (WHERE,))
    assert storage.load(tmp_path / "h200-nvlink.json") == profile
    assert set(profile.sections) == {"default"}
    section = profile.section("default")
    assert {key.kind for key in section.operators} >= {"gemm", "fusion"}
    assert {key.group_size for key in section.collectives} == {2}
    assert any(isinstance(pair.first, CollectiveKey) for pair in section.pairs)
    assert {item.first.instruction.computation.module.name for item in measurer.items} == {report.module}

    measurer.items.clear()
    assert step.profile(*arguments, progress=False) == profile and not measurer.items
    step.profile(*arguments, pairs=False, again=True, progress=False)
    assert measurer.items and not any(item.second for item in measurer.items)
    assert step.report(*arguments) == report
    assert dict(os.environ) == environment and dict(registration._registered) == hooks


@pytest.mark.deviceless
def test_what_was_measured_before_an_interrupt_stays(gpu_step: Any, measurer: Measurer, tmp_path: Path) -> None:
    step, arguments = gpu_step
    out = tmp_path / "new" / "mine.json"
    measurer.patience = 60
    with pytest.raises(KeyboardInterrupt):
        step.profile(*arguments, out=out, progress=False)
    alone, measurer.patience = len(measurer.items), 10**6
    assert len(storage.load(out).section("default").operators) > 0
    measurer.items.clear()
    assert step.profile(*arguments, out=str(out), progress=False).section("default").pairs
    assert alone and measurer.items[0].second is None and any(item.second for item in measurer.items)
    assert not (tmp_path / "h200-nvlink.json").exists()


@pytest.mark.deviceless
def test_progress(gpu_step: Any, measurer: Measurer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step, arguments = gpu_step
    seen: list[tuple[int, int, str]] = []
    step.profile(*arguments, out=tmp_path / "a.json", progress=lambda *what: seen.append(what))
    done = [n for n, _, _ in seen]
    assert done == sorted(done) and done[-1] == seen[-1][1] > 0 and seen[0][2] == "operators alone"
    step.profile(*arguments, out=tmp_path / "b.json", progress=False)
    assert not caplog.records
    step.profile(*arguments, out=tmp_path / "c.json")
    assert [r.getMessage() for r in caplog.records] == [f"dhelix: profile: {n} of {of}, {what}" for n, of, what in seen]


def test_the_step_is_traced_without_passes_of_the_compiler_and_keeps_its_arguments(
    measurer: Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[jax.stages.Lowered] = []

    def observe(step: Step, lowered: jax.stages.Lowered, make: Callable[[], tuple[Any, ...]], *_: Any) -> Step:
        ran.append(lowered)
        assert [leaf.shape for leaf in make()] == [(64, 64)] * 2
        return observed(step, lowered, make)

    observed = in_process.observe
    monkeypatch.setattr(in_process, "observe", observe)
    step = cpu_step(passes=[Cosine()])
    state, batch = jnp.zeros((64, 64)), jnp.ones((64, 64))
    step.profile(state, batch, progress=False)
    step.profile(state, batch, progress=False)  # already complete
    (traced,) = ran
    assert "cosine" in traced.as_text() and "@jit_train_step " in traced.as_text()
    assert "@jit_train_step__dhelix" in step.lower(state, batch).as_text()
    assert not state.is_deleted()
    step(state, batch)
    assert state.is_deleted()


def test_shapes_and_keywords_are_not_traced(measurer: Measurer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "observe", lambda *_: pytest.fail("traced"))
    step = cpu_step(passes=[])
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    step.profile(shape, shape, pairs=False, progress=False)
    step.profile(jnp.zeros((64, 64)), batch=jnp.zeros((64, 64)), scale=2.0, pairs=False, progress=False)


# ---- the file


def test_the_file_is_that_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(storage.SEARCH_PATH, raising=False)
    assert storage.users_file("H200", "no-p2p") == storage.USERS_FOLDER.expanduser() / "h200-no-p2p.json"
    monkeypatch.setenv(storage.SEARCH_PATH, f"{tmp_path.parent}{os.pathsep}{tmp_path}")
    assert storage.users_file("H200", "nvlink") == tmp_path / "h200-nvlink.json"


def test_a_file_of_other_hardware_is_left_alone(measurer: Measurer, tmp_path: Path) -> None:
    out = tmp_path / "a100.json"
    storage.save(Profile("A100", "nvlink"), out)
    with pytest.raises(DhelixError, match="holds a profile of A100 with link nvlink, but this one is for H200"):
        cpu_step(passes=[]).profile(jnp.zeros((8, 8)), jnp.zeros((8, 8)), out=out, progress=False)
    assert storage.load(out) == Profile("A100", "nvlink") and not measurer.items


def test_other_versions_are_said(measurer: Measurer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage.save(Profile("H200", "nvlink", (Provenance("NVIDIA H200", 4, nccl="2.19.3"),)), tmp_path / "old.json")
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    profile = cpu_step(passes=[]).profile(shape, shape, out=tmp_path / "old.json", progress=False)
    assert [p.nccl for p in profile.measured_on] == ["2.19.3", "2.28.9"]
    assert "NCCL 2.19.3, not 2.28.9" in caplog.text
