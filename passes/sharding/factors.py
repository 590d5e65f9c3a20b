"""Factors: over how many devices parameters, gradients and optimizer states are sharded.

Data-parallel devices form a mesh of GPUs in a node x nodes. A factor is a part of this mesh (AMSP section IV-B). The
devices of one such part hold one copy of a state together, and each of them holds an equal share.

    mesh 8x4            32 devices
    parameters 1x1      every device holds all parameters
    gradients 8x1       the devices of a node hold one copy of the gradients
    optimizer 8x2       two nodes hold one copy of the optimizer states; there are two copies

Each factor divides the next: parameters | gradients | optimizer | mesh, in both dimensions. So a device finds the share
of a state that it updates within the share that it holds of the state before. Known strategies are points of this
space:

    strategy     parameters   gradients   optimizer
    dp           1            1           1
    zero1        1            1           mesh
    zero2        1            mesh        mesh
    zero3, fsdp  mesh         mesh        mesh
    mics         group        group       group
    zero++       group        mesh        mesh

With zero++, the devices of a group hold one copy of the parameters while a step runs: its secondary shards. The copy is
gathered from the shards of the optimizer states once in a step. ZeRO++ gathers it anew in each micro-batch's forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

from dhelix.errors import DhelixError

STRATEGIES = ("dp", "zero1", "zero2", "zero3", "fsdp", "mics", "zero++")
"""Names of points of the space, for `Factors.named`."""

GROUPED = ("mics", "zero++")
"""Strategies that shard over a part of the mesh, by default over the GPUs of a node."""

STATES = ("parameters", "gradients", "optimizer")
"""The three model states, in the order in which their factors divide each other."""


class ShardingError(DhelixError):
    """Model states cannot be sharded as asked."""


@dataclass(frozen=True, order=True)
class Factor:
    """A part of a mesh of devices.

    Attributes:
      gpus: number of GPUs in each node.
      nodes: number of nodes.
    """

    gpus: int = 1
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.nodes < 1:
            raise ShardingError(f"a factor needs at least 1 GPU and 1 node, not {self}")

    def __str__(self) -> str:
        return f"{self.gpus}x{self.nodes}"

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.gpus * self.nodes

    def divides(self, other: Factor) -> bool:
        """Whether `other` is a whole number of parts like this one, in both dimensions."""
        return other.gpus % self.gpus == 0 and other.nodes % self.nodes == 0

    def __mul__(self, other: Factor) -> Factor:
        """The mesh that has `other` parts like this one."""
        return Factor(self.gpus * other.gpus, self.nodes * other.nodes)

    def __truediv__(self, other: Factor) -> Factor:
        """The mesh of the parts `other` of this mesh, which `other` must divide."""
        if not other.divides(self):
            raise ShardingError(f"{other} does not divide {self}")
        return Factor(self.gpus // other.gpus, self.nodes // other.nodes)


ONE = Factor()
"""A single device. A state with this factor is replicated."""


@dataclass(frozen=True)
class Factors:
    """The factors of the three model states.

    Attributes:
      mesh: all data-parallel devices.
      parameters, gradients, optimizer: the part of the mesh over which the state is sharded.

    Raises:
      ShardingError: a factor does not divide the next one.
    """

    mesh: Factor
    parameters: Factor = ONE
    gradients: Factor = ONE
    optimizer: Factor = ONE

    def __post_init__(self) -> None:
        for (name, factor), (after, larger) in pairwise([*self.states(), ("mesh", self.mesh)]):
            if not factor.divides(larger):
                raise ShardingError(
                    f"the factor of {name} is {factor}, and does not divide {after} = {larger} (GPUs x nodes); "
                    f"each of {', '.join(STATES)}, mesh must divide the next, in both dimensions"
                )

    def states(self) -> list[tuple[str, Factor]]:
        """The names of the states with their factors, in the order in which they divide each other."""
        return [(name, getattr(self, name)) for name in STATES]

    def __str__(self) -> str:
        return ", ".join(f"{name} {factor}" for name, factor in self.states()) + f" of {self.mesh}"

    @classmethod
    def named(cls, strategy: str, mesh: Factor, group: Factor | None = None) -> Factors:
        """The factors of a known strategy.

        Args:
          strategy: one of `STRATEGIES`.
          mesh: all data-parallel devices.
          group: the part over which states are sharded, for "zero++" the parameters alone; default: for GROUPED a
            node, else all devices.

        Raises:
          ShardingError: the strategy is unknown, or the group does not divide the mesh.
        """
        if strategy not in STRATEGIES:
            raise ShardingError(f"strategy {strategy!r} is unknown; use one of {', '.join(STRATEGIES)}")
        part = group or (Factor(mesh.gpus) if strategy in GROUPED else mesh)
        if strategy == "zero++":
            return cls(mesh, part, mesh, mesh)
        sharded = {"dp": 0, "zero1": 1, "zero2": 2}.get(strategy, 3)
        return cls(mesh, *(part if 3 - n <= sharded else ONE for n in range(3)))

    @property
    def strategy(self) -> str | None:
        """The name of the strategy that these factors are; None if they have no name."""
        for name in ("dp", "zero1", "zero2", "fsdp"):
            if self == Factors.named(name, self.mesh):
                return name
        if self.gradients == self.optimizer == self.mesh:
            return "zero++"
        return "mics" if self.parameters == self.optimizer else None


def parts(mesh: Factor) -> list[Factor]:
    """The parts of `mesh` that a state may be sharded over, from small to large.

    A part spans several nodes only if it has all GPUs of each (AMSP section IV-B, "nodes last"): links between nodes
    are the slow ones.
    """
    within = [Factor(gpus) for gpus in range(1, mesh.gpus + 1) if mesh.gpus % gpus == 0]
    across = [Factor(mesh.gpus, nodes) for nodes in range(2, mesh.nodes + 1) if mesh.nodes % nodes == 0]
    return within + across


def admissible(mesh: Factor) -> Iterator[Factors]:
    """All factors over `mesh`: gradients are sharded as parameters or as optimizer states (AMSP section IV-C3)."""
    for parameters, optimizer in product(parts(mesh), repeat=2):
        if parameters.divides(optimizer):
            for gradients in dict.fromkeys((parameters, optimizer)):
                yield Factors(mesh, parameters, gradients, optimizer)
