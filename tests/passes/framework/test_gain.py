"""A gain has causes that add up to it, and the report says how much of it is guessed."""

from dataclasses import replace

import pytest

from dhelix.passes.framework.gain import Gain, StepParts, guesses

BEFORE = StepParts(
    compute=0.1, copies=0.02, clock=0.0, slow_down=0.01, exposed=0.06, idle=0.01, flops=1e15, memory=8 << 30,
    guessed=0.02, guessed_overlap=0.0, costs="profile of H200",
)  # fmt: skip
AFTER = replace(BEFORE, copies=0.01, exposed=0.02, slow_down=0.02, memory=6 << 30)


def test_causes_add_up_to_the_gain_and_the_largest_comes_first() -> None:
    gain = Gain(BEFORE, AFTER)
    assert sum(gain.causes.values()) == pytest.approx(AFTER.seconds - BEFORE.seconds)
    assert next(iter(gain.causes)) == "exposed"
    assert gain.time() == "predicted step time 200.0 ms -> 160.0 ms (1.25 x as fast)"
    assert gain.why() == "changes: exposed communication -40.0 ms, copies -10.0 ms, slow-down from overlap +10.0 ms"
    assert gain.memory() == "peak memory 8.00 GiB -> 6.00 GiB (0.75 x, by live ranges)"


def test_what_is_left_begins_with_the_longest_part_and_names_collectives() -> None:
    after = replace(AFTER, exposed_by=(("all-gather 64 MiB", 0.0125),))
    assert Gain(BEFORE, after).left() == (
        "where the time goes: kernels 100.0 ms, exposed communication 20.0 ms (all-gather 64 MiB 12.5 ms),"
        " slow-down from overlap 20.0 ms, copies 10.0 ms, pauses between kernels 10.0 ms"
    )


def test_two_equal_steps_have_no_causes() -> None:
    assert "none above 0.2 %" in Gain(BEFORE, BEFORE).why()


def test_steps_that_compute_another_amount_are_no_fair_comparison() -> None:
    assert Gain(BEFORE, AFTER).unequal() == ""
    assert "2.00 x as much" in Gain(BEFORE, replace(AFTER, flops=2e15)).unequal()


def test_guesses_are_said_where_they_are_more_than_a_tenth() -> None:
    assert guesses(BEFORE) == "costs from the profile of H200"
    many = guesses(replace(BEFORE, guessed=0.12, guessed_overlap=1.0))
    assert "12% of the operators' time is guessed" in many and "100% of the overlap time" in many
