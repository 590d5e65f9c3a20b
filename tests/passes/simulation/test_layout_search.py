"""The search finds nearly the best of all choices with few simulations, the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from zlib import crc32

import pytest

from dhelix.errors import DhelixError
from dhelix.passes.framework.gain import StepParts
from dhelix.passes.sharding.collective_times import Links, LinkTimes
from dhelix.passes.sharding.overlap import Overlap
from dhelix.passes.sharding.sizes import decoder
from dhelix.passes.sharding.step_times import Compute
from dhelix.passes.simulation.choices import Choice, ModelShape, Space, choices
from dhelix.passes.simulation.estimates import Estimator
from dhelix.passes.simulation.layout_search import Found, search
from dhelix.passes.simulation.simulated_step import SimulatedStep, Work
from dhelix.profiles import hardware

GB = 1e9
SIZES = decoder(
    "8b", layers=32, hidden=4096, vocabulary=128_256, attention=42_000_000, feed_forward=176_000_000,
    score_width=4096, sequence=8192,
)  # fmt: skip
SHAPE = ModelShape(SIZES, 8192, 32, 8, 1024)
EXPERTS = replace(SHAPE, experts=16, routed=2.5, expert_parameters=1_250_000_000)
H100 = replace(hardware.H100, intra_bandwidth=330e9, inter_bandwidth=45e9, gpus_per_node=8)
ESTIMATOR = Estimator(SHAPE, Compute(600e12, 2.6e12), H100, LinkTimes(Links(330e9, 360e9)), Overlap())


def found_in(space: Space, shape: ModelShape = SHAPE) -> list[Choice]:
    return choices(shape, space)[0]


def step(choice: Choice, seconds: float, memory: float) -> SimulatedStep:
    parts = StepParts(seconds, 0.0, 0.0, 0.0, 0.0, 0.0, flops=1.0, memory=0, guessed=0.0, guessed_overlap=0.0, costs="")
    return SimulatedStep(choice.system, parts, int(memory), Work(1, 1.0, 1, 1.0), 80 * GB)


def truth(choice: Choice) -> SimulatedStep:
    """A step that differs from its estimate by what its traits and their pairs cost, and by noise."""
    estimate, traits = ESTIMATOR(choice), choice.traits()
    off = sum(_noise(f"{name}={value}") for name, value in traits.items())
    pairs = _noise(f"{traits['tp']} {traits['micro-batch']}") + _noise(f"{traits['schedule']} {traits['pp']}")
    factor = math.exp(0.25 * off + 0.05 * pairs + 0.01 * _noise(str(choice)))
    return step(choice, factor * estimate.seconds, estimate.memory * math.exp(0.1 * off))


def _noise(text: str) -> float:
    """A number between -1 and 1 that follows from the text."""
    return crc32(text.encode()) / 2**31 - 1.0


def simulate_all(chosen: Sequence[Choice]) -> list[SimulatedStep | str]:
    return [truth(choice) for choice in chosen]


def found_by(all_choices: Sequence[Choice], simulations: int = 40) -> Found:
    return search(all_choices, ESTIMATOR, simulate_all, 80 * GB, simulations)


@pytest.mark.parametrize("batch", [128, 256, 512])
def test_the_best_is_within_two_percent_of_all(batch: int) -> None:
    every = found_in(Space(64, 8, batch))
    best = min(one.seconds for one in map(truth, every) if not one.missing)
    found = found_by(every)
    assert len(every) > 1500 and len(found.ranked) + len(found.others) <= 41
    assert found.ranked[0].seconds <= 1.02 * best


def test_a_search_does_not_depend_on_anything_but_the_choices() -> None:
    every = found_in(Space(16, 8, 64))
    assert found_by(every) == found_by(every)


def test_each_value_says_why_it_loses() -> None:
    found = found_by(found_in(Space(16, 8, 64)), 60)
    for trait, values in found.reasons.items():
        assert sum(lost.behind == 0.0 for lost in values.values()) == 1, trait
        assert all(lost.behind >= 0.0 for lost in values.values() if lost.simulated)
    assert set(found.reasons["tp"]) == {"1", "2", "4", "8"}


def test_nothing_fits() -> None:
    def too_large(chosen: Sequence[Choice]) -> list[SimulatedStep | str]:
        return [step(choice, 1.0, 100 * GB) for choice in chosen]

    with pytest.raises(DhelixError, match=r"nothing fits into 80.0 GB: .* needs 100.0 GB, 20.0 GB too much"):
        search(found_in(Space(8, 8, 16)), ESTIMATOR, too_large, 80 * GB, 8)


def test_what_cannot_run_is_left_out() -> None:
    def refuses_pipelines(chosen: Sequence[Choice]) -> list[SimulatedStep | str]:
        return ["no pipelines here" if choice.pp > 1 else truth(choice) for choice in chosen]

    found = search(found_in(Space(16, 8, 64)), ESTIMATOR, refuses_pipelines, 80 * GB, 40)
    assert all(one.choice.pp == 1 for one in found.ranked)
    assert found.reasons["pp"]["2"].why in ("no pipelines here", "expected")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda space: replace(space, fixed={"tp": 16}), "tp does not divide 8 key-value heads"),
        (lambda space: replace(space, batch=1, fixed={"dp": 2}), "the given sizes do not fill the GPUs"),
        (lambda space: replace(space, fixed={"pp": 4, "tp": 8}), "the given sizes need 32 GPUs"),
        (lambda space: replace(space, gpus=3, fixed={"tp": 2}), "the given sizes do not fill the GPUs"),
    ],
)
def test_no_choice_is_left(change: Callable[[Space], Space], reason: str) -> None:
    with pytest.raises(DhelixError, match=rf"no way to run 8b with .*{reason}"):
        choices(SHAPE, change(Space(16, 8, 64)))


def test_choices_fill_the_gpus_and_the_batch() -> None:
    for choice in found_in(Space(64, 8, 256), EXPERTS):
        assert choice.pp * choice.dp * choice.ep * choice.cp * choice.tp == 64
        assert choice.dp * choice.ep * choice.sequences * choice.microbatches == 256
        assert EXPERTS.experts % choice.ep == 0


def test_what_is_given_is_fixed() -> None:
    space = Space(64, 8, 256, ("strands",), {"tp": 4, "remat": "full", "states": "zero1", "microbatches": 8})
    for choice in found_in(space):
        assert (choice.tp, choice.remat, choice.states, choice.microbatches) == (4, "full", "zero1", 8)
        assert choice.system == "strands"


def test_estimates_follow_the_sizes() -> None:
    """More stages keep more activations, sharded states need less memory, and remat trades memory for compute."""
    base = Choice(1, 8, 1, 1, 8, 1, 32, "none", "whole", "", "xla")
    zero, remat = (ESTIMATOR(replace(base, **change)) for change in ({"states": "zero1"}, {"remat": "full"}))
    plain, pipelined = ESTIMATOR(base), ESTIMATOR(replace(base, pp=2, dp=4, microbatches=64, pipeline="1f1b"))
    assert zero.memory < plain.memory and remat.memory < plain.memory
    assert remat.parts["compute"] == pytest.approx(4 / 3 * plain.parts["compute"], rel=0.1)
    assert plain.parts["pipeline"] == 0.0 < pipelined.parts["pipeline"] < 0.02 * pipelined.seconds
    assert pipelined.parts["compute"] == pytest.approx(plain.parts["compute"])
