"""Costs of a step whose collectives have settings: the times that `dhelix tune` has measured, on top of a profile.

    model = tuned_model(CostModel.find("H200", "nvlink"), plan.tuning)
    StrandPairing(model=model).run(module, context)        # orders a step for collectives with these settings

A tuning measures a collective inside a step, under NCCL's defaults and under its setting. A profile has the time of the
collective alone. So the time alone with the setting is the profile's time, times the ratio of the two measured ones. It
stands in the model's profile under a key with the configuration. What the collective does to computation changes, too:
the loss of speed that the profile gives is multiplied by `TunedCollective.slows`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dhelix.passes.evaluation.costs import CostModel, Costs
from dhelix.passes.hlo import Computation, Instruction
from dhelix.passes.plans.plan import PlanError
from dhelix.passes.plans.plan_operators import PlanOperators
from dhelix.passes.tuning.collective_settings import CollectiveSettings, TunedCollective
from dhelix.profiles import keys
from dhelix.profiles.channels.nccl_setting import AS_NCCL_HAS_IT
from dhelix.profiles.estimates.contention import MIN_RATE
from dhelix.profiles.keys import CollectiveKey, Key
from dhelix.profiles.profile import Section, Timing


@dataclass(frozen=True)
class TunedModel(CostModel):
    """A cost model that knows the settings of a program's collectives. `tuned_model` makes it."""

    tuning: CollectiveSettings | None = field(default=None, kw_only=True)

    def costs(self) -> TunedCosts:
        base = super().costs()
        parts = base.hardware, base.estimator, self.implementation, base.in_step, base.matmuls
        return TunedCosts(*parts, tuning=self.tuning)


def tuned_model(model: CostModel, tuning: CollectiveSettings | None) -> CostModel:
    """A model with the measured times of a plan's settings; `model` itself if the plan has no times."""
    rows = [one for one in tuning.collectives if one.us and one.default_us] if tuning is not None else []
    if not rows:
        return model
    ratios: dict[CollectiveKey, list[float]] = defaultdict(list)
    for one in rows:
        ratios[_key(one)].append(one.us / one.default_us)
    times: dict[CollectiveKey, Timing] = {}
    for key, found in ratios.items():
        alone = model.estimator.solo(replace(key, configuration=AS_NCCL_HAS_IT))
        ratio = statistics.median(found)
        times[key] = Timing(ratio * alone.seconds, ratio * alone.spread, len(found), "trace")
    profile = model.profile.with_section(Section(model.setting, collectives=times))
    made: dict[str, Any] = {n: getattr(model, n) for n in ("setting", "matmuls", "gpus_per_node", "inter_bandwidth")}
    return TunedModel(profile, **made, tuning=tuning)


class TunedCosts(Costs):
    """Costs in which a collective with a setting has its own time, and slows computation as much as was measured."""

    def __init__(self, *parts: Any, tuning: CollectiveSettings | None) -> None:
        super().__init__(*parts)
        rows = () if tuning is None else tuning.collectives
        self._settings = {one.identity: (one, _key(one)) for one in rows if one.us and one.default_us}
        self._found: dict[Computation, dict[Instruction, tuple[TunedCollective, CollectiveKey]]] = {}

    def key(self, instruction: Instruction) -> Key | None:
        found = self._of(instruction.computation).get(instruction)
        return super().key(instruction) if found is None else found[1]

    def rates(
        self, compute: Instruction, collective: Instruction, collective_first: bool, running: bool = False
    ) -> tuple[float, float]:
        own, its = super().rates(compute, collective, collective_first, running)
        found = self._of(collective.computation).get(collective)
        if found is None or own <= MIN_RATE:  # what cannot run beside a collective cannot with settings either
            return own, its
        return max(1.0 / (1.0 + found[0].slows * (1.0 / own - 1.0)), MIN_RATE), its

    def _of(self, computation: Computation) -> Mapping[Instruction, tuple[TunedCollective, CollectiveKey]]:
        """The collectives of a computation that have settings, each with its row of the plan and its key."""
        known = self._found.get(computation)
        if known is None:
            operators = PlanOperators(computation, self.operator_keys)
            identities = ((i, (operators.fingerprint, *identity)) for i, identity in operators.identities.items())
            known = {i: self._settings[identity] for i, identity in identities if identity in self._settings}
            self._found[computation] = known
        return known


def _key(one: TunedCollective) -> CollectiveKey:
    """The key of a collective with its setting. Raises PlanError if the plan's key is not that of a collective."""
    key = keys.parse(one.key)
    if not isinstance(key, CollectiveKey):
        raise PlanError(f"{one.key!r} has settings, but is no collective: tune again with `dhelix tune`")
    return replace(key, configuration=one.setting)
