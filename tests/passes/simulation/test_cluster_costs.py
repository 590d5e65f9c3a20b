"""Costs on a described cluster, and what a simulation says of a step."""

import pytest

from dhelix.errors import DhelixError
from dhelix.passes.evaluation.step_parts import step_parts
from dhelix.passes.hlo import HloModule
from dhelix.passes.simulation import systems
from dhelix.passes.simulation.cluster_costs import ClusterCosts, Spread
from dhelix.passes.simulation.simulated_step import SimulatedStep, Work
from dhelix.profiles.clusters import known
from dhelix.profiles.files import storage
from dhelix.tests.passes.schedules import PERMUTING_LOOP
from dhelix.tests.passes.two_strands import PRODUCTS

LOOP = f"""HloModule m, is_scheduled=true
{PERMUTING_LOOP}
ENTRY e {{
  i = s32[] constant(0)
  v = f32[2] parameter(0)
  t = (s32[], f32[2]) tuple(i, v)
  ROOT w = (s32[], f32[2]) while(t), condition=condition, body=body, backend_config={{"known_trip_count":{{"n":"5"}}}}
}}"""


def test_clusters_without_a_profile_have_guesses_only() -> None:
    parts = step_parts(HloModule.from_text(PRODUCTS), ClusterCosts.of(known.find("dhelix-a40")).costs())
    assert parts.guessed == 1.0 and parts.seconds > 0.0


def test_slow_gpus_and_links_lengthen_their_own_parts() -> None:
    module = HloModule.from_text(PRODUCTS)
    cluster = known.find("dhelix-a40")

    def parts(spread: Spread) -> tuple[float, float]:
        found = step_parts(module, ClusterCosts.of(cluster, spread=spread).costs())
        return found.compute, found.sent

    compute, sent = parts(Spread())
    assert parts(Spread(compute=1.5)) == (pytest.approx(1.5 * compute), pytest.approx(sent))
    assert parts(Spread(communication=2.0)) == (pytest.approx(compute), pytest.approx(2.0 * sent))


def test_loops_are_not_lengthened_twice() -> None:
    module = HloModule.from_text(LOOP)
    cluster = known.find("dhelix-a40")
    equal, slow = (ClusterCosts.of(cluster, spread=spread).costs() for spread in (Spread(), Spread(2.0, 2.0)))
    loop = module.entry.root
    assert slow[loop].seconds == pytest.approx(2.0 * equal[loop].seconds)


def test_bad_values_are_errors() -> None:
    with pytest.raises(DhelixError, match="the slowest compute takes 0.5 times as long; give a factor of at least 1"):
        Spread(compute=0.5)
    profile = storage.find("H200", "nvlink")
    with pytest.raises(DhelixError, match="the profile is of H200, but h100-infiniband has H100; give a profile of"):
        ClusterCosts.of(known.find("h100-infiniband"), profile=profile)
    with pytest.raises(DhelixError, match="system 'megatorn' is unknown; choose from blocking, megatron"):
        systems.chosen(["megatorn"])


def test_numbers_of_a_step() -> None:
    model = ClusterCosts.of(known.find("dhelix-a40"))
    parts = systems.blocking(step_parts(HloModule.from_text(PRODUCTS), model.costs()), peers=0.0)
    assert parts.exposed == parts.sent and not parts.slow_down
    work = Work(tokens=1000, flops=8e12 * parts.seconds, gpus=8, peak=4e12)
    step = SimulatedStep("blocking", parts, memory=50, work=work, limit=40.0)
    assert step.mfu == pytest.approx(0.25) and step.hidden == 0.0 and step.missing == 10.0
    assert step.tokens_per_second == pytest.approx(125 / parts.seconds)
