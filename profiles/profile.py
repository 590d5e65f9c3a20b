"""A profile as data: the measured times on one kind of hardware.

A launch setting is a set of environment variables and XLA flags that holds for a whole process (`SETTINGS`). A
`Profile` has one `Section` for each launch setting, because times depend on the setting. For example,
CUDA_DEVICE_MAX_CONNECTIONS changes which of two kernels starts first. `files.storage` reads and writes profiles.
`estimates` estimates times that were not measured. All times are in seconds.
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
"""Limit for `PairTiming.steady`: largest spread of a pair's samples, over the shorter side's time alone."""

_CONTRADICTS = 1.1
"""If a side takes so many times longer alone than the pair, it was probably disturbed (docs/design/profiling.md)."""

ALIKE = "alike"
"""Value of `source` for a time from a similar GPU (`estimates.alike`). Files of profiles contain no such times."""

_EMPTY: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of one execution while nothing else runs.

    Attributes:
      seconds: median of the samples.
      spread: distance between the quartiles of the samples, in seconds.
      samples: number of samples.
      source: `alone`, `trace` or ALIKE. `alone`: the operator ran repeatedly by itself. `trace`: the time comes from
        the trace of a whole step, in which nothing else ran at that time. ALIKE: the time comes from a similar GPU.
    """

    seconds: float
    spread: float = 0.0
    samples: int = 1
    source: str = "alone"

    @classmethod
    def of(cls, samples: Iterable[float], source: str = "alone") -> Timing:
        """The timing for `samples`, which are one or more times in seconds."""
        values = sorted(samples)
        return cls(statistics.median(values), quartile_distance(values), len(values), source)


@dataclass(frozen=True, slots=True)
class PairTiming:
    """The times of a pair: two operators that start together, the sides of the pair.

    Attributes:
      seconds: time from the first start to the last end, P in the DHelix paper; a median.
      first, second: time from the start of the pair to the end of each side; medians.
      first_alone, second_alone: time of each side alone, T_i and T_j in the DHelix paper. Both were measured in the
        executable of the pair, with the same data, caches and clocks. The trace of a step may show other times.
      spread: distance between the quartiles of the samples of `seconds`.
      samples: number of samples.
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
        """The timing for `samples`, which are one or more tuples (seconds, first, second)."""
        whole, first, second = (sorted(of_all) for of_all in zip(*samples, strict=True))
        median = statistics.median
        spread = quartile_distance(whole)
        return cls(median(whole), median(first), median(second), first_alone, second_alone, spread, len(whole))

    @property
    def oef(self) -> float:
        """Overlap effectiveness (DHelix section 3.2): 1 if the shorter side is hidden completely, 0 without a gain."""
        shorter = min(self.first_alone, self.second_alone)
        return (self.first_alone + self.second_alone - self.seconds) / shorter if shorter else 0.0

    @property
    def steady(self) -> bool:
        """Whether the samples agree well: their spread is at most STEADY times the shorter side's time alone."""
        return self.spread <= STEADY * min(self.first_alone, self.second_alone)

    @property
    def shorter_than_alone(self) -> bool:
        """Whether the pair is steady and takes less time than its longer side alone, by more than the spread."""
        return self.steady and self.seconds + self.spread < max(self.first_alone, self.second_alone)

    @property
    def contradicts_itself(self) -> bool:
        """Whether the pair is `shorter_than_alone` by more than clocks and caches explain.

        Then a side was probably disturbed while it ran alone.
        """
        return self.shorter_than_alone and _CONTRADICTS * self.seconds < max(self.first_alone, self.second_alone)


def quartile_distance(ordered: list[float]) -> float:
    if len(ordered) < 2:
        return 0.0
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return high - low


@dataclass(frozen=True, slots=True)
class LaunchSetting:
    """A launch setting: environment variables and XLA flags of a process that change the times of its programs."""

    name: str
    environment: Mapping[str, str] = _EMPTY
    xla_flags: tuple[str, ...] = ()
    summary: str = ""
    implementation: str = "nccl"
    """The implementation of collectives under this setting, one of `keys.IMPLEMENTATIONS`."""

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
        """The XLA flags for a process that trains: `xla_flags` without the flag that switches CUDA graphs off.

        Measurements are made without CUDA graphs. Training uses XLA's graphs, because they are slightly faster
        (docs/research_log.md).
        """
        return tuple(flag for flag in self.xla_flags if flag != _NO_GRAPHS)


