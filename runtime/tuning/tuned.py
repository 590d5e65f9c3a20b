"""What a tuning has found, for people and as JSON.

tuned = dhelix.tune(train_step, state, batch)
print(tuned)                 # times of a step by who chose the settings, then a line for each round
tuned.plan                   # the order, if it was changed, and the settings
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dhelix.passes.framework.units import milliseconds
from dhelix.passes.plans.plan import Plan
from dhelix.profiles.channels.channel_model import ChannelSetting
from dhelix.runtime.tuning.bodies import Body, BodyTimes
from dhelix.runtime.tuning.step_search import DEFAULTS, Found, StepSettings


@dataclass(frozen=True)
class Iteration:
    """One round: an order of the step, and a tuning under this order.

    Attributes:
      number: of the round, from 1.
      seconds: of a step with the settings of this round.
      moved: how many computations have another order than in the round before.
      measured: number of measurements.
      kept: whether the step became faster, so that the round counts.
    """

    number: int
    seconds: float
    moved: int = 0
    measured: int = 0
    kept: bool = True

    def __str__(self) -> str:
        order = f"{self.moved} computations ordered anew" if self.number > 1 else "the step's order"
        end = "" if self.kept else ", which gains nothing more"
        return f"round {self.number}: {order}, {self.measured} measurements, {milliseconds(self.seconds)} a step{end}"


@dataclass(frozen=True)
class Tuned:
    """The result of tuning one step under one launch setting.

    Attributes:
      plan: the plan that was given, or an empty one, with the tuning section.
      seconds: of a step, by who chose the settings.
      bodies: the overlaps that were tuned.
      found: what the search found.
      noise: relative noise of a body's time.
      spent: seconds that tuning took, compilation included.
      notes: what people should know.
      chance: relative difference between two times of a step that may be chance.
      alone: seconds of each body's computation without collectives, as the channel model has it.
      iterations: the rounds of ordering and tuning, the first one included.
      sends: whether the step has all-to-alls or permutes, whose settings are those of the process.
    """

    plan: Plan
    seconds: Mapping[str, float]
    bodies: tuple[Body, ...]
    found: Found
    noise: float
    spent: float
    notes: tuple[str, ...] = ()
    chance: float = 0.0
    alone: Mapping[str, float] = field(default_factory=dict)
    iterations: tuple[Iteration, ...] = ()
    sends: bool = False

    @property
    def settings(self) -> StepSettings:
        """The settings in the plan."""
        assert self.plan.tuning is not None
        return {one.identity: one.setting for one in self.plan.tuning.collectives}

    @property
    def best(self) -> float:
        """Seconds of a step with the plan."""
        return min(self.seconds.values())

    @property
    def gain(self) -> float:
        """How many times faster a step is than with NCCL's defaults."""
        return self.seconds[DEFAULTS] / self.best

    def __str__(self) -> str:
        lines = [f"{name}: {milliseconds(seconds)} a step" for name, seconds in self.seconds.items()]
        tuning = self.plan.tuning
        assert tuning is not None
        what = f"{len(tuning.collectives)} collectives have settings" if tuning.collectives else "nothing gains"
        rounds = map(str, self.iterations) if len(self.iterations) > 1 else ()
        return "\n".join([f"{what}: {self.gain:.3f} x NCCL's defaults", *lines, *rounds, *self.notes])


@dataclass(frozen=True)
class Start:
    """What is known from a tuning under another order of the step.

    Attributes:
      settings: what it found.
      moved: fingerprints of the bodies whose order has changed since.
      alone: seconds of each body's computation without collectives.
    """

    settings: StepSettings
    moved: Collection[str]
    alone: Mapping[str, float]


def as_json(tuned: Tuned) -> dict[str, Any]:
    """All results as JSON values, times in seconds."""

    def rows(each: Mapping[ChannelSetting, BodyTimes]) -> list[dict[str, Any]]:
        return [
            {
                "channels": setting.channels,
                "chunk": setting.chunk,
                "communication": sum(times.collectives),
                "computation": sum(times.computations),
                "whole": times.whole,
            }
            for setting, times in each.items()
        ]

    assert tuned.plan.tuning is not None
    return {
        "seconds": dict(tuned.seconds),
        "gain": tuned.gain,
        "noise": tuned.noise,
        "measured": tuned.found.measured,
        "spent": tuned.spent,
        "notes": list(tuned.notes),
        "sends": tuned.sends,
        "iterations": [str(one) for one in tuned.iterations],
        "bodies": [
            {
                "body": body.fingerprint,
                "name": body.name,
                "runs": body.runs,
                "kind": " ".join(tuned.found.kinds[body.fingerprint]).strip(),
                "collectives": [list(identity) for identity in body.collectives],
                "default": json.loads(json.dumps(vars(body.default))),
                "map": rows(tuned.found.maps[body.fingerprint]),
            }
            for body in tuned.bodies
        ],
        "tuning": tuned.plan.tuning.as_json(),
    }
