"""A profile: the measurements on one kind of hardware, as data.

A `Profile` has one `Section` per launch setting, because process-wide settings change every number. For example,
CUDA_DEVICE_MAX_CONNECTIONS changes which of two kernels starts first. `files.storage` reads and writes profiles;
`estimates` estimates what was not measured. All times are seconds.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from dhelix.profiles.keys import CollectiveKey, OperatorKey, PairKey

STEADY = 0.25
"""Largest quartile distance of a pair's repeats, as a fraction of the shorter side (`PairTiming.steady`)."""

ALIKE = "alike"
"""Source of a time that was measured on a similar GPU (`alike`). Profile files never contain it."""

_EMPTY: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one undisturbed execution: the median, and the distance of the quartiles.

    Attributes:
      source: `alone` (run repeatedly by itself), `trace` (seen in a whole step's trace while nothing else ran), or
        ALIKE.
    """

    seconds: float
    spread: float = 0.0
    samples: int = 1
    source: str = "alone"

    @classmethod
    def of(cls, samples: Iterable[float], source: str = "alone") -> Timing:
        """The timing of at least one sample, in seconds."""
        values = sorted(samples)
        return cls(statistics.median(values), quartile_distance(values), len(values), source)


@dataclass(frozen=True, slots=True)
class PairTiming:
    """Two operators that start together.

    Attributes:
      seconds: from the first start to the last end; P in the DHelix paper.
      first, second: from the start of the pair until that side is done; medians.
      first_alone, second_alone: T_i and T_j, of each side alone in the same executable, so with the same data, caches
        and clocks. A step's own trace may show other times.
      spread: distance of the quartiles of `seconds`.
      source: `alone`, or ALIKE.
    """

    seconds: float
    first: float
    second: float
    first_alone: float
    second_alone: float
    spread: float = 0.0
    samples: int = 1
    source: str = "alone"

    @classmethod
    def of(cls, samples: Iterable[tuple[float, float, float]], first_alone: float, second_alone: float) -> PairTiming:
        """The timing of at least one sample (seconds, first, second)."""
        whole, first, second = (sorted(of_all) for of_all in zip(*samples, strict=True))
        median = statistics.median
        spread = quartile_distance(whole)
        return cls(median(whole), median(first), median(second), first_alone, second_alone, spread, len(whole))

    @property
    def oef(self) -> float:
        """Overlap effectiveness (DHelix section 3.2): 1 hides the shorter side completely, 0 gains nothing."""
        shorter = min(self.first_alone, self.second_alone)
        return (self.first_alone + self.second_alone - self.seconds) / shorter if shorter else 0.0

    @property
    def steady(self) -> bool:
        """Whether the repeats agree well enough for an OEF: their spread is at most STEADY of the shorter side."""
        return self.spread <= STEADY * min(self.first_alone, self.second_alone)

    @property
    def shorter_than_alone(self) -> bool:
        """Whether both together take less than the longer side alone, by more than the repeats scatter."""
        return self.steady and self.seconds + self.spread < max(self.first_alone, self.second_alone)


def quartile_distance(ordered: list[float]) -> float:
    if len(ordered) < 2:
        return 0.0
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return high - low


@dataclass(frozen=True, slots=True)
class LaunchSetting:
    """Process-wide environment variables and XLA flags that change a program's times."""

    name: str
    environment: Mapping[str, str] = _EMPTY
    xla_flags: tuple[str, ...] = ()
    summary: str = ""
    implementation: str = "nccl"
    """Implementation of collectives, one of `keys.IMPLEMENTATIONS`."""

    @property
    def graphs(self) -> bool:
        """Whether XLA launches kernels as CUDA graphs."""
        return _NO_GRAPHS not in self.xla_flags

    @property
    def in_order(self) -> bool:
        """Whether the kernels of all streams start in launch order."""
        return self.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"

    @property
    def training_flags(self) -> tuple[str, ...]:
        """`xla_flags` for a process that trains.

        Measurements keep kernels out of CUDA graphs. A training step uses the graphs that XLA makes, because they are
        slightly faster (docs/research_log.md).
        """
        return tuple(flag for flag in self.xla_flags if flag != _NO_GRAPHS)


_NO_GRAPHS = "--xla_gpu_enable_command_buffer="
_ONE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def _channels(collectives: int, all_to_alls: int) -> dict[str, str]:
    """Minimum numbers of channels, and so of thread blocks: NCCL uses few if it sees no NVLink."""
    return {"NCCL_MIN_NCHANNELS": str(collectives), "NCCL_MIN_P2P_NCHANNELS": str(all_to_alls)}


SETTINGS: Mapping[str, LaunchSetting] = MappingProxyType({
    s.name: s
    for s in (
        LaunchSetting("default", summary="CUDA's eight connections, no command buffers",
                      xla_flags=(_NO_GRAPHS,)),
        LaunchSetting("connections1", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, (_NO_GRAPHS,),
                      "one connection: kernels start in the order of their launch"),
        LaunchSetting("command-buffers", {}, ("--xla_gpu_graph_min_graph_size=1",),
                      "XLA's CUDA graphs, down to single kernels"),
        LaunchSetting("copy-engine", {"NCCL_CTA_POLICY": "2"},
                      (_NO_GRAPHS, "--xla_gpu_experimental_enable_nccl_symmetric_buffers=true"),
                      "collectives on symmetric memory, by copy engines where NCCL can", "symmetric"),
        LaunchSetting("copy-engine1", {"NCCL_CTA_POLICY": "2", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
                      (_NO_GRAPHS, "--xla_gpu_experimental_enable_nccl_symmetric_buffers=true"),
                      "the same over one connection", "symmetric"),
        LaunchSetting("user-buffers", {}, (_NO_GRAPHS, "--xla_gpu_enable_nccl_user_buffers=true"),
                      "NCCL reads and writes the program's buffers", "user-buffers"),
        LaunchSetting("small-buffers", {**_ONE, **_channels(16, 32), "NCCL_BUFFSIZE": "262144"}, (_NO_GRAPHS,),
                      "one connection; NCCL's buffers fit a processor's cache, and there are more of them: for host"
                      " memory"),
        LaunchSetting("sockets",
                      {**_ONE, **_channels(8, 8), "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "2"},
                      (_NO_GRAPHS,),
                      "one connection; several TCP streams for each channel, and more channels: for sockets"),
    )
})  # fmt: skip


FASTEST: Mapping[str, str] = MappingProxyType(
    {"nvlink": "copy-engine1", "no-p2p": "small-buffers", "two-nodes": "sockets"}
)
"""For each link, the launch setting that measured fastest for most steps (docs/research_log.md)."""


@dataclass(frozen=True)
class Section:
    """Everything measured under one launch setting.

    Attributes:
      operators, collectives: times of one operator or collective alone.
      pairs: times of two at once.
      gap_seconds: idle time of the GPU between two consecutive kernels, median over a step.
      failures: why a key (as text) has no time, such as out of memory.
    """

    setting: str
    operators: Mapping[OperatorKey, Timing] = _EMPTY
    collectives: Mapping[CollectiveKey, Timing] = _EMPTY
    pairs: Mapping[PairKey, PairTiming] = _EMPTY
    gap_seconds: float | None = None
    failures: Mapping[str, str] = _EMPTY

    def merged(self, later: Section) -> Section:
        """Both sections. If both have a time, `later` wins. A later time removes an earlier failure."""
        measured = {str(k) for part in (later.operators, later.collectives, later.pairs) for k in part}
        earlier_failures = {k: why for k, why in self.failures.items() if k not in measured}
        return Section(
            self.setting,
            {**self.operators, **later.operators},
            {**self.collectives, **later.collectives},
            {**self.pairs, **later.pairs},
            self.gap_seconds if later.gap_seconds is None else later.gap_seconds,
            {**earlier_failures, **later.failures},
        )

    def solo(self, key: Any) -> Timing | None:
        return self.operators.get(key) or self.collectives.get(key)

    def noisy(self, pair: PairKey) -> bool:
        """Whether a pair's OEF above 1 counts as noise. Such an OEF says that both take less than the longer one alone.

        It counts as true only if the other launch order and the times alone confirm it, by more than the repeats
        scatter.
        """
        if self.pairs[pair].oef < 1.005:  # displayed as 1.00
            return False
        orders = self.pairs[pair], self.pairs.get(PairKey(pair.second, pair.first))
        alone = self.solo(pair.first), self.solo(pair.second)
        if None in (*orders, *alone):
            return True
        longer = max(timing.seconds for timing in alone if timing)
        return any(not (order and order.shorter_than_alone and order.seconds < longer) for order in orders)


@dataclass(frozen=True)
class Provenance:
    """The machine and the software of a measurement. Versions are text such as `2.28.9`; empty means unknown."""

    gpu: str
    gpus: int
    date: str = ""
    driver: str = ""
    cuda: str = ""
    nccl: str = ""
    jax: str = ""
    machine: str = ""
    """A short hash of the GPUs' serial numbers. It distinguishes machines of one kind without naming them."""


@dataclass(frozen=True)
class Profile:
    """Everything known about one kind of hardware over one kind of link.

    Attributes:
      hardware: a name in `hardware.ALL`, such as `H200`.
      link: how GPUs reach each other: `nvlink`, `no-p2p` (through host memory), `two-nodes` (two processes over
        sockets).
      measured_on: oldest first; several after files were merged.
      sections: by the setting's name.
      elsewhere: operators alone on the same hardware over other links. The profile's file does not contain them.
      alike: the GPU on which times of source ALIKE were measured; empty without any. Not in the file either.
    """

    hardware: str
    link: str
    measured_on: tuple[Provenance, ...] = ()
    sections: Mapping[str, Section] = field(default_factory=dict)
    elsewhere: Mapping[OperatorKey, Timing] = _EMPTY
    alike: str = ""

    @cached_property
    def digest(self) -> str:
        """32 hex digits of the contents. Equal profiles have equal digests on every host, in any order of insertion."""
        content = hashlib.blake2b(digest_size=16)
        content.update(repr((self.hardware, self.link, self.measured_on, self.alike)).encode())
        for section in (self.sections[name] for name in sorted(self.sections)):
            rest = section.setting, section.gap_seconds, sorted(section.failures.items())
            content.update(repr(rest).encode())
            for part in (section.operators, section.collectives, section.pairs):
                content.update(repr(sorted((str(key), timing) for key, timing in part.items())).encode())
        content.update(repr(sorted((str(key), timing) for key, timing in self.elsewhere.items())).encode())
        return content.hexdigest()

    def section(self, setting: str) -> Section:
        """The section of `setting`; empty if nothing was measured under it."""
        return self.sections.get(setting) or Section(setting)

    def with_section(self, section: Section) -> Profile:
        """A copy with `section` merged into the section of the same setting."""
        merged = self.section(section.setting).merged(section)
        return replace(self, sections={**self.sections, section.setting: merged})

    def merged(self, later: Profile) -> Profile:
        """Both profiles, merged as in `Section.merged`."""
        result = replace(self, measured_on=tuple(dict.fromkeys((*self.measured_on, *later.measured_on))))
        for section in later.sections.values():
            result = result.with_section(section)
        return result
