"""Schedules for property tests: of every kind, with few layers, stages and micro-batches."""

from hypothesis import strategies as st

from dhelix.passes.pipeline_fold import INTERLEAVED, SCHEDULES, Schedule, layout_of, make_schedule

STEPS = st.tuples(
    st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 14), st.integers(0, 5), st.integers(2, 3)
)


def make(step: tuple[str, int, int, int, int]) -> Schedule:
    """A schedule with few layers that need not divide: (name, P, M, layers beyond one per chunk, chunks per stage)."""
    name, stages, microbatches, more, chunks_per_stage = step
    chunks = stages * (chunks_per_stage if name in INTERLEAVED else 1 if name == "1f1b" else 2)
    return make_schedule(name, layout_of(name, chunks + more, stages, chunks_per_stage), microbatches)
