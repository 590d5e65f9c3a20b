"""Interleaved SI: its ticks and its residual slots. `validate` checks the rules of lockstep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold import fold_layout, interleaved_layout, interleaved_si, validate

stage_counts, chunk_counts = st.integers(1, 8), st.integers(1, 4)


@given(stage_counts, chunk_counts, st.integers(1, 24), st.integers(0, 5))
def test_is_valid_with_uneven_layers_and_groups_too(stages: int, chunks: int, microbatches: int, more: int) -> None:
    schedule = interleaved_si(interleaved_layout(chunks * stages + more, stages, chunks), microbatches)
    validate(schedule)
    assert schedule.lockstep
    assert schedule.slots <= (chunks + 1) * stages - 1


@given(stage_counts, chunk_counts, st.integers(2, 5))
def test_each_stage_goes_forward_in_order_and_backward_as_much_later_as_the_way_is_long(
    stages: int, chunks: int, groups: int
) -> None:
    schedule = interleaved_si(interleaved_layout(chunks * stages, stages, chunks), groups * stages)
    work, way = chunks * groups * stages, chunks * stages
    assert len(schedule.ticks) == work + way + stages - 1
    assert schedule.slots == (chunks + 1) * stages - 1
    for tick, cells in enumerate(schedule.ticks):
        for stage, cell in enumerate(cells):
            assert (cell.forward is not None) == (stage <= tick < work + stage)
            begin = way + stages - 1 - stage
            assert (cell.backward is not None) == (begin <= tick < begin + work)


def test_the_example_of_its_docstring() -> None:
    schedule = interleaved_si(interleaved_layout(4, 2, 2), 4)

    def row(stage: int, kind: str) -> str:
        works = (getattr(cells[stage], kind) for cells in schedule.ticks)
        return " ".join("-" if work is None else f"{work.microbatch}.{work.chunk}" for work in works)

    assert row(0, "forward") == "0.0 1.0 0.2 1.2 2.0 3.0 2.2 3.2 - - - - -"
    assert row(0, "backward") == "- - - - - 0.2 1.2 0.0 1.0 2.2 3.2 2.0 3.0"
    assert row(1, "backward") == "- - - - 0.3 1.3 0.1 1.1 2.3 3.3 2.1 3.1 -"


def test_what_it_refuses() -> None:
    with pytest.raises(DhelixError, match="make it with interleaved_layout"):
        interleaved_si(fold_layout(8, 2), 4)
    with pytest.raises(DhelixError, match="0 micro-batches"):
        interleaved_si(interleaved_layout(8, 2, 2), 0)
