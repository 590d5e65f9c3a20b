"""Comparisons of two hand-made profiles."""

import json

import pytest

from dhelix.profiles.files.comparison import WORST, compare
from dhelix.profiles.keys import CollectiveKey, OperatorKey, PairKey
from dhelix.profiles.profile import PairTiming, Profile, Section, Timing

GEMMS = [OperatorKey("gemm", "bf16,bf16->bf16:nt:cublaslt", (1024 * n, 4096, 4096)) for n in range(1, 12)]
SHORT = OperatorKey("fusion", "loop:12ab", (8192,))
GATHER = CollectiveKey("all-gather", 64 * 2**20, 4)


def profile(factor: float, gemms: int, setting: str = "default") -> Profile:
    """A profile with times of 100, 200, ... us. The time of GEMM n is multiplied n times by `factor`."""
    operators = {key: Timing(n * 100e-6 * factor**n) for n, key in enumerate(GEMMS[:gemms], 1)}
    pairs = {PairKey(GEMMS[0], GATHER): PairTiming(300e-6 * factor, 1e-4, 3e-4, 1e-4, 2e-4)}
    section = Section(setting, {**operators, SHORT: Timing(2e-6 * factor**20)}, {GATHER: Timing(2e-4)}, pairs)
    return Profile("H200", "nvlink", (), {setting: section})


def test_what_both_have_is_compared_entry_by_entry() -> None:
    operators, collectives, pairs = compare(profile(1.01, 11), profile(1.0, 9))
    assert (operators.setting, operators.what, operators.common, operators.compared) == ("default", "operators", 10, 9)
    assert operators.median == operators.bias == pytest.approx(1.01**5 - 1)
    assert operators.p90 == pytest.approx(1.01**8.2 - 1, rel=1e-2)
    assert (collectives.compared, collectives.median, collectives.p90) == (1, 0.0, 0.0)
    assert (pairs.what, pairs.common, pairs.median) == ("pairs", 1, pytest.approx(0.01))


def test_the_worst_come_first_and_slower_counts_as_much_as_faster() -> None:
    operators, *_ = compare(profile(1.0, 9), profile(1.01, 9))
    assert [d.key for d in operators.worst] == [str(key) for key in GEMMS[8:3:-1]]
    assert len(operators.worst) == WORST
    assert all(d.relative < 0 for d in operators.worst)
    assert operators.median == pytest.approx(-(operators.bias or 0))


def test_nothing_in_common() -> None:
    assert compare(profile(1.0, 1), profile(1.0, 1, "connections1")) == ()
    agreements = compare(Profile("H200", "nvlink", (), {"default": Section("default")}), profile(1.0, 1))
    assert [(a.common, a.compared, a.median, a.worst) for a in agreements] == [(0, 0, None, ())] * 3


def test_json() -> None:
    written = json.loads(json.dumps([a.to_json() for a in compare(profile(1.01, 3), profile(1.0, 3))]))
    assert written[0]["setting"] == "default" and written[0]["compared"] == 3
    assert written[0]["worst"][0]["key"] == str(GEMMS[2])
    assert written[0]["worst"][0]["relative"] == pytest.approx(1.01**3 - 1)
