"""Which passes a step goes through: by schedule, profile, plan and the GPUs that it is lowered for."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError
from dhelix.passes.framework import manager
from dhelix.passes.framework.manager import Stage
from dhelix.passes.plans import pairing_plan_json
from dhelix.passes.plans.pairing_plan import PairingPlan, PlanTarget
from dhelix.passes.strands.strand_skew import StrandSkew
from dhelix.profiles.files import storage
from dhelix.profiles.keys import CollectiveKey
from dhelix.profiles.profile import Profile, Section
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.processes.launch_settings import NO_GRAPHS
from dhelix.runtime.step.schedules import (
    SCHEDULES,
    SKEWED,
    Choice,
    collective_matmul_of,
    default_passes,
    planned_passes,
)

SCATTER = CollectiveKey("reduce-scatter", 64 << 20, 4)
PLAN = PairingPlan("a step", PlanTarget.of("H200", "nvlink", "connections1", decomposed=(SCATTER,)), ())


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process of the usual setting without profiles of its own, in which nothing was said before."""
    monkeypatch.setattr(manager, "_said", set())
    monkeypatch.setenv("DHELIX_PROFILES", str(tmp_path))
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_CTA_POLICY", "NCCL_P2P_DISABLE", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)


def choice(**options: Any) -> Choice:
    given = {"schedule": "dp", "profile": "auto", "plan": None, "memory_limit": None}
    return Choice.of(**{**given, "max_in_flight": None, "passes": None, **options})


def post(passes: Any) -> Any:
    """What orders; the guard of kernels that wait for their peers is there in any case."""
    (one,) = (p for p in passes if p.stage is Stage.POST_SCHEDULER and p.name != "exclusive-kernels")
    return one


@pytest.fixture(scope="module")
def lowered() -> jax.stages.Lowered:
    """A program for H200s that need not exist."""
    sharding = NamedSharding(deviceless.mesh({"tp": 4}), P("tp"))
    return jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_passes(schedule: str) -> None:
    names = [p.name for p in default_passes(schedule)]
    assert len(set(names)) == len(names)


def test_a_limit_reaches_the_pass_that_keeps_to_it() -> None:
    assert post(default_passes("dp", memory_limit=5)).memory_limit == 5
    assert post(planned_passes(PLAN, 5)).memory_limit == 5


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s != "xla"])
def test_how_many_collectives_are_in_flight_reaches_the_pass_that_orders(schedule: str) -> None:
    assert post(choice(schedule=schedule, max_in_flight=2).manager().passes).max_in_flight == 2


@pytest.mark.parametrize("schedule", SKEWED)
def test_strands_are_kept_apart_where_that_is_asked_for(schedule: str) -> None:
    def names(**options: int) -> list[str]:
        return [p.name for p in choice(schedule=schedule, **options).manager().passes]

    asked = names(skew=2)
    assert asked.index("strand-skew") < asked.index("strand-duplication") < asked.index("strand-ends")
    assert [n for n in asked if n not in ("strand-skew", "strand-ends")] == names()


def test_a_plan_brings_what_it_was_made_with() -> None:
    names = [p.name for p in planned_passes(PLAN)]
    assert names[-2:] == ["reduce-scatter-decomposition", "planned-order"]
    skewed = planned_passes(PairingPlan("a step", PlanTarget(skew=3), ()))
    assert [p.layers for p in skewed if isinstance(p, StrandSkew)] == [3]
    whole = PairingPlan("a step", PlanTarget(), ())
    assert "reduce-scatter-decomposition" not in [p.name for p in planned_passes(whole)]


def test_a_plan_may_be_a_file(tmp_path: Path) -> None:
    pairing_plan_json.save(PLAN, tmp_path / "plan.json")
    assert post(choice(plan=tmp_path / "plan.json").manager().passes).plan == PLAN


