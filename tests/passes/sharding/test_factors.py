"""Factors of model states over a mesh of data-parallel devices."""

import pytest

from dhelix.passes.sharding.factors import ONE, Factor, Factors, ShardingError, admissible, parts


def test_the_space_of_the_paper_has_66_pairs_over_8x128():
    mesh = Factor(8, 128)
    assert len(parts(mesh)) == 11
    assert len({(factors.parameters, factors.optimizer) for factors in admissible(mesh)}) == 66


def test_every_admissible_point_is_a_chain_of_divisors():
    for factors in admissible(Factor(6, 4)):
        sizes = [factors.parameters, factors.gradients, factors.optimizer, factors.mesh]
        assert all(a.divides(b) for a, b in zip(sizes, sizes[1:], strict=False))


def test_factors_that_do_not_divide_are_refused():
    with pytest.raises(ShardingError, match="parameters is 2x1, and does not divide gradients = 3x1"):
        Factors(Factor(6), Factor(2), Factor(3), Factor(6))
    with pytest.raises(ShardingError, match="optimizer is 3x1, and does not divide mesh = 8x1"):
        Factors(Factor(8), optimizer=Factor(3))


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("dp", (1, 1, 1)), ("zero1", (1, 1, 8)), ("zero2", (1, 8, 8)), ("zero3", (8, 8, 8)), ("mics", (4, 4, 4))],
)
def test_known_strategies_are_points(strategy, expected):
    factors = Factors.named(strategy, Factor(4, 2))
    assert tuple(factor.size for _, factor in factors.states()) == expected
    assert factors.strategy == ("fsdp" if strategy == "zero3" else strategy)


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ShardingError, match="use one of dp, zero1"):
        Factors.named("zero4", Factor(8))


def test_quotients():
    assert Factor(8, 4) / Factor(4, 1) == Factor(2, 4)
    assert Factor(8, 4) / ONE == Factor(8, 4)
    with pytest.raises(ShardingError, match="3x1 does not divide 8x1"):
        _ = Factor(8) / Factor(3)
