"""How well the contention model predicts pairs of shapes that it has never seen.

One thing after another is left out, with all pairs that contain it. A model is fitted to the remaining pairs. It
predicts the times of the left-out pairs from the measured times of their sides alone. These things are left out:

- `operators`: every shape of an operator, whatever its layout, library and launch order;
- `collectives`: every size of a collective, whatever its kind;
- `models`: everything of one model's train step. The size of its all-gathers over all GPUs identifies a model; its
  operators are those measured in pairs with them. All-gathers of several groups are ignored, because operators of every
  model overlap with them. Pairs of an operator that two models share are in neither's training set.

The target is the excess P - max(T_i, T_j): how much longer a pair takes (P) than with perfect overlap. T_i and T_j are
the times of both sides alone. The model competes with three simple predictions: `max` (perfect overlap), `sum` (no
overlap), and `constant`. In `constant`, each side runs at a constant rate while both run. The rates are the best ones
for the training pairs with the same roles: which side is a collective, and which side was launched first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dhelix.profiles.estimates.contention import ContentionModel, ends
from dhelix.profiles.hardware import Hardware
from dhelix.profiles.keys import CollectiveKey, Key, OperatorKey, PairKey
from dhelix.profiles.profile import Section

METHODS = ("model", "constant", "max", "sum")
LEFT_OUT = ("operators", "collectives", "models")

_ENOUGH = 5  # least number of operators for a standard error

_STEPS = np.linspace(0.02, 1.0, 50)
_RATES = np.stack(np.meshgrid(_STEPS, _STEPS, indexing="ij")).reshape(2, -1)


@dataclass(frozen=True)
class HeldOut:
    """Mean absolute errors over pairs of left-out shapes.

    Attributes:
      left_out: one of LEFT_OUT.
      roles: kinds of both sides, first launched first: `compute + collective`, ...; or `all`.
      shapes, pairs: numbers of shapes (or models) left out in turn, and of predictions.
      excess: mean measured excess in seconds, for scale.
      seconds: by method, mean |predicted - measured| excess.
      relative: the same, each error divided by max(T_i, T_j).
      gain: seconds by which the model's mean error is below that of the best other method.
      gain_error: standard error of `gain`, with the pairs of one operator as one observation; None for too few
        operators.
    """

    setting: str
    left_out: str
    roles: str
    shapes: int
    pairs: int
    excess: float
    seconds: Mapping[str, float]
    relative: Mapping[str, float]
    gain: float
    gain_error: float | None

    @property
    def verdict(self) -> str:
        """The model against the best other method: `best`, `worse`, or `even` (within two standard errors)."""
        if self.gain_error is None or abs(self.gain) <= 2 * self.gain_error:
            return "even"
        return "best" if self.gain > 0 else "worse"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


@dataclass(frozen=True)
class _Prediction:
    """`left_out` names what was left out, and `operator` the pair's first operator by shape. Times are in seconds."""

    roles: str
    left_out: str
    operator: str
    excess: float
    longer: float
    errors: Mapping[str, float]


def evaluate(section: Section, hardware: Hardware) -> tuple[HeldOut, ...]:
    """One result for each of LEFT_OUT and each combination of roles, and one for all roles together."""
    known = {k: t for k, t in section.pairs.items() if min(t.first_alone, t.second_alone) > 0.0}
    section = replace(section, pairs=known)
    results = []
    for left_out in LEFT_OUT:
        predictions = _predict_left_out(section, hardware, left_out)
        for roles in ("all", *sorted({p.roles for p in predictions})):
            chosen = [p for p in predictions if roles in ("all", p.roles)]
            if chosen:
                results.append(_summary(section.setting, left_out, roles, chosen))
    return tuple(results)


def _summary(setting: str, left_out: str, roles: str, predictions: Collection[_Prediction]) -> HeldOut:
    def mean(values: list[float]) -> float:
        return float(np.mean(values))

    seconds = {method: mean([p.errors[method] for p in predictions]) for method in METHODS}
    rival = min(METHODS[1:], key=seconds.__getitem__)
    return HeldOut(
        setting,
        left_out,
        roles,
        len({p.left_out for p in predictions}),
        len(predictions),
        mean([p.excess for p in predictions]),
        seconds,
        {method: mean([p.errors[method] / p.longer for p in predictions]) for method in METHODS},
        seconds[rival] - seconds["model"],
        _gain_error(predictions, rival),
    )


