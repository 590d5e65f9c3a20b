"""Costs on a described cluster, for passes and for the evaluator.

    model = ClusterCosts.of(cluster)                             # measured times where the cluster's GPU has a profile
    model = ClusterCosts.of(cluster, spread=Spread(compute=1.05))    # the slowest GPU takes 5 % longer
    StrandPairing(model.hardware, model=model)                   # an order for this cluster
    step_parts(module, model.costs())                            # the time of a step there

Times of kernels, of collectives inside a node, and of pairs come from the profile of the cluster's GPU and link. All
others follow from the cluster's constants, and count as guesses. Clusters without a profile have guesses only.

All GPUs of a step wait for each other in its collectives. So one slow GPU makes the whole step as slow as its own
compute. A collective ends when its slowest part arrives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Self

from dhelix.errors import DhelixError
from dhelix.passes.evaluation.costs import CostModel, Costs
from dhelix.passes.evaluation.roofline_costs import Cost, Lane
from dhelix.passes.hlo import Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.profiles.clusters.cluster import Cluster
from dhelix.profiles.collective_matmul import times as collective_matmul_times
from dhelix.profiles.files import storage
from dhelix.profiles.hardware import H200, Hardware
from dhelix.profiles.profile import Profile, Section


@dataclass(frozen=True)
class Spread:
    """How unequal the GPUs and links of a cluster are.

    Attributes:
      compute: how many times longer the slowest GPU computes.
      communication: how many times longer a collective takes until its slowest part has arrived.

    Raises:
      DhelixError: a factor is below 1, or no number.
    """

    compute: float = 1.0
    communication: float = 1.0

    def __post_init__(self) -> None:
        for name in ("compute", "communication"):
            value = getattr(self, name)
            if not 1.0 <= value < math.inf:
                raise DhelixError(f"the slowest {name} takes {value:g} times as long; give a factor of at least 1")


EQUAL = Spread()


@dataclass(frozen=True)
class ClusterCosts(CostModel):
    """A cost model of a cluster.

    Attributes:
      described: GPU and links of the cluster.
      spread: how unequal they are.
    """

    described: Hardware = field(default=H200)
    spread: Spread = EQUAL

    @classmethod
    def of(
        cls, cluster: Cluster, setting: str = "default", spread: Spread = EQUAL, profile: Profile | None = None
    ) -> Self:
        """The model of a cluster.

        Args:
          profile: measured times; None: the profile of the cluster's GPU and link if there is one.

        Raises:
          DhelixError: the profile is of another GPU, or has no measurements under this launch setting.
        """
        if profile is not None and profile.hardware != cluster.gpu:
            raise DhelixError(
                f"the profile is of {profile.hardware}, but {cluster.name} has {cluster.gpu}; give a profile of "
                f"{cluster.gpu}, or leave it out"
            )
        link = profile.link if profile else cluster.link
        if profile is None and link:
            profile = storage.find(cluster.gpu, link)
        if profile is None:
            profile = Profile(cluster.gpu, link or "nvlink", sections={setting: Section(setting)})
        times = collective_matmul_times.find(cluster.gpu, link) if link else None
        return cls(profile, setting, times, described=cluster.hardware, spread=spread)

    @property
    def hardware(self) -> Hardware:
        return self.described

    @property
    def words(self) -> str:
        """Where measured times come from, for people to read."""
        if not self.profile.measured_on:
            return f"nothing was measured on {self.profile.hardware}, so all times are guesses"
        return f"the profile of {self.profile.hardware} with link {self.profile.link}, launch setting {self.setting}"

    def costs(self) -> Costs:
        found = super().costs()
        return found if self.spread == EQUAL else SpreadCosts.over(found, self.spread)


class SpreadCosts(Costs):
    """Costs of the slowest GPU of a step."""

    spread: Spread = EQUAL

    @classmethod
    def over(cls, costs: Costs, spread: Spread) -> SpreadCosts:
        """The same costs with longer times."""
        made = cls.__new__(cls)
        vars(made).update(vars(costs), spread=spread)
        return made

    def __missing__(self, instruction: Instruction) -> Cost:
        cost = super().__missing__(instruction)
        if not self._adds_up(instruction, cost):
            cost = self[instruction] = self._spread(cost)
        return cost

    def _adds_up(self, instruction: Instruction, cost: Cost) -> bool:
        """Whether the cost is that of what is inside, which is spread already: of loops, calls and async compute."""
        inside = instruction.opcode == "async-start" and cost.lane is Lane.COMPUTE and self.key(instruction) is None
        return inside or instruction.opcode in CONTROL_FLOW

    def _spread(self, cost: Cost) -> Cost:
        if cost.lane is Lane.COMPUTE:
            return replace(cost, seconds=cost.seconds * self.spread.compute)
        longer = self.spread.communication
        return replace(cost, seconds=cost.seconds * longer, communication=cost.communication * longer)
