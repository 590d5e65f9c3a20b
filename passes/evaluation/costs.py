"""What each HLO instruction costs on a GPU: `roofline_costs`, with what was measured in its place.

Without a profile every cost is the roofline's (`dhelix.profiles.estimates.roofline`), so a guess. With one,
`Costs(hardware, Estimator(profile, hardware, setting))`, times of scheduled programs are what was measured or
what follows from it, and `Cost.source` says which; `Costs.rates` is what two instructions do to each other.
`CostModel` says all that as an option of a pass:

    CollectiveSchedule(model=CostModel.find("H200", "nvlink", "connections1"))
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Self

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
from dhelix.profiles.hardware import Hardware, describe
from dhelix.profiles.keys import CollectiveKey, Key, OperatorKey
from dhelix.profiles.profile import SETTINGS, Profile


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """How much lower the clock is in a step that computes densely, since a GPU's power is limited.

    What is limited is a mean over some 30 ms, so steps have one clock, and it follows from what they do in their time.
    Profiles hold times at the full clock (`runtime.profiling.session`).

    Attributes:
      free: the load up to which the clock is the full one. Load is the share of `Hardware.peak_flops` that products and
        attention do (of attention what the mask leaves), and `communication` times the share of time in collectives.
      slope: how many times longer per load beyond that products and attention take.
    """

    free: float
    slope: float
    communication: float

    def clock(self, load: float, seconds: float, slower: float) -> float:
        """How many times longer products and attention take than at the full clock.

        Their length makes the step longer, and its load lower: the clock c is where

            c - 1 = slope (load seconds / (seconds + (c - 1) slower) - free)

        Args:
          load: at the full clock.
          seconds: of the step, at the full clock.
          slower: by how many seconds the step is longer for c = 2, as far as it grows evenly.
        """
        if load <= self.free or seconds <= 0.0:
            return 1.0
        above = 2.0 * self.slope * (load - self.free) * seconds
        half = seconds + self.slope * self.free * slower
        return 1.0 + above / (half + math.sqrt(half * half + 2.0 * above * slower))


@dataclass(frozen=True, slots=True)
class Kernel:
    """A collective matmul that is one kernel, which nothing runs beside.

    Attributes:
      seconds: alone, at the full clock.
      communication: seconds of its collective alone.
    """

    seconds: float
    communication: float = 0.0
    source: Source = Source.MEASURED


@dataclass(frozen=True, slots=True)
class InStep:
    """What operators meet in a step, and not where a profile measures them by themselves or in pairs.

    Attributes:
      pause: seconds between one kernel and the next (`Section.gap_seconds`).
      wait: seconds that a collective takes longer, until the last of its GPUs is there and what waits for it begins.
      launch: seconds for which compute stands still where copy engines are given a collective (`Cost.launch`).
      power: what lowers the clock; None if nothing does.
      clock: how many times longer products and attention take (`timeline.settled`).
      in_order: kernels start in the order of their launch, so that nothing passes a collective that waits for its lane.
    """

    pause: float = 0.0
    wait: float = 0.0
    launch: float = 0.0
    power: PowerLimit | None = None
    clock: float = 1.0
    in_order: bool = False

    def cost(self, cost: Cost, key: Key, estimate: Estimate) -> Cost:
        """`cost` with the time that was estimated for `key`."""
        clock = self.clock if isinstance(key, OperatorKey) and key.clocked else 1.0
        launch = self.launch if _on_copy_engines(key) else 0.0
        return replace(cost, seconds=clock * estimate.seconds, source=estimate.source, launch=launch)

    def kernel(self, cost: Cost, kernel: Kernel) -> Cost:
        """`cost` of a kernel, which waits for its peers as a collective does."""
        if kernel.seconds <= 0.0:
            return replace(FREE, flops=cost.flops)  # another instruction counts for it, but the step computes this
        seconds = self.clock * kernel.seconds + self.wait
        sent = kernel.communication
        return replace(cost, seconds=seconds, source=kernel.source, lane=Lane.COMPUTE, launch=0.0, communication=sent)


def _on_copy_engines(key: Key) -> bool:
    """Whether NCCL gives it to copy engines on symmetric memory; of reductions they can do nothing."""
    return isinstance(key, CollectiveKey) and key.implementation == "symmetric" and key.kind in _COPIED


_COPIED = ("all-gather", "all-to-all")

BY_THEMSELVES = InStep()
# From traces of steps of Llama-8B shapes on 4 x H200; docs/benchmarks.md says how, and what they are worth elsewhere.
_WAIT = {"nvlink": 25e-6}  # by link: through host memory, collectives take no longer than in the profile
_LAUNCH = {"copy-engine1": 25e-6}  # by launch setting: what is launched next waits behind it in the only connection
_H200 = PowerLimit(free=0.44, slope=2.0, communication=0.15)
_POWER = {"H200": _H200, "H100": _H200}  # by GPU; fitted to H200s, and within 5 % of an H100

_NOTHING: Mapping[Instruction, Kernel] = MappingProxyType({})


class Costs(dict[Instruction, Cost]):
    """Costs by instruction, computed when first asked for: `Costs(hardware)[instruction]`.

    Args:
      estimator: gives times from a profile; without it the roofline does.
      implementation: how collectives run (`profiles.keys.IMPLEMENTATIONS`), for the estimator.
      in_step: what is added to what the profile says when instructions are played as a step.
      matmuls: times of collective matmuls, for kernels that wait for their peers.
      instead: instructions that are to count as such a kernel; of 0 seconds, as nothing.
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
        self._guessed: set[tuple[str, str]] = set()
        self._assumes_network: set[Instruction] = set()

    def __missing__(self, instruction: Instruction) -> Cost:
        cost = instruction_cost(instruction, self.hardware, self.__getitem__)
        if cost.lane is Lane.COMM_INTER and self.estimator is None:
            self._assumes_network.add(instruction)
        if (kernel := self._kernel(instruction)) is not None:
            cost = self.in_step.kernel(cost, kernel)
        elif self.estimator is not None and instruction.computation.module.is_scheduled:
            key = self.operator_keys[instruction] or self._message_key(instruction)
            if key is not None:
                cost = self.in_step.cost(cost, key, self.estimator.solo(key))
                cost = self._with_others(cost, instruction) if isinstance(key, CollectiveKey) else cost
                if isinstance(key, CollectiveKey) and key.nodes > 1 and self.estimator.assumes(key):
                    self._assumes_network.add(instruction)
        if cost.lane is not Lane.COMPUTE:
            cost = replace(cost, communication=cost.seconds)
        self[instruction] = cost
        return cost

    def _message_key(self, instruction: Instruction) -> CollectiveKey | None:
        """A permute of a message's size and pairs, which is what NCCL does with one."""
        found = find_transfer(instruction) if instruction.opcode in SENDS else None
        if found is None or found.host:
            return None
        permute = Collective("collective-permute", found.size, found.groups)
        return collective_key_of(permute, self.operator_keys.gpus_per_node, self.operator_keys.implementation)

    def _with_others(self, cost: Cost, instruction: Instruction) -> Cost:
        """`cost` of the first of several collectives that begin together, with all that the others take."""
        found = find_collective(instruction)
        if found is None or not found.others or self.estimator is None:
            return cost
        keys = self.operator_keys
        others = (collective_key_of(other, keys.gpus_per_node, keys.implementation) for other in found.others)
        return replace(cost, seconds=cost.seconds + sum(self.estimator.solo(key).seconds for key in others))

    def _kernel(self, instruction: Instruction) -> Kernel | None:
        """The kernel that an instruction is or counts as, where it is known what that takes; None for all else."""
        if instruction in self.instead:
            return self.instead[instruction]
        found = kernel_of(instruction)
        return None if found is None else self.collective_matmul(*found)

    def collective_matmul(self, site: Site, form: Form) -> Kernel | None:
        """A collective matmul in one of its forms, as if it were a kernel; None where nothing says what it takes."""
        gemm, collective = gemm_key(site), collective_key(site)
        if gemm is None or collective is None or self.estimator is None:
            return None
        found = estimate(site, form, self.matmuls, self.estimator.solo(gemm))
        return found and Kernel(found.seconds, self.estimator.solo(collective).seconds, found.source)

    @property
    def link(self) -> str:
        """Of the profile; "" without one."""
        profile = None if self.estimator is None else self.estimator.profile
        return "" if profile is None else profile.link

    @property
    def setting(self) -> str:
        """The launch setting of the profile; "" without one."""
        return self.estimator.section.setting if self.estimator and self.link else ""

    @property
    def words(self) -> str:
        """Whose costs these are, for people to read."""
        if self.estimator is None or self.estimator.profile is None:
            return f"roofline of {self.hardware.name}"
        profile, setting = self.estimator.profile, self.estimator.section.setting
        return f"profile of {profile.hardware} with link {profile.link}, launch setting {setting}"

    @property
    def assumed(self) -> str:
        """Constants that nobody measured and that costs asked for so far follow from, for people to read; "": none."""
        if not self._assumes_network:
            return ""
        bandwidth, per_node = self.hardware.inter_bandwidth / 1e9, self.hardware.gpus_per_node
        return f"{bandwidth:g} GB/s of each GPU between nodes of {per_node}"

    def at_clock(self, clock: float) -> "Costs":
        """The same, where products and attention take so many times longer than alone."""
        if clock == self.in_step.clock:
            return self
        in_step = replace(self.in_step, clock=clock)
        made = Costs(self.hardware, self.estimator, in_step=in_step, matmuls=self.matmuls, instead=self.instead)
        made.operator_keys, made._rates, made._guessed = self.operator_keys, self._rates, self._guessed
        made._assumes_network = self._assumes_network
        return made

    def with_kernels(self, instead: Mapping[Instruction, Kernel]) -> "Costs":
        """The same, where some instructions count as kernels of collective matmuls; what is known is kept."""
        made = Costs(self.hardware, self.estimator, in_step=self.in_step, matmuls=self.matmuls, instead=instead)
        made.operator_keys, made._guessed = self.operator_keys, self._guessed
        made._assumes_network = self._assumes_network
        kept = {i: cost for i, cost in self.items() if i not in instead and i.opcode not in CONTROL_FLOW}
        made.update(kept)
        made._rates = {asked: rates for asked, rates in self._rates.items() if asked[0] in kept}
        return made

    def rates(
        self, compute: Instruction, collective: Instruction, collective_first: bool, running: bool = False
    ) -> tuple[float, float]:
        """How fast `compute` and `collective` proceed while both run, 1 being undisturbed; never 0.

        Measured, or from measured pairs like this one; the hardware's constants where that would be a guess. A kernel
        that waits for its peers runs alone: it gets no SM before a collective that is under way has ended.

        Args:
          collective_first: which of the two was launched first.
          running: the collective held its SMs already when `compute` was launched.
        """
        asked = compute, collective, collective_first or running, running
        known = self._rates.get(asked)
        if known is None:
            known = self._rates[asked] = self._find_rates(*asked)
        return known

    def rates_are_guessed(self, compute: str, collective: str) -> bool:
        """Whether `rates` took the hardware's constants for these instructions, in any of the ways to meet that it was
        asked about."""
        return self.estimator is None or (compute, collective) in self._guessed

    def _find_rates(
        self, compute: Instruction, collective: Instruction, collective_first: bool, running: bool
    ) -> tuple[float, float]:
        if compute in self.instead or exclusive_kernel(compute) is not None:
            return MIN_RATE, 1.0
        constants = constant_rates(self.hardware, self[collective].lane)
        if self.estimator is None or not compute.computation.module.is_scheduled:
            return constants
        own, its = self.operator_keys[compute], self.operator_keys[collective]
        if own is None or its is None:
            return constants
        pair = (its, own) if collective_first else (own, its)
        estimators = (self.estimator.running, self.estimator) if running else (self.estimator,)
        for estimator in estimators:
            if estimator is not None and estimator.pair(*pair).source is not Source.GUESS:
                first, second = (max(rate, MIN_RATE) for rate in estimator.rates(*pair))
                return (second, first) if collective_first else (first, second)
        self._guessed.add((compute.name, collective.name))
        return constants


