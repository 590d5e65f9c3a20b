"""The passes of a step depend on schedule, profile, plan and the GPUs that it is lowered for."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import CollectivesSection, OrderSection, Plan, PlanTarget
from dhelix.passes.strands.strand_skew import StrandSkew
from dhelix.profiles.files import storage
from dhelix.profiles.keys import CollectiveKey
from dhelix.profiles.profile import Profile, Section
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.processes.launch_settings import NO_GRAPHS
from dhelix.runtime.step import plain_step
from dhelix.runtime.step.options import SCHEDULES, StepOptions
from dhelix.runtime.step.pass_lists import LISTS, default_passes, planned_passes
from dhelix.runtime.step.step_passes import pass_manager
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.runtime.step.target import Target

SCATTER = CollectiveKey("reduce-scatter", 64 << 20, 4)
PLAN = Plan("a step", PlanTarget.of("H200", "nvlink", "connections1"), CollectivesSection(decomposed=(SCATTER,)))


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process with the default launch setting and without its own profiles."""
    monkeypatch.setenv("DHELIX_PROFILES", str(tmp_path))
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_CTA_POLICY", "NCCL_P2P_DISABLE", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)


def passes_of(lowered: jax.stages.Lowered | None = None, **options: Any) -> PassManager:
    """The passes of a step with these options, for a lowered program."""
    chosen = StepOptions(**options)
    return pass_manager(chosen, None if lowered is None else Target.of(lowered, chosen), lowered)


def post(passes: Any) -> Any:
    """The pass that orders: the last one that runs after XLA's scheduler."""
    return [p for p in passes if p.stage is Stage.POST_SCHEDULER][-1]


@pytest.fixture(scope="module")
def lowered() -> jax.stages.Lowered:
    """A program for H200s that need not exist."""
    sharding = NamedSharding(deviceless.mesh({"tp": 4}), P("tp"))
    return jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding))


def test_every_schedule_has_passes() -> None:
    assert LISTS.keys() == set(SCHEDULES)
    for schedule in SCHEDULES:
        names = [p.name for p in default_passes(StepOptions(schedule=schedule))]
        assert len(set(names)) == len(names)


def test_a_limit_reaches_the_pass_that_keeps_to_it() -> None:
    assert post(default_passes(StepOptions(memory_limit="1KiB"))).memory_limit == 1024
    assert post(default_passes(memory_limit=5)).memory_limit == 5
    assert post(planned_passes(PLAN, 5)).memory_limit == 5


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s != "xla"])
def test_how_many_collectives_are_in_flight_reaches_the_pass_that_orders(schedule: str) -> None:
    assert post(passes_of(schedule=schedule, max_in_flight=2).passes).max_in_flight == 2


@pytest.mark.parametrize("schedule", ["dp", "list", "xla"])
def test_strands_are_kept_apart_where_that_is_asked_for(schedule: str) -> None:
    def names(**options: Any) -> list[str]:
        return [p.name for p in passes_of(schedule=schedule, **options).passes]

    asked = names(skew=2)
    assert asked.index("strand-skew") < asked.index("strand-duplication") < asked.index("strand-ends")
    assert [n for n in asked if n not in ("strand-skew", "strand-ends")] == names()


def test_a_plan_brings_what_it_was_made_with() -> None:
    names = [p.name for p in planned_passes(PLAN)]
    assert names[-3:] == ["reduce-scatter-decomposition", "stream-assignment", "planned-order"]
    skewed = planned_passes(Plan("a step", order=OrderSection(skew=3)))
    assert [p.skew for p in skewed if isinstance(p, StrandSkew)] == [3]
    whole = Plan("a step")
    assert "reduce-scatter-decomposition" not in [p.name for p in planned_passes(whole)]


def test_a_plan_may_be_a_file(tmp_path: Path) -> None:
    plan_files.save(PLAN, tmp_path / "plan.json")
    step = strand_interleave(lambda x: x, plan=tmp_path / "plan.json")
    assert post(pass_manager(step.options).passes).plan == PLAN


