"""Costs of collectives with settings, and the order that follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dhelix.passes.evaluation.costs import CostModel, Costs
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.ordering.strand_pairing import StrandPairing
from dhelix.passes.plans.plan import PlanError, PlanTarget
from dhelix.passes.plans.tuned_collectives import identities
from dhelix.passes.plans.tuned_costs import tuned_model
from dhelix.passes.tuning.collective_settings import CollectiveSettings, TunedCollective
from dhelix.profiles.channels.nccl_setting import NcclSetting
from dhelix.profiles.keys import CollectiveKey
from dhelix.profiles.profile import Profile, Section
from dhelix.tests.passes.two_strands import TOGETHER

MODEL = CostModel(Profile("H200", "nvlink").with_section(Section("connections1")), "connections1")
TARGET = PlanTarget.of("H200", "nvlink", "connections1")
FEW = NcclSetting("ring", "simple", 2)

# Two strands that are alike: a gather, then a product.
EQUAL = (
    TOGETHER.partition("ENTRY")[0]
    + """ENTRY e {
  p = bf16[2048,4096] parameter(0)
  q = bf16[2048,4096] parameter(1)
  w = bf16[4096,4096] parameter(2)
  start = ((bf16[2048,4096]), bf16[8192,4096]) async-start(p), calls=gather
  done = bf16[8192,4096] async-done(start)
  forward = bf16[8192,4096] dot(done, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  start2 = ((bf16[2048,4096]), bf16[8192,4096]) async-start(q), calls=other
  done2 = bf16[8192,4096] async-done(start2)
  backward = bf16[8192,4096] dot(done2, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT result = (bf16[8192,4096], bf16[8192,4096]) tuple(forward, backward)
}"""
)


def section(module: HloModule, *times: tuple[float, float], slows: float = 1.0) -> CollectiveSettings:
    """Settings of the first collectives, with times under NCCL's defaults and under the settings."""
    names = identities(module, TARGET).values()
    rows = (
        TunedCollective(*name, replace(FEW, channels=channels), us=tuned, default_us=default, slows=slows)
        for channels, (name, (default, tuned)) in enumerate(zip(names, times, strict=False), FEW.channels)
    )
    return CollectiveSettings("2.28", 4, tuple(rows), 1000.0, 900.0)


def named(module: HloModule, name: str) -> Instruction:
    return next(i for i in module.entry.instructions if i.name == name)


def seconds(model: CostModel, module: HloModule, name: str = "start") -> float:
    return model.costs()[named(module, name)].seconds


def test_a_setting_changes_the_time_of_its_collective_alone() -> None:
    module = HloModule.from_text(TOGETHER)
    model = tuned_model(MODEL, section(module, (100.0, 300.0)))
    assert seconds(model, module) == pytest.approx(3.0 * seconds(MODEL, module))
    for other in ("start2", "x"):
        assert seconds(model, module, other) == seconds(MODEL, module, other)
    key = model.costs().key(named(module, "start"))
    assert isinstance(key, CollectiveKey) and key.configuration == FEW
    assert model.profile.digest != MODEL.profile.digest


def test_what_a_collective_does_to_computation_is_part_of_the_costs() -> None:
    module = HloModule.from_text(TOGETHER)

    def rate(costs: Costs) -> float:
        return costs.rates(named(module, "x"), named(module, "start"), True)[0]

    plain = rate(MODEL.costs())
    assert plain < 1.0
    for slows in (0.0, 0.5, 1.0, 2.0):
        costs = tuned_model(MODEL, section(module, (100.0, 300.0), slows=slows)).costs()
        for one in (costs, costs.at_clock(1.1), costs.with_kernels({})):
            assert 1.0 / rate(one) - 1.0 == pytest.approx(slows * (1.0 / plain - 1.0))


def test_without_times_costs_are_those_of_the_profile() -> None:
    module = HloModule.from_text(TOGETHER)
    rows = tuple(replace(one, us=0.0, default_us=0.0) for one in section(module, (1.0, 2.0)).collectives)
    nothing = CollectiveSettings("2.28", 4, rows)
    assert tuned_model(MODEL, nothing) is MODEL and tuned_model(MODEL, None) is MODEL


@pytest.mark.parametrize(("one", "two", "first"), [(25.0, 100.0, "start"), (100.0, 25.0, "start2")])
def test_a_step_is_ordered_for_the_collectives_as_they_were_tuned(one: float, two: float, first: str) -> None:
    """The shorter gather comes first, so that its product hides the longer one."""
    module = HloModule.from_text(EQUAL)
    model = tuned_model(MODEL, section(module, (100.0, one), (100.0, two)))
    StrandPairing(model=model, memory_slack=1.0).run(module, PassContext())
    assert next(i.name for i in module.schedule[module.entry] if i.opcode == "async-start") == first


def test_settings_of_something_else_are_an_error() -> None:
    module = HloModule.from_text(TOGETHER)
    found = section(module, (1.0, 2.0))
    rows = (replace(found.collectives[0], key="copy contiguous 16777216"),)
    with pytest.raises(PlanError, match="is no collective"):
        tuned_model(MODEL, replace(found, collectives=rows))
