"""Factors of dimensions through reshapes and transposes, compared with NumPy."""

import hypothesis
import hypothesis.strategies as st
import numpy as np

from dhelix.passes.analysis.dimension_factors import Factor, Rearrangement, product, regroup, whole

DIMENSIONS = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4)


def applied(order: Rearrangement, array: np.ndarray) -> np.ndarray:
    return array.reshape(order.split).transpose(order.permutation).reshape(order.result)


def test_a_reshape_joins_and_splits() -> None:
    batch, rows, k = whole([8, 64, 32])
    devices, own = rows[0].split(4)
    joined = regroup([batch, (devices, own), k], [32, 16, 32])
    assert joined == [(batch[0], devices), (own,), k]
    assert regroup([batch, (devices, own), k], [16, 2, 16, 32]) == [
        (batch[0], Factor(1, 1, 2)), (Factor(1, 2, 2),), (own,), k,
    ]  # fmt: skip


def test_a_reshape_that_mixes_dimensions_has_no_factors() -> None:
    assert regroup(whole([6, 4]), [4, 6]) is None
    assert regroup(whole([6, 4]), [24]) is not None


def test_dimensions_of_size_one_count_for_nothing() -> None:
    assert regroup(whole([1, 6, 1]), [6, 1]) == [(Factor(1, 1, 6),), ()]


@hypothesis.given(DIMENSIONS, st.data())
def test_what_was_moved_is_brought_back(dimensions: list[int], data: st.DataObject) -> None:
    """The rearrangement of the factors undoes random transposes and reshapes, and its inverse redoes them."""
    array = np.arange(np.prod(dimensions)).reshape(dimensions)
    factors = whole(dimensions)
    moved: np.ndarray = array
    for _ in range(3):
        order = data.draw(st.permutations(range(moved.ndim)))
        moved, factors = moved.transpose(order), [factors[n] for n in order]
        split = data.draw(st.sampled_from([d for d in (1, 2, 3, 4) if moved.shape[0] % d == 0]))
        sizes = [split, moved.shape[0] // split, *moved.shape[1:]]
        regrouped = regroup(factors, sizes)
        if regrouped is None:
            continue
        moved, factors = moved.reshape(sizes), regrouped
    held = [f for group in factors for f in group]
    back = Rearrangement.of(held, sorted(held), dimensions)
    assert back is not None
    np.testing.assert_array_equal(applied(back, moved), array)
    there = Rearrangement.of([f for group in whole(dimensions) for f in group], held, moved.shape)
    assert there is not None
    np.testing.assert_array_equal(applied(there, array), moved)
    assert product(held) == array.size


def test_dimensions_that_stay_together_are_moved_as_one() -> None:
    (a,), (b,), (c,) = whole([2, 3, 4])
    order = Rearrangement.of([a, b, c], [c, a, b], [4, 6])
    assert order == Rearrangement((6, 4), (1, 0), (4, 6))
    same = Rearrangement.of([a, b, c], [a, b, c], [24])
    assert same is not None and not same.moves


def test_other_factors_cannot_be_rearranged() -> None:
    (a,), (b,), (c,) = whole([2, 3, 4])
    assert Rearrangement.of([a, b], [a, c], [8]) is None
    assert Rearrangement.of([a, b], [a], [2]) is None
