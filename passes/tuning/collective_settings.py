"""Settings of a program's collectives under NCCL. A section of plan files.

    "tuning": {"nccl": "2.28", "devices": 2, "default_us": 550500, "tuned_us": 518400,
    "collectives": [
    {"body": "5d0c5f7e0c1b7a52", "key": "all-gather 67108864B 2x1 groups=1 nccl", "occurrence": 1,
     "algorithm": "ring", "protocol": "simple", "channels": 4, "chunk": 0,
     "us": 1210, "default_us": 980, "slows": 0.4},
    ...
    ]}

A collective is identified as operators of plans are: by the fingerprint of its computation, its key, and its number
among the collectives with this key (`passes/plans/plan_operators.py`). So equal collectives of one layer may have
different settings. Settings for a whole process, such as the size of buffers, are in the plan's target.
`passes/plans/plan_files.py` reads and writes the section. With the times, a step can be ordered for these settings
(`passes/plans/tuned_costs.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dhelix.profiles.channels.nccl_setting import ChannelError, NcclSetting

_VERSION = re.compile(r"\d+\.\d+")


@dataclass(frozen=True)
class TunedCollective:
    """A collective with its setting.

    Attributes:
      body: fingerprint of its computation.
      key: its key as text.
      occurrence: number among the collectives of the computation with this key, from 1.
      us, default_us: microseconds in the step, with the setting and with NCCL's defaults; 0 if they are not known.
      slows: how much computation loses beside it, compared with NCCL's defaults: 0 for nothing, 1 for the same.

    Raises:
      ChannelError: a time or `slows` is impossible.
    """

    body: str
    key: str
    occurrence: int
    setting: NcclSetting
    us: float = 0.0
    default_us: float = 0.0
    slows: float = 1.0

    def __post_init__(self) -> None:
        if min(self.us, self.default_us, self.slows) < 0.0 or bool(self.us) != bool(self.default_us):
            raise ChannelError(f"{self.key}: give a time with the setting and one with NCCL's defaults, or neither")

    @property
    def identity(self) -> tuple[str, str, int]:
        return self.body, self.key, self.occurrence

    @property
    def times(self) -> dict[str, float]:
        """What was measured, by name; empty if nothing was."""
        return {"us": self.us, "default_us": self.default_us, "slows": self.slows} if self.us else {}


@dataclass(frozen=True)
class CollectiveSettings:
    """The section of a plan.

    Attributes:
      nccl: NCCL's major and minor version, under which the settings were measured.
      devices: number of GPUs of the program.
      collectives: those that do not run as NCCL has it.
      default_us, tuned_us: measured time of a step in microseconds, with NCCL's defaults and with the settings.

    Raises:
      ChannelError: a value is impossible, or a collective has two settings.
    """

    nccl: str
    devices: int
    collectives: tuple[TunedCollective, ...] = ()
    default_us: float = 0.0
    tuned_us: float = 0.0

    def __post_init__(self) -> None:
        if not _VERSION.fullmatch(self.nccl):
            raise ChannelError(f"{self.nccl!r} is no version of NCCL; give the first two numbers, such as 2.28")
        if self.devices < 2:
            raise ChannelError(f"{self.devices} devices have no collectives; tune on at least 2")
        seen = set()
        for one in self.collectives:
            if one.identity in seen:
                raise ChannelError(f"occurrence {one.occurrence} of {one.key} in {one.body} has two settings")
            seen.add(one.identity)

    def as_json(self) -> dict[str, Any]:
        """The section as JSON values."""
        rows = [
            {"body": one.body, "key": one.key, "occurrence": one.occurrence, **vars(one.setting), **one.times}
            for one in self.collectives
        ]
        times = {"default_us": self.default_us, "tuned_us": self.tuned_us}
        return {"nccl": self.nccl, "devices": self.devices, **times, "collectives": rows}
