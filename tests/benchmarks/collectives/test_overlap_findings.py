"""The findings of figure 4, with made-up measurements that confirm and contradict each of them."""

from __future__ import annotations

import pytest

from dhelix.benchmarks.collectives.overlap_findings import FINDINGS, Finding, figure4_pairs, judge
from dhelix.runtime.profiling.operator_bases import figure4_bases

AS_THE_PAPER_SAYS = {
    pair: 0.8 if ("all-gather" in pair or "all-to-all" in pair) and pair[0] != pair[1] else 0.1
    for pair in figure4_pairs()
} | {("gemm", "attention-backward"): -0.2}

each_finding = pytest.mark.parametrize("finding", FINDINGS, ids=lambda f: f.name)


def named(name: str) -> Finding:
    return next(f for f in FINDINGS if f.name == name)


@each_finding
def test_holds_where_everything_is_as_in_the_paper(finding: Finding) -> None:
    assert str(judge(finding, AS_THE_PAPER_SAYS)) == "holds"


@pytest.mark.parametrize(
    ("name", "pair", "value"),
    [
        ("compute beside compute", ("gemm", "attention"), 0.6),
        ("GEMM beside attention backward", ("attention", "attention"), -0.3),
        ("communication beside compute", ("attention-backward", "all-gather"), 0.3),
        ("communication beside its own kind", ("all-to-all", "all-to-all"), 0.9),
        ("both links at once", ("all-gather", "all-gather"), 0.85),
    ],
)
def test_one_pair_speaks_against_it(name: str, pair: tuple[str, str], value: float) -> None:
    verdict = judge(named(name), AS_THE_PAPER_SAYS | {pair: value})
    assert verdict.holds is False
    assert verdict.against == ((pair, value),)
    assert str(verdict) == f"does not hold: {pair[0]} + {pair[1]} {value:.2f}"


def test_the_better_launch_order_counts() -> None:
    measured = AS_THE_PAPER_SAYS | {("gemm", "all-gather"): 0.1, ("all-gather", "gemm"): 0.9}
    assert judge(named("communication beside compute"), measured).holds


def test_too_little_measured_is_no_verdict() -> None:
    measured = {p: v for p, v in AS_THE_PAPER_SAYS.items() if p != ("attention", "all-to-all")}
    assert str(judge(named("communication beside compute"), measured)) == "not measured: attention + all-to-all"


def test_pairs_are_named_once() -> None:
    pairs = figure4_pairs()
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) == 15


def test_every_base_of_figure_4_is_there() -> None:
    found = figure4_bases()
    assert set(found) == {name for pair in figure4_pairs() for name in pair}
    assert {base.sizes.name for name, base in found.items() if name != "all-to-all"} == {"llama-25b"}