@pytest.mark.deviceless
def test_costs_are_of_the_gpus_that_a_program_is_for(
    lowered: jax.stages.Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = post(passes_of(lowered).passes).model
    assert (model.profile.hardware, model.profile.link, model.setting) == ("H200", "nvlink", "default")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    model = post(passes_of(lowered).passes).model
    assert (model.profile.link, model.setting) == ("no-p2p", "connections1")
    roofline = post(passes_of(lowered, profile=None).passes)
    assert roofline.model is None and roofline.hardware.name == "H200-no-p2p"


def test_on_cpu_no_costs_are_looked_for(caplog: pytest.LogCaptureFixture) -> None:
    program = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    assert post(passes_of(program).passes).model is None
    assert not caplog.records


def test_on_cpu_it_is_said_that_a_plan_is_not_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    program = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    for _ in range(2):
        passes_of(program, plan=PLAN)
    (record,) = caplog.records
    assert "a plan orders operators only on GPUs" in record.getMessage()


def test_on_cpu_it_is_said_that_memory_is_not_limited(caplog: pytest.LogCaptureFixture) -> None:
    program = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    assert Target.of(program, StepOptions()) is None
    assert plain_step.memory_limit("step", StepOptions(), None) is None and not caplog.records
    assert [plain_step.memory_limit("step", StepOptions(memory_limit=1), None) for _ in range(2)] == [None, None]
    (record,) = caplog.records
    assert "because operators are ordered only on GPUs" in record.getMessage()


@pytest.mark.deviceless
def test_a_profile_of_another_link_is_said(lowered: jax.stages.Lowered, caplog: pytest.LogCaptureFixture) -> None:
    given = Profile("H200", "no-p2p").with_section(Section("default"))
    assert post(passes_of(lowered, profile=given).passes).model.profile == given
    (record,) = caplog.records
    assert "costs are for H200 with link no-p2p, not H200 with nvlink" in record.getMessage()
    passes_of(lowered, profile=Profile("H200", "two-nodes").with_section(Section("default")))
    assert len(caplog.records) == 1


@pytest.mark.deviceless
def test_a_broken_file_that_nobody_named_stops_no_job(
    lowered: jax.stages.Lowered, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "h200-nvlink.json").write_text("{")  # in DHELIX_PROFILES
    assert post(passes_of(lowered).passes).model is None
    (record,) = caplog.records
    assert "costs are estimated by a roofline" in record.getMessage() and "h200-nvlink.json" in record.getMessage()
    with pytest.raises(DhelixError, match=r"h200-nvlink\.json"):
        strand_interleave(lambda x: x, profile=tmp_path / "h200-nvlink.json")


@pytest.mark.deviceless
def test_what_rests_on_costs_can_be_switched_off(lowered: jax.stages.Lowered) -> None:
    """Also without known costs: at decoration, nothing is known of the GPUs."""
    for program in (None, lowered):
        manager_of = passes_of(program, disable=("all-gather-decomposition",))
        names = [p.name for p in manager_of.enabled]
        assert "reduce-scatter-decomposition" in names and "all-gather-decomposition" not in names


@pytest.mark.deviceless
def test_a_setting_without_profile_is_said_once(
    lowered: jax.stages.Lowered, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = Profile("H200", "nvlink").with_section(Section("connections1"))
    monkeypatch.setattr(storage, "find", lambda gpu, link: found)
    for _ in range(2):
        assert post(passes_of(lowered).passes).model is None
    (record,) = caplog.records
    for words in ("H200 with link nvlink: no times were measured with", "costs are a roofline's; run `dhelix profile`"):
        assert words in record.getMessage()


@pytest.mark.deviceless
def test_a_setting_that_nobody_measured_has_the_costs_of_the_nearest(
    lowered: jax.stages.Lowered, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("NCCL_MIN_NCHANNELS", "4")
    assert post(passes_of(lowered).passes).model.setting == "connections1"
    (record,) = caplog.records
    assert "costs are those of the launch setting 'connections1'" in record.getMessage()


@pytest.mark.deviceless
def test_a_profile_that_was_asked_for_must_know_the_setting(lowered: jax.stages.Lowered) -> None:
    given = Profile("H200", "nvlink").with_section(Section("connections1"))
    with pytest.raises(DhelixError, match="no measurements under launch setting 'default'"):
        passes_of(lowered, profile=given)


@pytest.mark.deviceless
def test_a_plan_for_another_process_is_said_once(
    lowered: jax.stages.Lowered, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    for _ in range(2):
        passes_of(lowered, plan=PLAN)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2
    assert "start it with CUDA_DEVICE_MAX_CONNECTIONS=1" in said[0]
    assert "the plan is for H200 with link nvlink, not H200 with no-p2p" in said[1]


def test_collective_matmuls_come_first_and_their_guard_in_any_case(lowered: jax.stages.Lowered) -> None:
    asked = [one.name for one in passes_of(lowered, collective_matmul="ring").passes]
    assert asked[:3] == ["collective-canonicalization", "collective-matmul", "exclusive-kernels"]
    usual = [one.name for one in passes_of(lowered).passes]
    assert usual == asked[2:]


@pytest.mark.deviceless
def test_why_there_can_be_no_collective_matmul_is_said_once(
    lowered: jax.stages.Lowered, caplog: pytest.LogCaptureFixture
) -> None:
    """Reasons: CUDA graphs, unmeasured CPUs, no GPUs. A form that was asked for needs no reason on GPUs."""
    sharding = NamedSharding(jax.make_mesh((4,), ("tp",)), P("tp"))
    on_cpus = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding))
    for _ in range(2):
        passes_of(lowered, collective_matmul="auto", compiler_options=dict(NO_GRAPHS))
        passes_of(lowered, collective_matmul="ring")
        assert not caplog.records
    for _ in range(2):
        passes_of(lowered, collective_matmul="auto")
        passes_of(on_cpus, collective_matmul="auto")
        passes_of(on_cpus, collective_matmul="ring")
    in_graphs, unknown, asked = [record.getMessage() for record in caplog.records]
    assert "no kernels, because the program's custom calls become part of CUDA graphs" in in_graphs
    assert "nothing was measured on cpu, so collectives next to matrix products stay" in unknown
    assert "only on GPUs does a pass look for their places" in asked


def test_a_form_that_does_not_exist_is_refused_before_there_is_a_program() -> None:
    with pytest.raises(DhelixError, match="rings"):
        passes_of(collective_matmul="rings")
    with pytest.raises(DhelixError, match='3 is not a form of collective matmuls: use "auto"'):
        passes_of(collective_matmul=3)
    with pytest.raises(DhelixError, match="collective_matmul= has no effect"):
        StepOptions(collective_matmul="ring", passes=())
