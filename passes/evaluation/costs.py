"""The cost of each HLO instruction on a GPU: from a profile's measured times if it has any, else from the roofline.

Without a profile, every cost comes from the roofline (`roofline_costs`), so it is a guess. With a profile,
`Costs(hardware, Estimator(profile, hardware, setting))` gives measured or derived times for scheduled programs.
`Cost.source` says which of the two a time is. `Costs.rates` says how two concurrent instructions slow each other down.
`CostModel` describes the source of costs as an option of a pass:

    CollectiveSchedule(model=CostModel.find("H200", "nvlink", "connections1"))
"""

import functools
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import Collective, exclusive_kernel, find_collective
from dhelix.passes.evaluation.collective_matmul_kernels import kernel_of
from dhelix.passes.evaluation.operator_keys import OperatorKeys
from dhelix.passes.evaluation.operator_keys import collective_key as collective_key_of
from dhelix.passes.evaluation.roofline_costs import FREE, Cost, Lane, constant_rates, instruction_cost
from dhelix.passes.evaluation.transfers import SENDS, find_transfer
from dhelix.passes.hlo import Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.profiles.collective_matmul import times as collective_matmul_times
from dhelix.profiles.collective_matmul.estimates import collective_key, estimate, gemm_key
from dhelix.profiles.collective_matmul.sites import Form, Site, Times
from dhelix.profiles.estimates.contention import MIN_RATE
from dhelix.profiles.estimates.estimator import Estimate, Estimator, Source
from dhelix.profiles.files import storage
from dhelix.profiles.hardware import SYMMETRIC_RATE, Hardware, describe
from dhelix.profiles.keys import CollectiveKey, Key, OperatorKey
from dhelix.profiles.profile import SETTINGS, Profile


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """Estimates how far the GPU's power limit lowers the clock in a step that computes densely.

    The GPU limits its mean power over tens of milliseconds. So a step has one clock, which follows from the step's
    load. Profiles hold times at the full clock (`runtime.profiling.session`).

    Attributes:
      free: load up to which the GPU keeps its full clock. The load is the fraction of `Hardware.peak_flops` that the
        step reaches (masked-out attention does not count), plus `communication` times the fraction of time in
        collectives.
      slope: relative growth of product and attention times per unit of load above `free`.
      communication: weight of the time in collectives.
    """

    free: float
    slope: float
    communication: float

    def clock(self, load: float, seconds: float, slower: float) -> float:
        """Returns c, the factor by which products and attention take longer than at the full clock.

        Longer products make the step longer, so its load becomes lower. c solves the equation

            c - 1 = slope * (load * seconds / (seconds + (c - 1) * slower) - free)

        Args:
          load: load of the step at the full clock.
          seconds: duration of the step at the full clock.
          slower: seconds by which the step would be longer at c = 2 than at c = 1, extrapolated linearly.
        """
        if load <= self.free or seconds <= 0.0:
            return 1.0
        above = 2.0 * self.slope * (load - self.free) * seconds
        half = seconds + self.slope * self.free * slower
        return 1.0 + above / (half + math.sqrt(half * half + 2.0 * above * slower))


@dataclass(frozen=True, slots=True)
class Kernel:
    """The time of a collective matmul that is one kernel. Nothing overlaps with the kernel.

    Attributes:
      seconds: time of the kernel at the full clock.
      communication: seconds that its collective takes alone.
    """

    seconds: float
    communication: float = 0.0
    source: Source = Source.MEASURED


@dataclass(frozen=True, slots=True)
class InStep:
    """Effects on times of operators in a step. A profile lacks them: it measures operators alone or in pairs.

    Attributes:
      pause: seconds between one kernel and the next (`Section.gap_seconds`).
      wait: extra seconds of a collective, until its last GPU arrives and its users start.
      launch: seconds for which compute waits when copy engines get a collective (`Cost.launch`).
      power: the power limit that lowers the clock; None if there is none.
      clock: factor by which products and attention take longer than at the full clock (`timeline.settled`).
      in_order: whether kernels start in launch order. If so, no kernel overtakes a collective that waits for its lane.
    """

    pause: float = 0.0
    wait: float = 0.0
    launch: float = 0.0
    power: PowerLimit | None = None
    clock: float = 1.0
    in_order: bool = False

    def cost(self, cost: Cost, key: Key, estimate: Estimate) -> Cost:
        """`cost` with the estimated time of `key`, at this clock and with the wait at the launch."""
        clock = self.clock if isinstance(key, OperatorKey) and key.clocked else 1.0
        launch = self.launch if _on_copy_engines(key) else 0.0
        return replace(cost, seconds=clock * estimate.seconds, source=estimate.source, launch=launch)

    def kernel(self, cost: Cost, kernel: Kernel) -> Cost:
        """`cost` with the time of `kernel`. Like a collective, the kernel also waits for its peers."""
        if kernel.seconds <= 0.0:
            return replace(FREE, flops=cost.flops)  # its time counts at another instruction, its operations count here
        seconds = self.clock * kernel.seconds + self.wait
        sent = kernel.communication
        return replace(cost, seconds=seconds, source=kernel.source, lane=Lane.COMPUTE, launch=0.0, communication=sent)


