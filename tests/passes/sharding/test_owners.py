"""Splits of optimizer states over owners."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhelix.passes.sharding.factors import ShardingError
from dhelix.passes.sharding.owners import between, inside

SIZES = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


@given(SIZES, st.integers(1, 9))
def test_whole_tensors_have_one_owner_and_loads_are_balanced(sizes: list[int], owners: int) -> None:
    found = between(sizes, owners)
    assert sorted(n for owned in found.tensors for n in owned) == list(range(len(sizes)))
    assert all(list(owned) == sorted(owned) for owned in found.tensors)
    assert found.length == max(found.loads) and sum(found.loads) == sum(sizes)
    assert found.padding == found.length * owners - sum(sizes)
    assert found.length <= sum(sizes) / owners + max(sizes)


@given(SIZES, st.integers(1, 9))
def test_pieces_of_tensors_are_even(sizes: list[int], owners: int) -> None:
    found = inside(sizes, owners)
    assert sum(found.loads) == sum(sizes)
    assert 0 <= found.padding < owners * len(sizes)


def test_equal_tensors_alternate_in_forward_order() -> None:
    found = between([7] * 6, 3)
    assert found.tensors == ((0, 3), (1, 4), (2, 5)) and found.padding == 0
    assert [found.owner_of(n) for n in range(4)] == [0, 1, 2, 0]


def test_the_largest_goes_first() -> None:
    found = between([1, 1, 1, 5], 2)
    assert found.tensors == ((3,), (0, 1, 2))
    assert (found.length, found.padding, found.share) == (5, 2, 0.2)


def test_bad_sizes() -> None:
    with pytest.raises(ShardingError, match="0 owners"):
        between([1], 0)
    with pytest.raises(ShardingError, match="-1 elements"):
        inside([-1], 2)
