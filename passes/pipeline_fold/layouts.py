"""Which layers are on which stage: the linear, the interleaved and the folded (U) layout, and the storage order.

    8 layers, 2 stages      stage 0          stage 1
    linear                  0 1 2 3          4 5 6 7            chunk c on stage c
    interleaved, 2 each     0 1 | 4 5        2 3 | 6 7          chunk c on stage c mod P
    fold (U)                0 1 | 6 7        2 3 | 4 5          chunk c on stage min(c, 2P - 1 - c)

P is the number of stages.

Contract: chunks cover the model's layers in order, each layer once. All stages hold the same number of chunks. The
lengths of two chunks differ by at most one layer. If the number of chunks does not divide the number of layers, the
last chunks are the longer ones. The residuals of the last chunks live for the shortest time, so the extra layers cost
the least memory there. No stage gets a second longer chunk before every stage has one, so the numbers of layers of two
stages differ by at most one.

A model that scans over layers has stacked parameters of shape [layers, ...]. A pipeline stores these parameters stage
by stage, in the shape [stages, chunks of a stage, padded layers of a chunk, ...]. `storage_order` is the permutation to
this shape, and `model_order` is the permutation back. No layer is stored twice. Places without a layer hold padding: a
padding layer returns its input.

Source: DHelix section 4.1 and figure 7 (arXiv 2411.15871).
"""

from __future__ import annotations

import numpy as np

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold.schedule import Layout


def linear_layout(layers: int, stages: int) -> Layout:
    """The linear layout: one chunk on each stage. Raises DhelixError if there are more stages than layers."""
    return interleaved_layout(layers, stages, 1)


def interleaved_layout(layers: int, stages: int, chunks_per_stage: int) -> Layout:
    """Chunk c on stage c mod P, the layout of interleaved 1F1B. Raises DhelixError if a chunk would be empty."""
    if chunks_per_stage < 1:
        raise DhelixError(f"{chunks_per_stage} chunks on each stage: a stage needs at least one")
    chunks = stages * chunks_per_stage
    return Layout(stages, _chunk_layers(layers, stages, chunks), tuple(chunk % stages for chunk in range(chunks)))


def fold_layout(layers: int, stages: int) -> Layout:
    """The fold (U): chunks d and 2P - 1 - d on stage d. Raises DhelixError if there are more chunks than layers."""
    chunks = 2 * stages
    return Layout(
        stages, _chunk_layers(layers, stages, chunks), tuple(min(chunk, chunks - 1 - chunk) for chunk in range(chunks))
    )


def check_folded(layout: Layout) -> None:
    """Raises DhelixError if `layout` is not the folded layout."""
    if layout.stage_of != tuple(min(chunk, 2 * layout.stages - 1 - chunk) for chunk in range(2 * layout.stages)):
        raise DhelixError("this schedule needs the folded layout: make it with fold_layout(layers, stages)")


def storage_order(layout: Layout) -> np.ndarray:
    """The number of the model's layer at each storage place, int32[stages, chunks of a stage, padded].

    `padded` is the length of the longest chunk. Places with padding have the number -1.
    """
    order = np.full((layout.stages, layout.chunks // layout.stages, layout.padded), -1, np.int32)
    for chunk, stage in enumerate(layout.stage_of):
        layers = layout.layers_of(chunk)
        order[stage, layout.place_of(chunk), : len(layers)] = layers
    return order


def model_order(layout: Layout) -> np.ndarray:
    """The place of each layer in the flattened `storage_order`, int32[layers].

    Stored layers are in the model's order after they are flattened and indexed with these places.
    """
    flat = storage_order(layout).reshape(-1)
    places = np.flatnonzero(flat >= 0)
    return places[np.argsort(flat[places])].astype(np.int32)


def _chunk_layers(layers: int, stages: int, chunks: int) -> tuple[int, ...]:
    if stages < 1:
        raise DhelixError(f"{stages} pipeline stages: a pipeline needs at least one")
    if chunks > layers:
        most = layers * stages // chunks
        fewer = f"at most {most} stage{'s' * (most > 1)}, " if most else ""
        advice = f"take {fewer}fewer chunks on each, or a deeper model"
        raise DhelixError(f"{layers} layers do not fill {chunks} chunks on {stages} stages: {advice}")
    short, longer = divmod(layers, chunks)
    return (short,) * (chunks - longer) + (short + 1,) * longer