@dataclass(frozen=True)
class _Same:
    """A profile that equals each one of the same digest."""

    profile: Profile = field(compare=False)
    digest: str


@functools.lru_cache(maxsize=8)
def _estimator(same: _Same, hardware: Hardware, setting: str) -> Estimator:
    """One for all costs of a step: what it has found once, such as how pairs slow each other, it knows."""
    return Estimator(same.profile, hardware, setting)


@dataclass(frozen=True)
class CostModel:
    """Where costs come from, as data: a profile, as it was measured under one launch setting.

    An option of passes. All of the profile counts for the fingerprint of their inputs, so hosts whose files differ
    notice it before the first step.

    Attributes:
      matmuls: times of collective matmuls; None: a kernel that waits for its peers counts as its product.
      gpus_per_node: 0: as many as nodes of such GPUs usually have.
      inter_bandwidth: of each GPU between nodes, where nothing was measured there, in bytes per second; 0: the usual.
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
        """From the shipped profile and the user's own (`storage.find`).

        Raises DhelixError if there is no such profile, or nothing in it was measured under this setting.
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
                f"the profile of {self.profile.hardware} with link {self.profile.link} has nothing under the launch "
                f"setting {self.setting!r}: run `dhelix profile` under it, or use one of "
                + ", ".join(sorted(self.profile.sections))
            )

    def costs(self) -> Costs:
        """New costs, which keep what they are asked for; of one program or several. For steps, see `InStep`."""
        pause = self.profile.sections[self.setting].gap_seconds or 0.0
        wait, launch = _WAIT.get(self.profile.link, 0.0), _LAUNCH.get(self.setting, 0.0)
        in_step = InStep(
            pause,
            wait,
            launch,
            _POWER.get(self.profile.hardware),
            in_order=self.setting in SETTINGS and SETTINGS[self.setting].in_order,
        )
        return Costs(self.hardware, self.estimator, self.implementation, in_step, self.matmuls)

    @property
    def hardware(self) -> Hardware:
        return describe(self.profile.hardware, self.profile.link, self.gpus_per_node, self.inter_bandwidth)

    @property
    def implementation(self) -> str:
        """Of collectives under this setting, one of `keys.IMPLEMENTATIONS`."""
        return SETTINGS[self.setting].implementation if self.setting in SETTINGS else "nccl"

    @cached_property
    def estimator(self) -> Estimator:
        return _estimator(_Same(self.profile, self.profile.digest), self.hardware, self.setting)


def costs_of(hardware: Hardware, model: CostModel | None) -> Costs:
    """What the options of a scheduler say: the model's costs, or without one the roofline's of `hardware`."""
    return Costs(hardware) if model is None else model.costs()
