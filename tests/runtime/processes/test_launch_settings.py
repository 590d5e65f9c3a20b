"""The launch setting of a process, compared with the setting of a plan."""

import pytest

from dhelix.passes.plans.plan import PlanTarget
from dhelix.profiles.profile import SETTINGS
from dhelix.runtime.processes.launch_settings import (
    NO_GRAPHS,
    calls_outside_graphs,
    difference,
    graphs_hold_calls,
    nearest,
    without_graphs,
)


def target(setting: str) -> PlanTarget:
    return PlanTarget.of("H200", "nvlink", setting)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_process_that_was_started_as_the_plan_says_is_told_nothing(setting: str) -> None:
    known = SETTINGS[setting]
    environment = {**known.environment, "XLA_FLAGS": " ".join(known.xla_flags)}
    assert difference(target(setting), environment) is None


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_nearest_of_all_settings_is_the_process_own(setting: str) -> None:
    known = SETTINGS[setting]
    assert nearest(SETTINGS, {**known.environment, "XLA_FLAGS": " ".join(known.xla_flags)}) == (setting, "")


@pytest.mark.parametrize(
    ("measured", "environment", "name"),
    [
        (("default", "connections1"), {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_BUFFSIZE": "65536"}, "connections1"),
        (("default", "connections1"), {"CUDA_DEVICE_MAX_CONNECTIONS": "4"}, "default"),
        (("connections1",), {}, None),
    ],
)
def test_another_setting_has_the_nearest_and_is_told_so(
    measured: tuple[str, ...], environment: dict[str, str], name: str | None
) -> None:
    found, line = nearest(measured, environment)
    assert found == name and "no times were measured with" in line and "\n" not in line


def test_one_line_says_what_to_set() -> None:
    said = difference(target("connections1"), {"XLA_FLAGS": "--xla_dump_to=x --xla_gpu_graph_min_graph_size=1"})
    assert said is not None and "\n" not in said
    assert "this process was started with --xla_gpu_graph_min_graph_size=1" in said
    command = "CUDA_DEVICE_MAX_CONNECTIONS=1 XLA_FLAGS='--xla_dump_to=x'"
    assert f"start it with {command} without xla_gpu_graph_min_graph_size" in said


def test_settings_that_the_plan_does_not_want_are_named() -> None:
    said = difference(target("default"), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert said is not None and "without CUDA_DEVICE_MAX_CONNECTIONS" in said


def test_options_of_the_step_count_as_flags() -> None:
    """Options of the step may replace XLA's flags, but not the variables of NCCL and CUDA."""
    options = {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True, "xla_gpu_enable_command_buffer": ""}
    assert difference(target("copy-engine"), {"NCCL_CTA_POLICY": "2"}, options) is None
    assert difference(target("copy-engine"), {}, options) is not None


@pytest.mark.parametrize(
    ("flags", "options", "held"),
    [
        ("", {}, True),
        ("--xla_gpu_enable_command_buffer=", {}, False),
        ("--xla_gpu_enable_command_buffer=FUSION,CUBLAS", {}, False),
        ("--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL", {}, True),
        ("--xla_gpu_enable_command_buffer=+CUSTOM_CALL", {}, True),
        ("--xla_gpu_enable_command_buffer=", {"xla_gpu_enable_command_buffer": "CUSTOM_CALL"}, True),
        ("", dict(NO_GRAPHS), False),
        ("--xla_gpu_enable_command_buffer=fusion,custom_call", {}, True),
        ("--xla_gpu_enable_command_buffer=+WHILE", {}, True),
        ("--xla_gpu_enable_command_buffer=-FUSION", {}, True),
        # fusions that slice a call's operands may hold the call
        ("--xla_gpu_enable_command_buffer=-CUSTOM_CALL", {}, True),
        ("--xla_gpu_enable_command_buffer=-CUSTOM_CALL,-DYNAMIC_SLICE_FUSION,-CONDITIONAL", {}, False),
    ],
)
def test_whether_custom_calls_become_part_of_graphs(flags: str, options: dict[str, str], held: bool) -> None:
    assert graphs_hold_calls({"XLA_FLAGS": flags}, options) is held


@pytest.mark.parametrize(
    ("flag", "kinds"),
    [
        (None, "CUBLAS,CUBLASLT,CUDNN,FUSION"),
        ("", ""),
        ("FUSION,CUSTOM_CALL", "FUSION"),
        ("-cublas,+WHILE", "CUBLASLT,CUDNN,FUSION"),
    ],
)
def test_graphs_of_what_a_process_has_them_of_but_calls(flag: str | None, kinds: str) -> None:
    environment = {} if flag is None else {"XLA_FLAGS": f"--xla_gpu_enable_command_buffer={flag}"}
    options = calls_outside_graphs(environment)
    assert options == {"xla_gpu_enable_command_buffer": kinds} and not graphs_hold_calls(environment, options)


def test_a_process_without_graphs_keeps_its_other_flags() -> None:
    environment = {"XLA_FLAGS": "--xla_dump_to=x"}
    without_graphs(environment)
    assert environment["XLA_FLAGS"].split()[0] == "--xla_dump_to=x" and not graphs_hold_calls(environment)