@pytest.mark.deviceless
def test_costs_are_of_the_gpus_that_a_program_is_for(
    lowered: jax.stages.Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = post(choice().manager(lowered).passes).model
    assert (model.profile.hardware, model.profile.link, model.setting) == ("H200", "nvlink", "default")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    model = post(choice().manager(lowered).passes).model
    assert (model.profile.link, model.setting) == ("no-p2p", "connections1")
    roofline = post(choice(profile=None).manager(lowered).passes)
    assert roofline.model is None and roofline.hardware.name == "H200-no-p2p"


def test_on_cpu_no_costs_are_looked_for(caplog: pytest.LogCaptureFixture) -> None:
    program = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    assert post(choice().manager(program).passes).model is None
    assert not caplog.records


def test_on_cpu_it_is_said_that_a_plan_is_not_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    program = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    for _ in range(2):
        choice(plan=PLAN).manager(program)
    (record,) = caplog.records
    assert "a plan orders what GPUs run" in record.getMessage()


def test_on_cpu_it_is_said_that_memory_is_not_limited(caplog: pytest.LogCaptureFixture) -> None:
    program = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    assert choice().plain_step(program, b"") is None
    assert choice().limited(program, None).memory_limit is None and not caplog.records
    assert [choice(memory_limit=1).limited(program, None).memory_limit for _ in range(2)] == [None, None]
    (record,) = caplog.records
    assert "orders are made for GPUs: here it limits nothing" in record.getMessage()


@pytest.mark.deviceless
def test_a_profile_of_another_link_is_said(lowered: jax.stages.Lowered, caplog: pytest.LogCaptureFixture) -> None:
    given = Profile("H200", "no-p2p").with_section(Section("default"))
    assert post(choice(profile=given).manager(lowered).passes).model.profile == given
    (record,) = caplog.records
    assert "costs are those of H200 with link no-p2p, not H200 with nvlink" in record.getMessage()
    choice(profile=Profile("H200", "two-nodes").with_section(Section("default"))).manager(lowered)
    assert len(caplog.records) == 1


@pytest.mark.deviceless
def test_a_broken_file_that_nobody_named_stops_no_job(
    lowered: jax.stages.Lowered, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "h200-nvlink.json").write_text("{")  # in DHELIX_PROFILES
    assert post(choice().manager(lowered).passes).model is None
    (record,) = caplog.records
    assert "costs are a roofline's" in record.getMessage() and "h200-nvlink.json" in record.getMessage()
    with pytest.raises(DhelixError, match=r"h200-nvlink\.json"):
        choice(profile=tmp_path / "h200-nvlink.json")


@pytest.mark.deviceless
def test_what_rests_on_costs_can_be_switched_off(lowered: jax.stages.Lowered) -> None:
    """Also where there are no costs: at decoration, nothing is known of the GPUs."""
    off = choice(disable=("all-gather-decomposition",))
    for manager_of in (off.manager(), off.manager(lowered)):
        names = [p.name for p in manager_of.enabled]
        assert "reduce-scatter-decomposition" in names and "all-gather-decomposition" not in names


@pytest.mark.deviceless
def test_a_setting_without_profile_is_said_once(
    lowered: jax.stages.Lowered, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = Profile("H200", "nvlink").with_section(Section("connections1"))
    monkeypatch.setattr(storage, "find", lambda gpu, link: found)
    for _ in range(2):
        assert post(choice().manager(lowered).passes).model is None
    (record,) = caplog.records
    for words in ("H200 with link nvlink: no times of a process", "costs are a roofline's; run `dhelix profile`"):
        assert words in record.getMessage()


@pytest.mark.deviceless
def test_a_setting_that_nobody_measured_has_the_costs_of_the_nearest(
    lowered: jax.stages.Lowered, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("NCCL_MIN_NCHANNELS", "4")
    assert post(choice().manager(lowered).passes).model.setting == "connections1"
    (record,) = caplog.records
    assert "costs are those of the launch setting 'connections1'" in record.getMessage()


@pytest.mark.deviceless
def test_a_profile_that_was_asked_for_must_know_the_setting(lowered: jax.stages.Lowered) -> None:
    given = Profile("H200", "nvlink").with_section(Section("connections1"))
    with pytest.raises(DhelixError, match="nothing under the launch setting 'default'"):
        choice(profile=given).manager(lowered)


@pytest.mark.deviceless
def test_a_plan_for_another_process_is_said_once(
    lowered: jax.stages.Lowered, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    for _ in range(2):
        choice(plan=PLAN).manager(lowered)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2
    assert "start it with CUDA_DEVICE_MAX_CONNECTIONS=1" in said[0]
    assert "the plan is for H200 with link nvlink, not H200 with no-p2p" in said[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "fast"}, "schedule='fast' means nothing; take one of dp, list"),
        ({"memory_limit": -1}, "memory_limit=-1"),
        ({"memory_limit": "3GiB"}, "memory_limit='3GiB'"),
        ({"plan": "no-such-file.json"}, "cannot be read"),
        ({"profile": "no-such-file.json"}, "cannot be read"),
        ({"passes": 3}, "passes=3: give a list of passes"),
        ({"passes": ["strand-pairing"]}, "give a list of passes"),
        ({"disable": 3}, "disable=3: give names of passes"),
        ({"disable": [object]}, "give names of passes"),
        ({"plan": PLAN, "passes": []}, "leave out one"),
        ({"passes": [], "memory_limit": 5}, "give it to a pass"),
        ({"schedule": "xla", "memory_limit": 5}, "take another schedule"),
        ({"max_in_flight": 0}, "max_in_flight=0: give how many collectives"),
        ({"schedule": "xla", "max_in_flight": 1}, "take another schedule"),
        ({"passes": [], "max_in_flight": 1}, "give it to a pass"),
        ({"plan": PLAN, "max_in_flight": 1}, "plan with --max_in_flight"),
        ({"skew": -1}, "skew=-1: give how many layers"),
        ({"schedule": "forward_forward", "skew": 1}, "keeps no strands apart"),
        ({"passes": [], "skew": 1}, "add StrandSkew and StrandEnds"),
        ({"plan": PLAN, "skew": 1}, "plan with --skew"),
        ({"pipelined": True, "skew": 1}, "by its own schedule"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DhelixError, match=said):
        choice(**options)


def test_collective_matmuls_come_first_and_their_guard_in_any_case(lowered: jax.stages.Lowered) -> None:
    asked = [one.name for one in choice(collective_matmul="ring").manager(lowered).passes]
    assert asked[:3] == ["collective-canonicalization", "collective-matmul", "exclusive-kernels"]
    usual = [one.name for one in choice().manager(lowered).passes]
    assert usual == asked[2:]


@pytest.mark.deviceless
def test_why_there_can_be_no_collective_matmul_is_said_once(
    lowered: jax.stages.Lowered, caplog: pytest.LogCaptureFixture
) -> None:
    """On GPUs that nothing is known of, on CPUs, and in CUDA graphs; a form that was asked for is no matter on GPUs."""
    sharding = NamedSharding(jax.make_mesh((4,), ("tp",)), P("tp"))
    on_cpus = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding))
    for _ in range(2):
        choice(collective_matmul="auto", compiler_options=dict(NO_GRAPHS)).manager(lowered)
        choice(collective_matmul="ring").manager(lowered)
        assert not caplog.records
    for _ in range(2):
        choice(collective_matmul="auto").manager(lowered)
        choice(collective_matmul="auto").manager(on_cpus)
        choice(collective_matmul="ring").manager(on_cpus)
    in_graphs, unknown, asked = [record.getMessage() for record in caplog.records]
    assert "no kernels, since the program's custom calls become part of CUDA graphs" in in_graphs
    assert "nothing was measured on cpu, so collectives beside products stay" in unknown
    assert "only on GPUs does a pass look for their places" in asked


def test_a_form_that_does_not_exist_is_refused_before_there_is_a_program() -> None:
    with pytest.raises(DhelixError, match="rings"):
        choice(collective_matmul="rings").manager()
    with pytest.raises(DhelixError, match='3 is no form of collective matmuls: take "auto"'):
        choice(collective_matmul=3).manager()
    with pytest.raises(DhelixError, match="collective_matmul= has no effect"):
        choice(collective_matmul="ring", passes=())


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({}, "off"),
        ({"schedule": "intra_batch"}, "auto"),
        ({"schedule": "intra_batch", "asked": "off"}, "off"),
        ({"schedule": "intra_batch", "asked": "ring"}, "ring"),
        ({"asked": "auto"}, "auto"),
        ({"schedule": "intra_batch", "plan": PLAN}, "off"),
        ({"schedule": "intra_batch", "passes": ()}, "off"),
    ],
    ids=str,
)
def test_intra_batch_comes_with_collective_matmuls(options: dict[str, Any], form: str) -> None:
    """Unless the user says otherwise, or a plan or passes run in place of the schedule."""
    assert collective_matmul_of(**{"asked": None, "schedule": "dp", "plan": None, "passes": None, **options}) == form
