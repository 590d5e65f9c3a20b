"""The corrected equations of AMSP section IV-C, written out again, and what overlap leaves of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dhelix.passes.sharding import overlap as hiding
from dhelix.passes.sharding.collective_times import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER
from dhelix.passes.sharding.factors import Factor, Factors, ShardingError, admissible
from dhelix.passes.sharding.overlap import DEEPSPEED, NOTHING, Overlap
from dhelix.passes.sharding.sizes import FROZEN, Batch, ModelSizes
from dhelix.passes.sharding.step_times import PARTS, Job, StepTimes
from dhelix.tests.passes.sharding.models import LLAMA_7B, TIMES, factors, job, with_rows

MESH = (8, 4)
PHI = LLAMA_7B.parameters
FREE = {"within": (1.0, 1.0), "between": (1.0, 1.0)}


def times(found: Factors, of: Job, overlap: Overlap = NOTHING) -> StepTimes:
    return StepTimes.of(of, found, TIMES, overlap)


def parts(found: StepTimes) -> dict[str, float]:
    return {part.name: part.total for part in found.parts}


def t(op: str, size: float, group: Factor, together: int = 1) -> float:
    return TIMES.seconds(op, size, group, Factor(*MESH), together)


def test_the_corrected_equations() -> None:
    found = factors(MESH, (2, 1), (8, 2), (8, 2))
    ours = parts(times(found, job(batch=Batch(microbatches=3), bucket=250e6)))
    modules = [m.parameters for m in LLAMA_7B.modules] * 32 + [m.parameters for m in LLAMA_7B.outside]
    gather = 3 * sum(t(ALL_GATHER, 2 * phi, Factor(2)) for phi in modules)
    assert ours["forward gather"] == pytest.approx(gather)
    assert ours["backward gather"] == pytest.approx(gather)
    assert ours["reduce-scatter"] == pytest.approx(3 * sum(t(REDUCE_SCATTER, 2 * phi, Factor(2)) for phi in modules))
    n = math.ceil(2 * PHI / (250e6 * 2))
    assert ours["all-reduce"] == pytest.approx(n * t(ALL_REDUCE, 2 * PHI / 2 / n, Factor(4, 4)))
    assert ours["accumulation"] == pytest.approx(2 * n * t(ALL_REDUCE, 2 * PHI / 2 / n, Factor(4, 2)))
    assert ours["broadcast"] == pytest.approx(t(BROADCAST, 2 * PHI / 16, Factor(4, 2), together=8))


def test_a_split_inside_tensors_gathers() -> None:
    found = factors(MESH, (2, 1), (2, 1), (8, 1))
    inside = parts(times(found, job(split="inside")))
    assert inside["broadcast"] == pytest.approx(t(ALL_GATHER, 2 * PHI / 2, Factor(4)))


@pytest.mark.parametrize(
    "strategy, gathered, scattered, reduced",
    [("dp", 0, 0, 1), ("zero1", 1, 1, 0), ("zero2", 1, 4, 0), ("zero3", 8, 4, 0)],
)
def test_bytes_by_kind(strategy: str, gathered: int, scattered: int, reduced: int) -> None:
    """How often four micro-batches move all parameters; modules outside of layers are gathered in forward alone."""
    ours = times(Factors.named(strategy, Factor(*MESH)), job(batch=Batch(microbatches=4), split="inside")).moved
    again = 2 * 4 * LLAMA_7B.outside_parameters if strategy == "zero3" else 0
    counts = {ALL_GATHER: gathered, REDUCE_SCATTER: scattered, ALL_REDUCE: reduced}
    expected = {kind: 2 * PHI * count for kind, count in counts.items() if count}
    assert ours == pytest.approx(expected | ({ALL_GATHER: 2 * PHI * gathered - again} if gathered else {}))


def test_two_micro_batches_are_two_strands_that_gather_the_ends_once() -> None:
    def moved(microbatches: int, split: str) -> float:
        batch = Batch(microbatches=microbatches)
        return times(Factors.named("zero3", Factor(*MESH)), job(batch=batch, split=split)).moved[ALL_GATHER] / 2

    layers, ends = PHI - LLAMA_7B.outside_parameters, LLAMA_7B.outside_parameters
    assert [moved(m, "inside") for m in (1, 2, 4)] == [2 * m * layers + n * ends for m, n in ((1, 1), (2, 1), (4, 4))]
    assert moved(2, "between") == 4 * PHI


@pytest.mark.parametrize(
    "found, absent",
    [
        (Factors.named("dp", Factor(*MESH)), {*PARTS} - {"all-reduce"}),
        (Factors.named("zero3", Factor(*MESH)), {"all-reduce", "broadcast", "accumulation"}),
        (Factors.named("mics", Factor(*MESH)), {"broadcast", "accumulation"}),
    ],
)  # fmt: skip
def test_what_a_strategy_does_not_communicate(found: Factors, absent: set[str]) -> None:
    ours = parts(times(found, job(batch=Batch(microbatches=2))))
    assert {name for name, seconds in ours.items() if not seconds} == absent


def test_without_overlap_everything_is_exposed() -> None:
    for found in admissible(Factor(*MESH)):
        ours = times(found, job(batch=Batch(microbatches=2)))
        assert ours.exposed == pytest.approx(ours.total)
        assert ours.step == pytest.approx(ours.compute + ours.update + ours.total)


@pytest.mark.parametrize("recompute", [False, True])
def test_each_switch_hides_something_and_never_more_than_all(recompute: bool) -> None:
    of = job(batch=Batch(microbatches=2, recompute=recompute))
    for found in admissible(Factor(*MESH)):
        before = times(found, of).exposed
        for names in (["gather"], ["gather", "reduce_scatter"], ["gather", "reduce_scatter", "all_reduce"]):
            after = times(found, of, replace(Overlap.only(*names), **FREE)).exposed
            assert -1e-12 <= after <= before + 1e-9
            before = after


def test_a_collective_that_compute_covers_leaves_its_ends_alone() -> None:
    found = factors(MESH, (1, 1), (1, 1), (8, 1))
    ours = times(found, job(), replace(Overlap(), **FREE))
    exposed = {part.name: part.exposed for part in ours.parts}
    buckets = math.ceil(2 * PHI / 256e6)
    assert exposed["all-reduce"] == pytest.approx(parts(ours)["all-reduce"] / buckets)  # the last bucket
    first = (LLAMA_7B.layer_parameters + LLAMA_7B.outside[0].parameters) / PHI
    assert exposed["broadcast"] == pytest.approx(first * parts(ours)["broadcast"])


def test_collectives_over_the_same_links_wait_for_each_other() -> None:
    assert overlapped(1.0, 0.0) == pytest.approx(0.1)  # the last of ten buckets, where compute covers the others
    assert overlapped(1.0, 0.5) == pytest.approx(0.1 + 0.5)
    assert hiding.broadcast(1.0, 0.1, 1.0, replace(Overlap(), **FREE), True, busy=0.6) == pytest.approx(0.1 + 0.5)


def overlapped(backward: float, busy: float) -> float:
    return hiding.all_reduce(backward, 10, 0.1, replace(Overlap(), **FREE), True, busy)


def test_hidden_collectives_slow_compute() -> None:
    found = factors(MESH, (4, 1), (4, 1), (8, 1))
    assert times(found, job(), Overlap()).exposed > times(found, job(), replace(Overlap(), **FREE)).exposed


def test_another_strand_hides_what_its_own_micro_batch_cannot() -> None:
    found = Factors.named("zero3", Factor(*MESH))
    apart, strands = (times(found, job(split="inside", batch=Batch(microbatches=m)), Overlap()) for m in (1, 8))
    assert strands.exposed < 8 * apart.exposed
    later = (strands.exposed - apart.exposed) / 7  # of a micro-batch that runs beside another
    assert 0.0 < later < apart.exposed


def test_baselines() -> None:
    mesh = Factor(*MESH)
    mics = Factors.named("mics", mesh)
    assert times(mics, job(), NOTHING).step > times(mics, job(), DEEPSPEED).step > times(mics, job(), Overlap()).step
    zero3 = Factors.named("zero3", mesh)
    plain, secondary = (parts(times(zero3, of)) for of in (job(), job(secondary=Factor(8))))
    assert secondary["backward gather"] < plain["backward gather"] == plain["forward gather"]
    assert secondary["forward gather"] == plain["forward gather"]


def test_frozen_parameters_are_gathered_and_no_more() -> None:
    ours = parts(times(factors(MESH, (8, 1), (8, 1), (8, 4)), job(kept=FROZEN)))
    assert {name for name, seconds in ours.items() if seconds} == {"forward gather", "backward gather"}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ShardingError, match="overlap of 'gathers' is unknown"):
        Overlap.only("gathers")
    with pytest.raises(ShardingError, match="split 'both' is unknown"):
        job(split="both")


# ---- rows of a table that is only looked up

TABLE, ROW = 2 * 32_000 * 4096, 2 * 4096  # bytes in bfloat16
FEW = Batch(length=512)  # 2 devices read 1024 of 32000 rows


def more_moved(strategy: str, batch: Batch, count: int = 2, sizes: ModelSizes = LLAMA_7B, split: str = "inside"):
    """By how many bytes the collectives of each kind change where rows may be exchanged."""
    before, after = (
        times(Factors.named(strategy, Factor(count)), job(one, batch, split=split)).moved
        for one in (sizes, with_rows(sizes))
    )
    return {op: after[op] - before[op] for op in before if after[op] != before[op]}


@pytest.mark.parametrize("m", [1, 2, 4])
def test_a_split_table_exchanges_rows_in_each_micro_batch(m: int) -> None:
    """As steps do that XLA compiles for two H200s (Llama-8B shapes, vocabulary 32000)."""
    batch, rows = replace(FEW, microbatches=m), 2 * 512 * ROW
    forward = 1 if m < 3 else m  # strands gather once
    assert more_moved("zero3", batch) == {
        ALL_GATHER: m * rows - forward * TABLE,  # rows of gradients
        REDUCE_SCATTER: m * rows - m * TABLE,  # rows of the table
    }


def test_gradients_of_a_micro_batch_are_gathered_by_rows_where_they_are_reduced_to_shards() -> None:
    rows = 2 * 512 * ROW
    assert more_moved("zero1", FEW) == {ALL_GATHER: rows, REDUCE_SCATTER: -TABLE}
    assert more_moved("zero1", replace(FEW, microbatches=4)) == {}, "the sum of micro-batches has all rows"
    assert more_moved("zero2", replace(FEW, microbatches=4)) == {ALL_GATHER: 4 * rows, REDUCE_SCATTER: -4 * TABLE}
    assert more_moved("dp", FEW) == {}


def test_a_table_is_gathered_if_its_rows_are_fewer_or_do_not_divide() -> None:
    long = Batch(length=4096)
    assert more_moved("zero3", long, 4) and not more_moved("zero3", long, 8), "32768 tokens read more than all rows"
    assert not more_moved("zero3", FEW, 3)
    assert not more_moved("zero3", FEW, split="between"), "the paper's formulas have no rows"


def test_rows_are_exposed_where_backward_ends() -> None:
    sizes = with_rows(LLAMA_7B).only("embedding", [0, 0], [32_000 * 4096, 0])
    alone = job(sizes, FEW, split="inside")
    gathered = TIMES.seconds(ALL_GATHER, 2 * 512 * ROW, Factor(2), Factor(2))
    hidden = Overlap(within=(1.0, 1.0), between=(1.0, 1.0))
    for strategy, part in (("zero1", "all-reduce"), ("zero3", "reduce-scatter")):
        found = times(Factors.named(strategy, Factor(2)), alone, hidden).parts[PARTS.index(part)]
        assert found.exposed == found.total == pytest.approx(gathered)
