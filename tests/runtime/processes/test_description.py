"""Properties of a process that must equal those of the others, and properties that may differ."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.framework.manager import PassManager
from dhelix.passes.ordering.strand_pairing import StrandPairing
from dhelix.passes.strands.strand_duplication import StrandDuplication
from dhelix.profiles.files import storage
from dhelix.runtime.processes import description


def described(options: dict[str, Any], **jit_options: Any) -> dict[str, Any]:
    jitted = jax.jit(lambda x: x, **jit_options)
    return {entry.what: entry.value for entry in description.before_tracing(True, options, jitted)}


def test_flags_that_change_what_is_compiled(tmp_path: Path) -> None:
    flags = "--xla_dump_to=/a --xla_gpu_kernel_cache_file=/b --xla_topology=t --xla_a=1 --xla_a=2 --xla_b"
    assert description.xla_flags(flags) == {"--xla_topology": "t", "--xla_a": "2", "--xla_b": "true"}
    assert description.xla_flags("") == {}
    (tmp_path / "flags").write_text("--xla_c=3\n--xla_d=4\n")
    assert description.xla_flags(str(tmp_path / "flags")) == {"--xla_c": "3", "--xla_d": "4"}


def test_files_that_flags_name_count_by_their_content(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "same", "other")]
    for path, text in zip(paths, ("times", "times", "other times"), strict=True):
        path.write_text(text)
    one, same, other = (description.xla_flags(f"--xla_gpu_pgle_profile={path}") for path in paths)
    assert one == same != other
    assert description.xla_flags("--xla_gpu_pgle_profile=/nowhere/x") == {"--xla_gpu_pgle_profile": "/nowhere/x"}


def test_options_are_shown_as_they_were_given() -> None:
    found = described({"schedule": "dp", "skew": 1, "strict": False, "plan": None, "disable": {"b", "a"}, "passes": ()})
    shown = {"schedule": "dp", "skew": "1", "strict": "false", "plan": "none", "disable": "a, b", "passes": "none"}
    assert shown.items() <= found.items()


def test_options_of_jit_and_of_xla() -> None:
    found = described({}, donate_argnums=0, compiler_options={"xla_cpu_enable_fast_math": True})
    assert found["compiler_options"] == {"xla_cpu_enable_fast_math": "true"}
    assert found["options of jax.jit"] != described({})["options of jax.jit"]


def test_options_of_xla_that_are_a_hosts_own() -> None:
    options = {"xla_dump_to": "/of/one/host", "xla_cpu_enable_fast_math": False}
    assert described({}, compiler_options=options)["compiler_options"] == {"xla_cpu_enable_fast_math": "false"}


def test_where_dhelix_is_off_only_what_splits_the_batch_counts() -> None:
    options = {"microbatches": 2, "reduce": "sum", "schedule": "dp"}
    record = description.before_tracing(False, options, jax.jit(lambda x: x))
    assert [(entry.what, entry.value) for entry in record] == [
        ("DHELIX", "off"), ("microbatches", "2"), ("reduce", "sum"),
    ]  # fmt: skip


def test_profiles_count_by_their_content() -> None:
    profile = storage.find("H200", "nvlink")
    assert profile is not None
    same, other = dataclasses.replace(profile), dataclasses.replace(profile, link="no-p2p")
    one, again, else_ = (described({"profile": p})["profile"] for p in (profile, same, other))
    assert one == again != else_ and one.startswith("H200 with link nvlink (")


def test_the_costs_that_were_found() -> None:
    model = CostModel.find("H200", "nvlink")
    manager = PassManager([StrandDuplication(), StrandPairing(model=model)])
    many = [jnp.ones((7, count)) for count in range(20)]
    lowered = jax.jit(lambda x, *, scale, many: x).lower(jnp.ones(3), scale=2.0, many=many)
    found = {entry.what: entry.value for entry in description.before_compiling(lowered, manager, 7, None)}
    arguments = found["arguments"]
    assert isinstance(arguments, dict) and list(arguments) == ["[0]", "many", "scale"]
    assert arguments["[0]"] == "float32[3]" and arguments["scale"] == "float32[]"
    assert arguments["many"].startswith("float32[7,0], float32[7,1], ") and len(arguments["many"]) < 100
    assert found["memory limit found"] == "7"
    assert str(found["costs found"]).startswith("H200 with link nvlink (")
    assert list(found["passes chosen"]) == ["1 strand-duplication", "2 strand-pairing"]
    assert [e.what for e in description.before_compiling(lowered, manager, 7, "nothing to do")] == ["what runs"]


def test_costs_that_stand_in_for_those_of_another_gpu() -> None:
    """A profile file lacks the times of another GPU that stand in for missing ones, so content is described."""
    profile = storage.find("H100", "nvlink")
    assert profile is not None and "alike" in str(profile.sections["default"])
    manager = PassManager([StrandPairing(model=CostModel(profile, "default"))])
    lowered = jax.jit(jnp.sin).lower(jnp.ones(3))
    found = {entry.what: entry.value for entry in description.before_compiling(lowered, manager, None, None)}
    assert str(found["costs found"]).startswith("H100 with link nvlink (")


def test_a_version_that_runs_beside_another_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = description.versions()["version of jax"]
    assert installed == jax.__version__
    monkeypatch.setattr(jax, "__version__", "0.12.9")
    assert description.versions()["version of jax"] == f"0.12.9, installed as {installed}"