def _gain_error(predictions: Collection[_Prediction], rival: str) -> float | None:
    """Standard error of the mean gain over `rival`, clustered by operator; None for too few operators."""
    gains: dict[str, list[float]] = defaultdict(list)
    for p in predictions:
        gains[p.operator].append(p.errors[rival] - p.errors["model"])
    if len(gains) < _ENOUGH:
        return None
    overall = sum(map(sum, gains.values())) / len(predictions)
    deviations = [sum(of_one) - overall * len(of_one) for of_one in gains.values()]
    correction = len(gains) / (len(gains) - 1)
    return math.sqrt(correction * sum(d * d for d in deviations)) / len(predictions)


def _predict_left_out(section: Section, hardware: Hardware, left_out: str) -> list[_Prediction]:
    shown = _shown(section, left_out)
    showing: dict[str, list[PairKey]] = defaultdict(list)
    for pair in sorted(section.pairs, key=str):
        for thing in sorted(shown[pair]):
            showing[thing].append(pair)
    predictions = []
    for thing, tested in sorted(showing.items()):
        trained = {k: t for k, t in section.pairs.items() if thing not in shown[k]}
        if trained:
            predictions += _predict(section, replace(section, pairs=trained), tested, thing, hardware)
    return predictions


def _shown(section: Section, left_out: str) -> dict[PairKey, set[str]]:
    """The left-out things that each pair contains."""
    if left_out == "models":
        models = _models(section)
        return {pair: set().union(*(models.get(key, ()) for key in _operators(pair))) for pair in section.pairs}
    collectives = left_out == "collectives"
    return {
        pair: {_shape(k) for k in (pair.first, pair.second) if isinstance(k, CollectiveKey) == collectives}
        for pair in section.pairs
    }


def _shape(key: Key) -> str:
    """An operator's kind and sizes, without layout and library; a collective's bytes, without kind and mesh.

    All variants of a shape are left out together, because variants in the training set would reveal too much.
    """
    if isinstance(key, CollectiveKey):
        return f"{key.bytes}B"
    return f"{key.kind} {'x'.join(map(str, key.sizes)) or key.family}"


def _models(section: Section) -> dict[OperatorKey, set[str]]:
    """The models of each operator, named by their all-gathers of one group."""
    models: dict[OperatorKey, set[str]] = defaultdict(set)
    for pair in section.pairs:
        for key in (pair.first, pair.second):
            if isinstance(key, CollectiveKey) and key.kind == "all-gather" and key.groups == 1:
                for operator in _operators(pair):
                    models[operator].add(_shape(key))
    return models


def _operators(pair: PairKey) -> list[OperatorKey]:
    return [key for key in (pair.first, pair.second) if isinstance(key, OperatorKey)]


def _predict(
    section: Section, training: Section, tested: Collection[PairKey], left_out: str, hardware: Hardware
) -> list[_Prediction]:
    model = ContentionModel.fit(training, hardware)
    constants = _constant_rates(training)
    predictions = []
    for pair in tested:
        timing, roles = section.pairs[pair], _roles(pair)
        # If no training pair has these roles, there is no constant, and the model uses only the hardware's rates.
        if roles not in constants:
            continue
        first, second = timing.first_alone, timing.second_alone
        predicted = {
            "model": model.pair(pair.first, first, pair.second, second)[0],
            "constant": float(np.maximum(*ends(first, second, *constants[roles]))),
            "max": max(first, second),
            "sum": first + second,
        }
        errors = {method: abs(predicted[method] - timing.seconds) for method in METHODS}
        longer = max(first, second)
        operator = _shape((*_operators(pair), pair.first)[0])
        predictions.append(_Prediction(roles, left_out, operator, timing.seconds - longer, longer, errors))
    return predictions


def _constant_rates(training: Section) -> dict[str, tuple[float, float]]:
    """For each kind of roles, the rates with the least mean absolute error of the pair's seconds."""
    errors: dict[str, list[np.ndarray]] = defaultdict(list)
    for pair, timing in training.pairs.items():
        predicted = np.maximum(*ends(timing.first_alone, timing.second_alone, *_RATES))
        errors[_roles(pair)].append(np.abs(predicted - timing.seconds))
    best = {roles: int(np.argmin(np.mean(rows, axis=0))) for roles, rows in errors.items()}
    return {roles: (float(_RATES[0, n]), float(_RATES[1, n])) for roles, n in best.items()}


def _roles(pair: PairKey) -> str:
    sides = ("collective" if isinstance(k, CollectiveKey) else "compute" for k in (pair.first, pair.second))
    return " + ".join(sides)