_NO_GRAPHS = "--xla_gpu_enable_command_buffer="
_ONE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def _channels(collectives: int, all_to_alls: int) -> dict[str, str]:
    """Environment variables that set the minimum number of NCCL channels.

    Without NVLink, NCCL uses few channels by default.
    """
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
                      "collectives on copy engines where NCCL can, over one connection", "symmetric"),
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
"""For each link, the launch setting under which most measured steps were fastest (docs/research_log.md)."""


@dataclass(frozen=True)
class Section:
    """All measurements under one launch setting.

    Attributes:
      setting: name of the launch setting.
      operators, collectives: times of operators and collectives that run alone.
      pairs: times of two operators that run at once.
      gap_seconds: idle time of the GPU between two consecutive kernels: the median over a step. None if it was not
        measured.
      failures: for each key or pair whose measurement failed (as text), the reason, such as out of memory.
    """

    setting: str
    operators: Mapping[OperatorKey, Timing] = _EMPTY
    collectives: Mapping[CollectiveKey, Timing] = _EMPTY
    pairs: Mapping[PairKey, PairTiming] = _EMPTY
    gap_seconds: float | None = None
    failures: Mapping[str, str] = _EMPTY

    def merged(self, later: Section) -> Section:
        """The entries of both sections. Entries of `later` take precedence.

        A failure in `self` is removed if `later` has a time of the same key or pair.
        """
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
        """Whether the OEF of a pair is above 1 because of noise.

        An OEF above 1 means that the pair takes less time than its longer side alone. This is not noise if two
        conditions hold in both launch orders: the pair is `shorter_than_alone`, and it also takes less time than the
        longer of the sides' times in this section.
        """
        if self.pairs[pair].oef < 1.005:  # such an OEF is displayed as 1.00
            return False
        orders = self.pairs[pair], self.pairs.get(PairKey(pair.second, pair.first))
        alone = self.solo(pair.first), self.solo(pair.second)
        if None in (*orders, *alone):
            return True
        longer = max(timing.seconds for timing in alone if timing)
        return any(not (order and order.shorter_than_alone and order.seconds < longer) for order in orders)


@dataclass(frozen=True)
class Provenance:
    """The machine and the software of a measurement. Versions are texts such as `2.28.9`; "" if they are unknown."""

    gpu: str
    gpus: int
    date: str = ""
    driver: str = ""
    cuda: str = ""
    nccl: str = ""
    jax: str = ""
    machine: str = ""
    """A short hash of the GPUs' serial numbers. It distinguishes machines of the same kind and does not name them."""


@dataclass(frozen=True)
class Profile:
    """All known times for one kind of GPU with one kind of link.

    Attributes:
      hardware: name of the GPU, such as `H200` (`hardware.gpu_name`).
      link: one of `hardware.LINKS`.
      measured_on: machine and software of the measurements, oldest first. A merged profile has several entries.
      sections: one section for each launch setting, by the setting's name.
      elsewhere: times of operators that were measured on the same GPU with another link. Files do not contain them.
      alike: name of the GPU on which times with the source ALIKE were measured; empty if there are none. Files do not
        contain it.
    """

    hardware: str
    link: str
    measured_on: tuple[Provenance, ...] = ()
    sections: Mapping[str, Section] = field(default_factory=dict)
    elsewhere: Mapping[OperatorKey, Timing] = _EMPTY
    alike: str = ""

    @cached_property
    def digest(self) -> str:
        """A hash of the contents, 32 hex digits. It does not depend on the host or on the order of the entries."""
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
        """The section of `setting`; an empty section if nothing was measured under this setting."""
        return self.sections.get(setting) or Section(setting)

    def with_section(self, section: Section) -> Profile:
        """A copy of the profile, in which `section` is merged into the section of the same setting."""
        merged = self.section(section.setting).merged(section)
        return replace(self, sections={**self.sections, section.setting: merged})

    def merged(self, later: Profile) -> Profile:
        """The entries of both profiles. Entries of `later` take precedence, as in `Section.merged`."""
        result = replace(self, measured_on=tuple(dict.fromkeys((*self.measured_on, *later.measured_on))))
        for section in later.sections.values():
            result = result.with_section(section)
        return result
