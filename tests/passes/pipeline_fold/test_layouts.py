"""Layouts: which layers are on which stage, and the storage order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold import (
    Layout,
    fold_layout,
    interleaved_layout,
    linear_layout,
    model_order,
    storage_order,
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    stages, chunks_per_stage = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["linear", "interleaved", "fold"]))
    chunks = stages * {"linear": 1, "interleaved": chunks_per_stage, "fold": 2}[kind]
    layers = chunks + draw(st.integers(0, 20))
    if kind == "linear":
        return linear_layout(layers, stages)
    if kind == "fold":
        return fold_layout(layers, stages)
    return interleaved_layout(layers, stages, chunks_per_stage)


def _layers(layout: Layout) -> list[list[int]]:
    return [[layer for chunk in layout.chunks_of(s) for layer in layout.layers_of(chunk)] for s in range(layout.stages)]


def test_a_fold_of_32_layers_on_4_stages() -> None:
    assert _layers(fold_layout(32, 4)) == [
        [0, 1, 2, 3, 28, 29, 30, 31],
        [4, 5, 6, 7, 24, 25, 26, 27],
        [8, 9, 10, 11, 20, 21, 22, 23],
        [12, 13, 14, 15, 16, 17, 18, 19],
    ]


def test_linear_and_interleaved() -> None:
    assert _layers(linear_layout(6, 3)) == [[0, 1], [2, 3], [4, 5]]
    assert _layers(interleaved_layout(8, 2, 2)) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_padding_stands_in_the_order_of_storage() -> None:
    assert storage_order(fold_layout(7, 2)).tolist() == [[[0, -1], [5, 6]], [[1, 2], [3, 4]]]
    assert model_order(fold_layout(7, 2)).tolist() == [0, 4, 5, 6, 7, 2, 3]


@given(layouts())
def test_stages_share_the_layers_evenly(layout: Layout) -> None:
    assert sorted(sum(_layers(layout), [])) == list(range(layout.layers))
    assert max(layout.chunk_layers) - min(layout.chunk_layers) <= 1
    counts = [len(layers) for layers in _layers(layout)]
    assert max(counts) - min(counts) <= 1


@given(layouts())
def test_storage_and_model_order_are_inverses(layout: Layout) -> None:
    order = storage_order(layout)
    assert order.shape == (layout.stages, layout.chunks // layout.stages, layout.padded)
    assert np.array_equal(order.reshape(-1)[model_order(layout)], np.arange(layout.layers))
    for chunk, stage in enumerate(layout.stage_of):
        place = order[stage, layout.place_of(chunk)]
        assert place[place >= 0].tolist() == list(layout.layers_of(chunk))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fold_layout(7, 4), "7 layers do not fill 8 chunks on 4 stages: take at most 3 stages"),
        (lambda: linear_layout(3, 4), "take at most 3 stages"),
        (lambda: interleaved_layout(5, 2, 3), "take at most 1 stage"),
        (lambda: fold_layout(8, 0), "0 pipeline stages"),
        (lambda: interleaved_layout(8, 2, 0), "at least one"),
        (lambda: fold_layout(1, 1), "take fewer chunks"),
    ],
)
def test_what_cannot_be_laid_out(make, says: str) -> None:
    with pytest.raises(DhelixError, match=says):
        make()
