"""The findings of DHelix section 3.2 and figure 4 about overlapping operators, as statements that a profile can test.

    effectiveness = {("gemm", "attention"): 0.11, ("gemm", "all-gather"): 0.83, ...}     # measured OEF
    for finding in FINDINGS:
        print(finding.statement, judge(finding, effectiveness))

The paper is arXiv 2411.15871. Names are those of `dhelix.runtime.profiling.operator_bases`. The figure's GEMM is
`gemm`, its FA and FA_BWD are `attention` and `attention-backward`, C1 (AllGather inside a node) is `all-gather`, and C2
(All-to-All across nodes) is `all-to-all`. The paper gives its numbers only as a picture, for A40, A800 and H100. It
gives no threshold for "well". Here a pair overlaps well if at least half of the shorter operator is hidden: OEF >= 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from typing import Literal

WELL = 0.5
"""OEF from which a pair overlaps well."""

type Pair = tuple[str, str]

COMPUTATION = ("gemm", "attention", "attention-backward")
COMMUNICATION = ("all-gather", "all-to-all")
_COMPUTE_PAIRS: tuple[Pair, ...] = tuple(combinations_with_replacement(COMPUTATION, 2))
_MIXED_PAIRS: tuple[Pair, ...] = tuple(product(COMPUTATION, COMMUNICATION))
_SAME_LINK: tuple[Pair, ...] = tuple((name, name) for name in COMMUNICATION)
_BOTH_LINKS: tuple[Pair, ...] = (("all-gather", "all-to-all"),)
_GEMM_BESIDE_BACKWARD: Pair = ("gemm", "attention-backward")


@dataclass(frozen=True)
class Finding:
    """One takeaway of figure 4.

    Attributes:
      name: short name for tables.
      quote: the paper's words, section 3.2.
      statement: the tested statement.
      pairs: pairs that the statement is about.
      expected: each of `pairs` overlaps `well` or `badly`, or `worse` or `better` than each of `others`.
      others: pairs to compare with; empty for `well` and `badly`.
    """

    name: str
    quote: str
    statement: str
    pairs: tuple[Pair, ...]
    expected: Literal["well", "badly", "worse", "better"]
    others: tuple[Pair, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The verdict on one finding.

    Attributes:
      holds: None if pairs were not measured.
      against: pairs that contradict the finding, with their OEF, the furthest off first. For a comparison, these are
        pairs of `others`.
      missing: pairs that were not measured.
    """

    holds: bool | None
    against: tuple[tuple[Pair, float], ...] = ()
    missing: tuple[Pair, ...] = ()

    def __str__(self) -> str:
        if self.holds:
            return "holds"
        if self.holds is None:
            return f"not measured: {', '.join(map(_text, self.missing))}"
        return f"does not hold: {', '.join(f'{_text(pair)} {value:.2f}' for pair, value in self.against)}"


FINDINGS: tuple[Finding, ...] = (
    Finding(
        "compute beside compute",
        "Computation-intensive operators (GEMM, FA do not overlap well.)",
        f"Two of GEMM, attention and its backward pass have an OEF below {WELL}",
        _COMPUTE_PAIRS,
        "badly",
    ),
    Finding(
        "GEMM beside attention backward",
        "The FA_BWD operator is particularly unforgiving when overlapped with GEMM, likely due to the interference from"
        " the latter that breaks FA's carefully choreographed fine-granule interleaving between computation and memory"
        " I/O.",
        "GEMM with attention's backward pass has a lower OEF than every other pair of computations",
        (_GEMM_BESIDE_BACKWARD,),
        "worse",
        tuple(pair for pair in _COMPUTE_PAIRS if pair != _GEMM_BESIDE_BACKWARD),
    ),
    Finding(
        "communication beside compute",
        "Both types of communication operators overlap well with both types of computation ones, though the degree of"
        " communication hiding achieved varies.",
        f"All-gather inside a node and all-to-all across nodes each have an OEF of at least {WELL} with GEMM, attention"
        " and its backward pass",
        _MIXED_PAIRS,
        "well",
    ),
    Finding(
        "communication beside its own kind",
        "Neither node-local nor cross-node communication operators overlap well with themselves",
        f"Two all-gathers inside a node, and two all-to-alls across nodes, have an OEF below {WELL}",
        _SAME_LINK,
        "badly",
    ),
    Finding(
        "both links at once",
        "but benefit from overlapping with each other due to simultaneous use of different network resources (NVlink"
        " and Infiniband, for example).",
        "All-gather inside a node with all-to-all across nodes has a higher OEF than either with itself",
        _BOTH_LINKS,
        "better",
        _SAME_LINK,
    ),
)


def figure4_pairs() -> tuple[Pair, ...]:
    """All pairs that the findings need, each once."""
    return tuple(dict.fromkeys(pair for finding in FINDINGS for pair in (*finding.pairs, *finding.others)))


def judge(finding: Finding, effectiveness: Mapping[Pair, float]) -> Verdict:
    """Whether the finding holds for measured OEFs.

    Args:
      effectiveness: OEF by pair (launched first, launched second); one order or both. The better order counts, because
        the paper does not mention launch order, and a schedule can choose it.
    """
    measured = {pair: best(pair, effectiveness) for pair in (*finding.pairs, *finding.others)}
    known = {pair: value for pair, value in measured.items() if value is not None}
    missing = tuple(pair for pair in measured if pair not in known)
    if missing:
        return Verdict(None, missing=missing)
    own = [known[pair] for pair in finding.pairs]
    match finding.expected:
        case "well":
            wrong = [pair for pair in finding.pairs if known[pair] < WELL]
        case "badly":
            wrong = [pair for pair in finding.pairs if known[pair] >= WELL]
        case "worse":
            wrong = [pair for pair in finding.others if known[pair] <= max(own)]
        case "better":
            wrong = [pair for pair in finding.others if known[pair] >= min(own)]
    wrong.sort(key=lambda pair: known[pair], reverse=finding.expected in ("badly", "better"))
    return Verdict(not wrong, tuple((pair, known[pair]) for pair in wrong))


def best(pair: Pair, effectiveness: Mapping[Pair, float]) -> float | None:
    """OEF of the better launch order; None if neither was measured."""
    orders = (effectiveness.get(pair), effectiveness.get((pair[1], pair[0])))
    return max((value for value in orders if value is not None), default=None)


def _text(pair: Pair) -> str:
    return " + ".join(pair)
