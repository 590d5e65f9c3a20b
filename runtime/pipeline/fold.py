"""The options that the user gives a pipeline: `@strand_interleave(microbatches=M, pipeline=Fold(stages=P))`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jax.sharding import AxisType, Mesh

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold import (
    INTERLEAVED,
    LOCKSTEP,
    SCHEDULES,
    Layout,
    Schedule,
    layout_of,
    make_schedule,
    validate,
)
from dhelix.runtime.pipeline.folded_state import Path, fold_state, leading_dimensions, unfold_state


@dataclass(frozen=True)
class Fold:
    """A pipeline over mesh axis `axis`.

    Attributes:
      stages: the number P of stages, which is the size of the mesh axis.
      layers: the model's number of layers. It may be None if the layers divide evenly into the chunks. Otherwise the
        pipeline pads chunks with identity layers, and needs the model's number of layers to know how many to add.
      schedule: name of the schedule. With "w", every stage runs two strands, and the model is folded: stage s holds
        chunks s and 2 P - 1 - s. "interleaved_si" runs two strands without this fold; its bubble is shorter, but it
        keeps more residuals. "1f1b", "interleaved" and "dualpipev" are baselines.
      chunks_per_stage: number of chunks on each stage; only for the interleaved schedules.
      axis: the mesh axis of the stages.
      mesh: the mesh. It is needed if `value_and_grad` is called outside of `jax.shard_map`.
      sends_beside: only for "w" and "interleaved_si": whether messages of an SI block may overlap with its last layers.
        An SI block (strand interleaving) is one strand's forward beside the other strand's backward. Overlapping helps
        on slow links and takes slightly more memory. Do not use this option if chunks have two layers, because it then
        unrolls the loop over the layers (docs/guide/pipeline.md).
    """

    stages: int
    layers: int | None = None
    schedule: str = "w"
    chunks_per_stage: int = 2
    axis: str = "pp"
    mesh: Mesh | None = None
    sends_beside: bool = False

    def __post_init__(self) -> None:
        for name in ("stages", "layers", "chunks_per_stage"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise DhelixError(f"Fold({name}={value!r}): give a whole number of at least 1")
        if self.schedule not in SCHEDULES:
            raise DhelixError(f"Fold(schedule={self.schedule!r}) is unknown; use one of {', '.join(SCHEDULES)}")
        if self.sends_beside and self.schedule not in LOCKSTEP:
            self._refuse("sends_beside=True", LOCKSTEP)
        if self.chunks_per_stage != 2 and self.schedule not in INTERLEAVED:
            self._refuse(f"chunks_per_stage={self.chunks_per_stage}", INTERLEAVED)

    def _refuse(self, option: str, schedules: tuple[str, ...]) -> None:
        names = " and ".join(f'"{name}"' for name in schedules)
        raise DhelixError(f'Fold({option}) applies to {names}, not to "{self.schedule}": leave it out')

    @property
    def places(self) -> int:
        """Number of chunks on each stage."""
        if self.schedule in INTERLEAVED:
            return self.chunks_per_stage
        return 1 if self.schedule == "1f1b" else 2

    def fold(self, state: Any, mesh: Mesh | None = None, stacked: tuple[Path, ...] = (("layers",),)) -> Any:
        """Returns a train state with its layers in this pipeline's order (`folded_state.fold_state`).

        Args:
          state: the train state in the model's order.
          mesh: the mesh of the stages; default: the `mesh` of this `Fold`.
          stacked: paths of the arrays of stacked layers, relative to the parameters. Each array has the shape
            [layers, ...].
        """
        _check_paths(stacked)
        layers = self.layers or leading_dimensions(state, stacked, 1)[0]
        return fold_state(state, stacked, self.layout(layers), self._mesh(mesh), self.axis)

    def unfold(self, state: Any, mesh: Mesh | None = None, stacked: tuple[Path, ...] = (("layers",),)) -> Any:
        """The inverse of `fold`: a train state in the model's own order, for checkpoints."""
        _check_paths(stacked)
        layers = self.layers or math.prod(leading_dimensions(state, stacked, 2))
        return unfold_state(state, stacked, self.layout(layers), self._mesh(mesh), self.axis)

    def layout(self, layers: int | None = None) -> Layout:
        """Returns which stage holds which layers, for a model of `layers` layers (default: `self.layers`)."""
        layers = self.layers if layers is None else layers
        if layers is None:
            raise DhelixError("Fold(layers=) is needed to lay out layers: give the model's number of layers")
        chunks = self.places * self.stages
        if self.layers is None and layers % chunks:
            raise DhelixError(
                f"{layers} layers do not divide into {chunks} chunks: give Fold(layers={layers}), which adds identity "
                "layers"
            )
        return layout_of(self.schedule, layers, self.stages, self.chunks_per_stage)

    def _mesh(self, mesh: Mesh | None) -> Mesh:
        found = self.mesh if mesh is None else mesh
        if found is None:
            raise DhelixError("folding a state needs a mesh: call fold(state, mesh), or give Fold(..., mesh=mesh)")
        if any(kind is AxisType.Explicit for kind in found.axis_types):
            raise DhelixError(
                "Fold: a pipeline needs a mesh with automatic axes, but this one has explicit axes (jax.make_mesh's "
                f"default): make it with axis_types=(jax.sharding.AxisType.Auto,) * {len(found.axis_names)}"
            )
        return found

    def make_schedule(self, layers: int, microbatches: int) -> Schedule:
        """Returns the validated schedule for `layers` layers and `microbatches` micro-batches."""
        schedule = make_schedule(self.schedule, self.layout(layers), microbatches)
        validate(schedule)
        return schedule


def _check_paths(stacked: tuple[Path, ...]) -> None:
    if isinstance(stacked, str) or any(isinstance(path, str) for path in stacked):
        path = (stacked,) if isinstance(stacked, str) else tuple(stacked)
        raise DhelixError(f"stacked={stacked!r}: give paths, each a tuple of names, such as ({path!r},)")
