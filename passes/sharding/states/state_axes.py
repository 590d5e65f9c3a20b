"""The mesh axes that split model states: for all parameters, or for a group of them.

SplitAxes(("dp",), optimizer=("dp",))                        # ZeRO-1
StateGroup("embedding (zero1)", SplitAxes(...), {0, 4, 7})   # the arguments of a program that are its states
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dhelix.passes.hlo.constraints import Axes, Split


@dataclass(frozen=True)
class SplitAxes:
    """The mesh axes that split model states, each the major axis first.

    Attributes:
      data: all data-parallel axes.
      parameters: those of them over which parameters stay split while the model reads them.
      gradients: those of them over which gradients are split in each micro-batch.
      optimizer: those of them over which states are split between steps.
    """

    data: Axes
    parameters: Axes = ()
    gradients: Axes = ()
    optimizer: Axes = ()

    @property
    def inside_out(self) -> Axes:
        """The axes of the optimizer states, in the order in which they split a dimension.

        Those of the parameters come first. So the share that a device updates lies within the share that it holds.
        """
        rest = [axis for axis in self.gradients if axis not in self.parameters]
        last = [axis for axis in self.optimizer if axis not in (*self.parameters, *rest)]
        return (*self.parameters, *rest, *last)


@dataclass(frozen=True)
class StateGroup:
    """Parameters that are sharded alike, with their optimizer states.

    Attributes:
      name: the name in reports and errors.
      axes: the axes that split these states.
      arguments: the numbers of the program's arguments that belong to the group.
    """

    name: str
    axes: SplitAxes
    arguments: frozenset[int] = frozenset()


def data_axes(split: Split, data: Axes) -> frozenset[str]:
    """Those of the axes `data` that split an array."""
    return frozenset(name for axes in split.axes for axis in axes if (name := axis_name(axis)) in data)


def axis_name(axis: str) -> str:
    """The name of an axis in a sharding's text, which may have a part of the axis: `"dp":(1)2`."""
    return re.sub(r":.*", "", axis).strip('"')
