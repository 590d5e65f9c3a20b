"""Where a compiled program reduces over replicas."""

import numpy as np
from jax.sharding import Mesh

from dhelix.passes.analysis.collectives import device_groups
from dhelix.passes.hlo import HloModule, graph, shapes


def reduced_in_loops(module: HloModule, mesh: Mesh) -> list[str]:
    """Shapes of arrays of 2+ dimensions that are reduced over the mesh's first axis in a loop with inner loops."""
    loops = [i for i in graph.walk(module.entry) if i.opcode == "while"]
    outer = [loop for loop in loops if any(i.opcode == "while" for i in graph.walk(loop.called[0]))]
    assert outer
    inside = {i for loop in outer for i in graph.walk(loop.called[0]) if i.opcode == "all-reduce"}
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    replica = {device: number for number, rest in enumerate(ids) for device in np.ravel(rest).tolist()}
    over = [i for i in inside if any(len({replica[d] for d in g}) > 1 for g in device_groups(i))]
    arrays = [s for i in over for s in (i.shape.tuple_shapes if shapes.is_tuple(i.shape) else [i.shape])]
    return sorted(shapes.text(shape) for shape in arrays if len(shape.dimensions) > 1)
