"""Costs of schedules: bubbles and peaks known in closed form or worked out by hand, all in exact arithmetic."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold import (
    SCHEDULES,
    Evaluation,
    PipelineCosts,
    bidirectional,
    evaluate,
    evaluate_programs,
    fold_layout,
    interleaved_layout,
    layout_of,
    linear_layout,
    make_schedule,
    w_schedule,
    zero_bubble_v,
)

stage_counts = st.integers(1, 6)
microbatch_counts = st.integers(1, 20)
times = st.fractions(Fraction(1, 3), 5, max_denominator=6)
UNIT = PipelineCosts(1, 2)


def _evaluate(name: str, layers: int, stages: int, microbatches: int, costs: PipelineCosts) -> Evaluation:
    return evaluate(make_schedule(name, layout_of(name, layers, stages), microbatches), costs)


def _zero_bubble(layers: int, stages: int, microbatches: int, costs: PipelineCosts) -> Evaluation:
    programs = zero_bubble_v(fold_layout(layers, stages), microbatches, costs)
    return evaluate_programs(programs, programs, costs)


def _bidirectional(layers: int, stages: int, microbatches: int, costs: PipelineCosts) -> Evaluation:
    plain = replace(costs, co_executed=None)
    programs, plain_programs = (bidirectional(layers, stages, microbatches, each) for each in (costs, plain))
    return evaluate_programs(programs, plain_programs, costs)


@settings(max_examples=40)
@given(stage_counts, microbatch_counts, st.integers(1, 4), times, times)
def test_the_bubble_of_w_is_that_of_1f1b(
    stages: int, microbatches: int, layers: int, forward: Fraction, backward: Fraction
) -> None:
    costs = PipelineCosts(forward, backward)
    for name in ("w", "1f1b"):
        result = _evaluate(name, 2 * stages * layers, stages, microbatches, costs)
        assert result.ideal_time == 2 * layers * microbatches * (forward + backward)
        assert result.bubble_fraction == Fraction(stages - 1, microbatches)
        assert result.stage_layers == (2 * layers,) * stages


def test_floats_are_exact_too() -> None:
    assert _evaluate("w", 8, 4, 12, PipelineCosts(0.1, 0.2)).bubble_fraction == Fraction(1, 4)


@settings(max_examples=40)
@given(stage_counts, st.integers(0, 12), st.booleans())
def test_w_holds_two_chunks_of_residuals_per_stage_of_the_pipeline_everywhere(
    stages: int, more: int, reuse: bool
) -> None:
    schedule = w_schedule(fold_layout(4 * stages, stages), 2 * stages + more, reuse_within_tick=reuse)
    result = evaluate(schedule, UNIT)
    assert result.peak_residual_slots == (2 * stages + (not reuse),) * stages
    assert result.peak_residual_layers == (2 * (2 * stages + (not reuse)),) * stages


@settings(max_examples=30)
@given(stage_counts, st.integers(0, 12))
def test_1f1b_holds_as_much_on_its_first_stage(stages: int, more: int) -> None:
    result = _evaluate("1f1b", 4 * stages, stages, stages + more, UNIT)
    assert result.peak_residual_layers == tuple(4 * (stages - stage) for stage in range(stages))


@settings(max_examples=30)
@given(stage_counts, st.integers(1, 4), st.integers(2, 3))
def test_the_bubble_of_interleaved_1f1b_shrinks_with_the_chunks(stages: int, groups: int, chunks: int) -> None:
    layout = interleaved_layout(chunks * stages, stages, chunks)
    result = evaluate(make_schedule("interleaved", layout, groups * stages), UNIT)
    assert result.bubble_fraction == Fraction(stages - 1, chunks * groups * stages)


@settings(max_examples=30)
@given(stage_counts, st.integers(1, 4), st.integers(1, 4), times, times)
def test_interleaved_si_has_the_bubble_of_interleaved_1f1b_and_si_blocks(
    stages: int, groups: int, chunks: int, forward: Fraction, backward: Fraction
) -> None:
    layout, microbatches = interleaved_layout(chunks * stages, stages, chunks), groups * stages
    result = evaluate(make_schedule("interleaved_si", layout, microbatches), PipelineCosts(forward, backward))
    assert result.bubble_fraction == Fraction(stages - 1, chunks * microbatches)
    both_ways = Fraction(chunks * (groups - 1) * stages, chunks * (groups + 1) * stages + stages - 1)
    assert both_ways <= result.co_executed_share


@settings(max_examples=30)
@given(stage_counts, st.integers(1, 14), st.integers(2, 4))
def test_interleaved_si_is_never_idle_for_longer_than_w(stages: int, microbatches: int, chunks: int) -> None:
    layers = chunks * 2 * stages  # so the layers divide evenly in both schedules
    layout = interleaved_layout(layers, stages, chunks)
    result = evaluate(make_schedule("interleaved_si", layout, microbatches), UNIT)
    assert result.bubble_fraction <= _evaluate("w", layers, stages, microbatches, UNIT).bubble_fraction


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_zero_bubble_v_has_a_sixth_of_the_bubble_when_its_parts_take_equally_long(stages: int, groups: int) -> None:
    result = _zero_bubble(2 * stages, stages, groups * stages, PipelineCosts(1, 2, weight_gradient=1))
    assert result.bubble_fraction == Fraction(stages - 1, 6 * groups * stages)
    assert result.peak_residual_slots == (2 * stages,) * stages


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 9), times, times, st.fractions(0, 1, max_denominator=4))
def test_zero_bubble_v_is_never_worse_than_1f1b(
    stages: int, microbatches: int, forward: Fraction, backward: Fraction, part: Fraction
) -> None:
    costs = PipelineCosts(forward, backward, weight_gradient=backward * part)
    result = _zero_bubble(2 * stages, stages, microbatches, costs)
    assert result.bubble_fraction <= Fraction(stages - 1, microbatches)
    assert max(result.peak_residual_slots) <= 2 * stages


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 5), times, times, st.booleans())
def test_no_schedule_beats_the_ideal_without_co_execution(
    stages: int, microbatches: int, more: int, forward: Fraction, backward: Fraction, shared: bool
) -> None:
    costs = PipelineCosts(forward, backward, embedding=1, head=2, shared_ends=shared, send=Fraction(1, 10))
    layers = 2 * stages + more
    results = [_evaluate(name, layers, stages, microbatches, costs) for name in SCHEDULES]
    results += [f(layers, stages, microbatches, costs) for f in (_zero_bubble, _bidirectional)]
    work = microbatches * (layers * (forward + backward) + 3)
    for result in results:
        assert result.ideal_time == work / stages
        assert result.bubble_fraction >= 0
        assert result.idle_share == 1 - result.ideal_time / result.step_time
        assert sum(result.stage_layers) == layers * (2 if result.name == "bidirectional" else 1)


@settings(max_examples=40)
@given(stage_counts, microbatch_counts, st.integers(1, 3))
def test_co_execution_shortens_the_steady_phase_of_w_alone(stages: int, microbatches: int, layers: int) -> None:
    """2P ticks forward, 2M - 2 with both directions, 2P backward."""
    result = _evaluate("w", 2 * stages * layers, stages, microbatches, PipelineCosts(2, 4, co_executed=5))
    assert result.step_time == layers * (2 * stages * (2 + 4) + (2 * microbatches - 2) * 5)
    assert result.bubble_fraction == Fraction(stages - 1, microbatches)


def test_idle_time_is_said_of_the_shortened_step() -> None:
    plain = _evaluate("w", 32, 4, 12, PipelineCosts(2, 4))
    strands = _evaluate("w", 32, 4, 12, PipelineCosts(2, 4, co_executed=5))
    assert plain.bubble_fraction == strands.bubble_fraction == Fraction(1, 4)
    assert plain.idle_share == Fraction(1, 5)
    # Ticks 8 to 29 of 38 run both directions. A stage has both kinds of work in 16 ticks, one kind in 8 + 8 more.
    assert plain.co_executed_share == strands.co_executed_share == Fraction(16, 38)
    step, busy = 4 * (16 * (2 + 4) / 2 + 22 * 5), 4 * (16 * 5 + 8 * 2 + 8 * 4)
    assert (strands.step_time, strands.idle_share) == (step, 1 - Fraction(busy) / Fraction(step))


def test_uneven_chunks_take_as_long_as_the_longest_in_lockstep() -> None:
    even, uneven = (_evaluate("w", layers, 2, 4, UNIT) for layers in (8, 7))
    assert uneven.step_time == even.step_time
    assert uneven.ideal_time == even.ideal_time * 7 / 8


def test_in_an_si_block_the_longer_chunk_goes_on_alone() -> None:
    assert PipelineCosts(2, 4, co_executed=5).of_pair(3, 2) == 2 * 5 + 2
    assert PipelineCosts(2, 4, co_executed=5).of_pair(1, 2) == 5 + 4
    assert PipelineCosts(2, 4).of_pair(3, 2) == 3 * 2 + 2 * 4


def test_messages_take_time_where_a_stage_waits_for_them() -> None:
    late = replace(UNIT, send=Fraction(1, 2))
    # One send each way between the two stages; two in the fold, whose turn on the second stage sends nothing.
    for name, sends in (("1f1b", 2), ("dualpipev", 4), ("w", 4)):
        added = _evaluate(name, 4, 2, 1, late).step_time - _evaluate(name, 4, 2, 1, UNIT).step_time
        assert added == sends * late.send


def test_embedding_and_head_unbalance_a_pipeline_unless_they_are_shared() -> None:
    shared = PipelineCosts(1, 2, embedding=1, head=3)
    alone = replace(shared, shared_ends=False)
    for name in SCHEDULES:
        assert _evaluate(name, 8, 2, 6, alone).bubble_fraction > _evaluate(name, 8, 2, 6, shared).bubble_fraction


def test_the_bidirectional_pipeline_needs_the_parameters_twice() -> None:
    result = _bidirectional(8, 4, 8, PipelineCosts(2, 4, co_executed=5))
    assert result.stage_layers == (4, 4, 4, 4)
    assert _evaluate("w", 8, 4, 8, UNIT).stage_layers == (2, 2, 2, 2)
    assert max(result.peak_residual_slots) == 4
    assert result.co_executed_share > 0


def test_p_1_needs_no_pipeline() -> None:
    for name in SCHEDULES:
        assert _evaluate(name, 4, 1, 3, UNIT).bubble_fraction == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"forward": 0}, "above zero"),
        ({"co_executed": 0}, "above zero"),
        ({"send": -1}, "below zero"),
        ({"weight_gradient": 3}, "a part of backward"),
    ],
)
def test_costs_that_cannot_be(change: dict[str, int], says: str) -> None:
    with pytest.raises(DhelixError, match=says):
        replace(UNIT, **change)


def test_the_evaluator_alone_checks_its_input_too() -> None:
    for make in (lambda: bidirectional(8, 4, 0, UNIT), lambda: zero_bubble_v(fold_layout(8, 4), 0, UNIT)):
        with pytest.raises(DhelixError, match="0 micro-batches"):
            make()
    with pytest.raises(DhelixError, match="fold_layout"):
        zero_bubble_v(linear_layout(8, 4), 4, UNIT)
