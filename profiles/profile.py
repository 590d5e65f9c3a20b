"""A profile: what was measured on one kind of hardware, as data.

A `Profile` has one `Section` per launch setting, because settings that are process-wide change every number:
CUDA_DEVICE_MAX_CONNECTIONS changes which of two kernels starts first. Reading and writing files is in
`storage`, making estimates of what was not measured in `estimates`. All times are seconds.
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
"""Of the shorter side: how far the quartiles of a pair's repeats may lie apart, see `PairTiming.steady`."""

ALIKE = "alike"
"""The source of a time that was measured on a GPU like this one (`alike`); no profile's file has it."""

_EMPTY: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one execution that nothing disturbs: the median, and the distance of the quartiles.

    `source`: `alone` (run by itself, again and again) or `trace` (seen in a trace of a whole step, where
    nothing else ran meanwhile), or ALIKE.
    """

    seconds: float
    spread: float = 0.0
    samples: int = 1
    source: str = "alone"

    @classmethod
    def of(cls, samples: Iterable[float], source: str = "alone") -> Timing:
        """Of at least one sample."""
        values = sorted(samples)
        return cls(statistics.median(values), quartile_distance(values), len(values), source)


@dataclass(frozen=True, slots=True)
class PairTiming:
    """Two operators that start together.

    Attributes:
      seconds: from the first start to the last end, P in the paper.
      first, second: from the start of the pair until each side is done, medians like `seconds`.
      first_alone, second_alone: T_i and T_j, of each side alone in the same executable: the same data, caches and
        clocks. A step's own trace may show other times.
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
        """Of at least one (seconds, first, second)."""
        whole, first, second = (sorted(of_all) for of_all in zip(*samples, strict=True))
        median = statistics.median
        spread = quartile_distance(whole)
        return cls(median(whole), median(first), median(second), first_alone, second_alone, spread, len(whole))

    @property
    def oef(self) -> float:
        """Overlap effectiveness (DHelix 3.2): 1 hides the shorter side altogether, 0 gains nothing."""
        shorter = min(self.first_alone, self.second_alone)
        return (self.first_alone + self.second_alone - self.seconds) / shorter if shorter else 0.0

    @property
    def steady(self) -> bool:
        """Whether the repeats agree well enough for an OEF, which divides by the shorter side: within STEADY of it."""
        return self.spread <= STEADY * min(self.first_alone, self.second_alone)

    @property
    def shorter_than_alone(self) -> bool:
        """Whether both together take less than the longer one alone, by more than the repeats scatter."""
        return self.steady and self.seconds + self.spread < max(self.first_alone, self.second_alone)


def quartile_distance(ordered: list[float]) -> float:
    if len(ordered) < 2:
        return 0.0
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return high - low


@dataclass(frozen=True, slots=True)
class LaunchSetting:
    """What holds for a whole process and changes its times: environment variables and XLA flags."""

    name: str
    environment: Mapping[str, str] = _EMPTY
    xla_flags: tuple[str, ...] = ()
    summary: str = ""
    implementation: str = "nccl"
    """Of collectives, one of `keys.IMPLEMENTATIONS`."""

    @property
    def graphs(self) -> bool:
        """Whether XLA launches kernels as CUDA graphs."""
        return _NO_GRAPHS not in self.xla_flags

    @property
    def in_order(self) -> bool:
        """Whether kernels of all streams start in the order of their launch."""
        return self.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"

    @property
    def training_flags(self) -> tuple[str, ...]:
        """`xla_flags` of a process that trains. Measuring keeps kernels out of CUDA graphs; a step has them where XLA
        makes them, and is up to 1 % faster (docs/benchmarks.md)."""
        return tuple(flag for flag in self.xla_flags if flag != _NO_GRAPHS)


_NO_GRAPHS = "--xla_gpu_enable_command_buffer="
_ONE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def _channels(collectives: int, all_to_alls: int) -> dict[str, str]:
    """As many at least, and thread blocks: NCCL takes few where it does not see NVLink."""
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
"""By link the launch setting that was measured to be fastest (docs/benchmarks.md), for most steps."""


@dataclass(frozen=True)
class Section:
    """Everything measured under one launch setting.

    Attributes:
      operators, collectives: times of one alone.
      pairs: times of two at once.
      gap_seconds: idle time of the GPU between two kernels that follow each other, median over a step.
      failures: why a key (as text) has no time: out of memory, cannot be isolated.
    """

    setting: str
    operators: Mapping[OperatorKey, Timing] = _EMPTY
    collectives: Mapping[CollectiveKey, Timing] = _EMPTY
    pairs: Mapping[PairKey, PairTiming] = _EMPTY
    gap_seconds: float | None = None
    failures: Mapping[str, str] = _EMPTY

    def merged(self, later: Section) -> Section:
        """Both; where both have a time the later one counts, and a time counts more than a failure."""
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
        """Whether an OEF above 1 counts as noise: it says that both take less than the longer one alone.

        It counts as true only where a second measurement says so: the other launch order, and what each side takes by
        itself, all by more than the repeats scatter.
        """
        if self.pairs[pair].oef < 1.005:  # it is shown as 1.00
            return False
        orders = self.pairs[pair], self.pairs.get(PairKey(pair.second, pair.first))
        alone = self.solo(pair.first), self.solo(pair.second)
        if None in (*orders, *alone):
            return True
        longer = max(timing.seconds for timing in alone if timing)
        return any(not (order and order.shorter_than_alone and order.seconds < longer) for order in orders)


@dataclass(frozen=True)
class Provenance:
    """What and when it was measured on. Versions are text such as `2.28.9`; unknown is empty."""

    gpu: str
    gpus: int
    date: str = ""
    driver: str = ""
    cuda: str = ""
    nccl: str = ""
    jax: str = ""
    machine: str = ""
    """A short hash of the GPUs' serial numbers: tells machines of one kind apart, names none."""


@dataclass(frozen=True)
class Profile:
    """All that is known of one kind of hardware over one kind of link.

    Attributes:
      hardware: a name in `hardware.ALL`, such as `H200`.
      link: how GPUs of a node reach each other, and nodes: `nvlink`, `no-p2p` (through host memory),
        `two-nodes` (two processes over sockets).
      measured_on: oldest first; more than one after files were merged.
      sections: by the setting's name.
      elsewhere: operators alone on the same hardware over other links; no part of the profile's file.
      alike: the GPU that times of source ALIKE were measured on; empty without any. No part of the file either.
    """

    hardware: str
    link: str
    measured_on: tuple[Provenance, ...] = ()
    sections: Mapping[str, Section] = field(default_factory=dict)
    elsewhere: Mapping[OperatorKey, Timing] = _EMPTY
    alike: str = ""

    @cached_property
    def digest(self) -> str:
        """32 hex digits of all that it holds. Equal profiles have one digest on every host, in whatever order they were
        put together."""
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
        """Empty if nothing was measured under that setting."""
        return self.sections.get(setting) or Section(setting)

    def with_section(self, section: Section) -> Profile:
        """With `section` merged into what is known under its setting."""
        merged = self.section(section.setting).merged(section)
        return replace(self, sections={**self.sections, section.setting: merged})

    def merged(self, later: Profile) -> Profile:
        """Both, as in `Section.merged`."""
        result = replace(self, measured_on=tuple(dict.fromkeys((*self.measured_on, *later.measured_on))))
        for section in later.sections.values():
            result = result.with_section(section)
        return result