def _on_copy_engines(key: Key) -> bool:
    """Whether NCCL runs the collective on copy engines, over symmetric memory. Copy engines cannot reduce."""
    return isinstance(key, CollectiveKey) and key.implementation == "symmetric" and key.kind in _COPIED


_COPIED = ("all-gather", "all-to-all")

BY_THEMSELVES = InStep()
# Chosen by measurement, on traces of Llama-8B steps on 4 x H200 (docs/research_log.md).
_WAIT = {"nvlink": 25e-6}  # by link; through host memory, collectives take no longer than in the profile
_LAUNCH = {"copy-engine1": 25e-6}  # by launch setting: the next launch waits in the only connection
_H200 = PowerLimit(free=0.44, slope=2.0, communication=0.15)
_POWER = {"H200": _H200, "H100": _H200}  # by GPU; fitted on H200s, checked on an H100

_NOTHING: Mapping[Instruction, Kernel] = MappingProxyType({})


class Costs(dict[Instruction, Cost]):
    """Maps instructions to costs, each computed at its first lookup: `Costs(hardware)[instruction]`.

    Args:
      estimator: gives times from a profile. Without it, times come from the roofline.
      implementation: how collectives run (`profiles.keys.IMPLEMENTATIONS`), for the estimator.
      in_step: corrections to the profile's times for instructions inside a step.
      matmuls: times of collective matmul kernels.
      instead: instructions that count as collective matmul kernels. With a kernel of 0 seconds, they take no time.
    """

    def __init__(
        self,
        hardware: Hardware,
        estimator: Estimator | None = None,
        implementation: str = "nccl",
        in_step: InStep = BY_THEMSELVES,
        matmuls: Times | None = None,
        instead: Mapping[Instruction, Kernel] = _NOTHING,
    ) -> None:
        super().__init__()
        self.hardware, self.estimator, self.in_step = hardware, estimator, in_step
        self.matmuls, self.instead = matmuls, instead
        self.operator_keys = OperatorKeys(hardware.gpus_per_node, implementation)
        self._rates: dict[tuple[Instruction, Instruction, bool, bool], tuple[float, float]] = {}
        self._of_fusions: dict[Hashable, Cost] = {}  # by content
        self._guessed: set[tuple[str, str]] = set()
        self._assumes_network: set[Instruction] = set()

    def __missing__(self, instruction: Instruction) -> Cost:
        roofline = functools.partial(instruction_cost, hardware=self.hardware, inner=self.__getitem__)
        cost = self.operator_keys.contents.once(instruction, self._of_fusions, roofline)
        if cost.between_nodes and self.estimator is None:
            self._assumes_network.add(instruction)
        if (kernel := self._kernel(instruction)) is not None:
            cost = self.in_step.kernel(cost, kernel)
        elif self.estimator is not None and instruction.computation.module.is_scheduled:
            key = self.key(instruction) or self._message_key(instruction)
            if key is not None:
                cost = self.in_step.cost(cost, key, self.estimator.solo(key))
                cost = self._with_others(cost, instruction) if isinstance(key, CollectiveKey) else cost
                if isinstance(key, CollectiveKey) and key.nodes > 1 and self.estimator.assumes(key):
                    self._assumes_network.add(instruction)
        if cost.lane is not Lane.COMPUTE:
            cost = replace(cost, communication=cost.seconds)
        self[instruction] = cost
        return cost

    def key(self, instruction: Instruction) -> Key | None:
        """The key with which a profile is asked for the time of an instruction."""
        return self.operator_keys[instruction]

    def _message_key(self, instruction: Instruction) -> CollectiveKey | None:
        """The key of a send or recv: that of a permute of equal size and pairs, as NCCL runs both alike; else None."""
        found = find_transfer(instruction) if instruction.opcode in SENDS else None
        if found is None or found.host:
            return None
        permute = Collective("collective-permute", found.size, found.groups)
        return collective_key_of(permute, self.operator_keys.gpus_per_node, self.operator_keys.implementation)

    def _with_others(self, cost: Cost, instruction: Instruction) -> Cost:
        """Adds to `cost` the times of the other collectives that the same instruction starts."""
        found = find_collective(instruction)
        if found is None or not found.others or self.estimator is None:
            return cost
        keys = self.operator_keys
        others = (collective_key_of(other, keys.gpus_per_node, keys.implementation) for other in found.others)
        return replace(cost, seconds=cost.seconds + sum(self.estimator.solo(key).seconds for key in others))

    def _kernel(self, instruction: Instruction) -> Kernel | None:
        """The collective matmul kernel that an instruction counts as; None if there is none or its time is unknown."""
        if instruction in self.instead:
            return self.instead[instruction]
        found = kernel_of(instruction)
        return None if found is None else self.collective_matmul(*found)

    def collective_matmul(self, site: Site, form: Form) -> Kernel | None:
        """The kernel time of a collective matmul in one of its forms; None if it is unknown."""
        gemm, collective = gemm_key(site), collective_key(site)
        if gemm is None or collective is None or self.estimator is None:
            return None
        found = estimate(site, form, self.matmuls, self.estimator.solo(gemm))
        return found and Kernel(found.seconds, self.estimator.solo(collective).seconds, found.source)

    @property
    def link(self) -> str:
        """Link of the profile; "" without a profile."""
        profile = None if self.estimator is None else self.estimator.profile
        return "" if profile is None else profile.link

    @property
    def setting(self) -> str:
        """Launch setting of the profile; "" without a profile."""
        return self.estimator.section.setting if self.estimator and self.link else ""

    @property
    def words(self) -> str:
        """A description of the source of the costs, for people to read."""
        if self.estimator is None or self.estimator.profile is None:
            return f"roofline of {self.hardware.name}"
        profile, setting = self.estimator.profile, self.estimator.section.setting
        return f"profile of {profile.hardware} with link {profile.link}, launch setting {setting}"

    @property
    def assumed(self) -> str:
        """Unmeasured constants that the costs used so far depend on, for people to read; "" if there are none."""
        if not self._assumes_network:
            return ""
        bandwidth, per_node = self.hardware.inter_bandwidth / 1e9, self.hardware.gpus_per_node
        return f"{bandwidth:g} GB/s per GPU between nodes of {per_node} GPUs"

    def at_clock(self, clock: float) -> Self:
        """The same costs, but products and attention take `clock` times as long as at the full clock."""
        if clock == self.in_step.clock:
            return self
        return self._changed(in_step=replace(self.in_step, clock=clock))

    def with_kernels(self, instead: Mapping[Instruction, Kernel]) -> Self:
        """The same costs, but the instructions in `instead` count as kernels. Costs already computed are kept."""
        made = self._changed(instead=instead)
        kept = {i: cost for i, cost in self.items() if i not in instead and i.opcode not in CONTROL_FLOW}
        made.update(kept)
        made._rates = {asked: rates for asked, rates in self._rates.items() if asked[0] in kept}
        return made

    def _changed(self, **attributes: Any) -> Self:
        """Costs of the same kind with other attributes, and with no cost computed yet."""
        made = type(self).__new__(type(self))
        vars(made).update(vars(self), **attributes)
        return made

    def rates(
        self, compute: Instruction, collective: Instruction, collective_first: bool, running: bool = False
    ) -> tuple[float, float]:
        """Returns the speeds of `compute` and `collective` while both run. A speed of 1 is undisturbed; no speed is 0.

        The speeds come from measurements of this pair or of similar pairs, else from the hardware's constants. A
        collective matmul kernel runs alone: it gets no SM until the collective in flight has ended.

        Args:
          collective_first: whether the collective was launched first.
          running: whether the collective already held its SMs when `compute` was launched.
        """
        asked = compute, collective, collective_first or running, running
        known = self._rates.get(asked)
        if known is None:
            known = self._rates[asked] = self._find_rates(*asked)
        return known

    def rates_are_guessed(self, compute: str, collective: str) -> bool:
        """Whether `rates` has used the hardware's constants for these instructions so far, in any launch order."""
        return self.estimator is None or (compute, collective) in self._guessed

    def _find_rates(
        self, compute: Instruction, collective: Instruction, collective_first: bool, running: bool
    ) -> tuple[float, float]:
        if compute in self.instead or exclusive_kernel(compute) is not None:
            return MIN_RATE, 1.0
        constants = constant_rates(self.hardware, self[collective])
        if self.estimator is None or not compute.computation.module.is_scheduled:
            return constants
        own, its = self.key(compute), self.key(collective)
        if own is None or its is None:
            return constants
        if isinstance(its, CollectiveKey) and (its.implementation, its.nodes) == ("symmetric", 1):
            constants = constants[0], max(constants[1], SYMMETRIC_RATE)
        pair = (its, own) if collective_first else (own, its)
        estimators = (self.estimator.running, self.estimator) if running else (self.estimator,)
        for estimator in estimators:
            if estimator is not None and estimator.pair(*pair).source is not Source.GUESS:
                first, second = (max(rate, MIN_RATE) for rate in estimator.rates(*pair))
                return (second, first) if collective_first else (first, second)
        self._guessed.add((compute.name, collective.name))
        return constants


