"""The mesh of a train step. Each axis has a name, and the name says what the axis splits.

    pp   layers: the stages of a pipeline
    dp   the batch
    ep   the batch, and the experts
    cp   the sequence, also within attention (context parallelism)
    tp   heads, hidden layers and vocabulary; between blocks, also the sequence

Any of them compose. A mesh always has dp and tp. Sharded model states may split dp into the axes dp_1 and dp_0, or more
(`dhelix.mesh_of`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

DATA = ("dp", "dp_3", "dp_2", "dp_1", "dp_0")
"""The axes of data parallelism: dp alone, or the parts of dp, the major one first."""
AXES = ("pp", *DATA, "ep", "cp", "tp")
"""All axes, in the order of a mesh. Neighbouring devices form a `tp` group, so that the group stays inside a node."""
ROWS = (*DATA, "ep")
"""The axes that split the rows of a batch."""
TOKENS = (*DATA, "ep", "cp")
"""The axes whose devices compute different tokens. A mean over tokens is a mean over these axes, too."""


def make_mesh(
    dp: int | Mapping[str, int],
    tp: int,
    devices: Sequence[Any] | None = None,
    pp: int = 1,
    ep: int | None = None,
    cp: int = 1,
) -> Mesh:
    """A mesh of `dp` x `tp` devices. The other axes exist only if they are asked for: `ep` even if it is 1.

    Args:
      dp: the number of data-parallel devices; or the sizes of the parts of dp by name, `{"dp_1": 2, "dp_0": 4}`.

    Raises:
      ValueError: there are too few devices, or a size is below 1.
    """
    data = dp if isinstance(dp, Mapping) else {"dp": dp}
    for name, extent in {"pp": pp, **data, "ep": 1 if ep is None else ep, "cp": cp, "tp": tp}.items():
        if extent < 1:
            raise ValueError(f"{name} is {extent}; give a number of at least 1")
    devices = jax.devices() if devices is None else devices
    asked = {"pp": pp if pp > 1 else None, **data, "ep": ep, "cp": cp if cp > 1 else None, "tp": tp}
    axes = {name: size for name in AXES if (size := asked.get(name)) is not None}
    size = math.prod(axes.values())
    if size > len(devices):
        text = " x ".join(f"{name} {extent}" for name, extent in axes.items())
        raise ValueError(f"a mesh of {text} needs {size} devices, but there are {len(devices)}")
    grid = np.array(devices[:size]).reshape(*axes.values())
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def check_axes(mesh: Mesh, allowed: tuple[str, ...] = AXES, needed: tuple[str, ...] = ("dp", "tp")) -> None:
    """Checks that `mesh` is a mesh of `make_mesh` whose axes are among `allowed`, and that it has the axes `needed`.

    Raises:
      ValueError: an axis is missing, unknown or not Auto, or the axes are in another order.
    """
    named = [axis for axis in allowed if axis in mesh.axis_names]
    automatic = all(kind == AxisType.Auto for kind in mesh.axis_types)
    kinds = {"dp" if axis in DATA else axis for axis in named}
    if not automatic or tuple(named) != tuple(mesh.axis_names) or not set(needed) <= kinds:
        allowed = tuple(axis for axis in allowed if axis == "dp" or axis not in DATA)
        may = [axis for axis in allowed if axis not in needed]
        more = f", and may have {_listed(may)}" if may else ""
        others = sorted(set(needed) - {"dp", "tp"})
        build = ", ".join(["dp", "tp", *(f"{axis}={axis}" for axis in others)])
        raise ValueError(
            f"the mesh must have the Auto axes {_listed(needed)}{more}, in the order {', '.join(allowed)}; it is "
            f"{mesh}; build it with make_mesh({build})"
        )


def _listed(axes: Sequence[str]) -> str:
    quoted = [repr(axis) for axis in axes]
    return " and ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1])))


def present(mesh: Mesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `axes` that `mesh` has."""
    return tuple(axis for axis in axes if axis in mesh.axis_names)


def row_entry(mesh: Mesh) -> str | tuple[str, ...]:
    """The entry of a spec that splits rows over those axes of `ROWS` that `mesh` has. One axis alone is no tuple."""
    axes = present(mesh, ROWS)
    return axes[0] if len(axes) == 1 else axes


def shards(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """The number of parts into which `axes` split a dimension. An axis that the mesh lacks splits nothing."""
    return math.prod(mesh.shape[axis] for axis in present(mesh, axes))


def axes_of(spec: PartitionSpec) -> set[str]:
    """The mesh axes that split an array with this spec."""
    return {axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis is not None}


def on_mesh(specs: Any, mesh: Mesh) -> Any:
    """A tree of specs, without those axes that `mesh` lacks. An axis that a mesh lacks splits nothing."""

    def kept(entry: Any) -> Any:
        if isinstance(entry, tuple):
            return present(mesh, entry) or None
        return entry if entry in mesh.axis_names else None

    return jax.tree.map(lambda spec: spec_of(*map(kept, spec)), specs)


def spec_of(*entries: Any) -> PartitionSpec:
    """A spec without trailing Nones. With them, JAX would regard equal shardings as unequal."""
    kept = list(entries)
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)