@dataclass(frozen=True)
class _Same:  # a profile, compared and hashed by its digest
    profile: Profile = field(compare=False)
    digest: str


@functools.lru_cache(maxsize=8)
def _estimator(same: _Same, hardware: Hardware, setting: str) -> Estimator:
    """One shared estimator for all costs of a step, because it caches its results, such as pair rates."""
    return Estimator(same.profile, hardware, setting)


@dataclass(frozen=True)
class CostModel:
    """The source of costs, as an option of passes: a profile's times under one launch setting.

    The whole profile counts in the fingerprint of a pass's inputs, so hosts with different files notice the difference
    before the first step.

    Attributes:
      matmuls: times of collective matmuls. If None, the kernel of one counts like its matrix product alone.
      gpus_per_node: 0 means the usual number for such GPUs.
      inter_bandwidth: bytes per second of each GPU between nodes, used for unmeasured collectives; 0 means the usual
        number.
    """

    profile: Profile = field(repr=False)
    setting: str = "default"
    matmuls: Times | None = field(default=None, repr=False)
    gpus_per_node: int = 0
    inter_bandwidth: float = 0.0

    @classmethod
    def find(
        cls, hardware: str = "H200", link: str = "nvlink", setting: str = "default", gpus_per_node: int = 0
    ) -> Self:
        """A model with the shipped and the user's own measurements of this hardware and link (`storage.find`).

        Raises DhelixError if there is no such profile, or if the profile has no measurements under this setting.
        """
        profile = storage.find(hardware, link)
        if profile is None:
            raise DhelixError(
                f"no profile of {hardware} with link {link}: run `dhelix profile`, or use one of "
                + ", ".join(storage.shipped())
            )
        return cls(profile, setting, collective_matmul_times.find(hardware, link), gpus_per_node)

    def __post_init__(self) -> None:
        if self.setting not in self.profile.sections:
            raise DhelixError(
                f"the profile of {self.profile.hardware} with link {self.profile.link} has no measurements under "
                f"launch setting {self.setting!r}: run `dhelix profile` under it, or use one of "
                + ", ".join(sorted(self.profile.sections))
            )

    def costs(self) -> Costs:
        """New costs for one or several programs, with the corrections for steps (`InStep`)."""
        pause = self.profile.sections[self.setting].gap_seconds or 0.0
        wait, launch = _WAIT.get(self.profile.link, 0.0), _LAUNCH.get(self.setting, 0.0)
        in_order = self.setting in SETTINGS and SETTINGS[self.setting].in_order
        in_step = InStep(pause, wait, launch, _POWER.get(self.profile.hardware), in_order=in_order)
        return Costs(self.hardware, self.estimator, self.implementation, in_step, self.matmuls)

    @property
    def hardware(self) -> Hardware:
        return describe(self.profile.hardware, self.profile.link, self.gpus_per_node, self.inter_bandwidth)

    @property
    def implementation(self) -> str:
        """How collectives run under this setting: one of `keys.IMPLEMENTATIONS`."""
        return SETTINGS[self.setting].implementation if self.setting in SETTINGS else "nccl"

    @cached_property
    def estimator(self) -> Estimator:
        return _estimator(_Same(self.profile, self.profile.digest), self.hardware, self.setting)


def costs_of(hardware: Hardware, model: CostModel | None) -> Costs:
    """The costs that a scheduler's options select: the model's, or the roofline of `hardware` without a model."""
    return Costs(hardware) if model is None else model.costs()
