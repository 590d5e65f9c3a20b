"""How well the contention model predicts pairs of shapes that it has never seen.

Every shape of an operator is left out in turn, with all pairs it is part of, whatever its layout and the launch
order; a model is fitted on the rest and predicts the pairs left out from the times alone. The same for every size of
a collective. What is judged is the excess P - max(T_i, T_j): how much longer a pair takes than in perfect overlap.

Three simple predictions stand beside it: `max` (perfect overlap), `sum` (in turn), and `constant`, a slow-down that
is the same for all: one rate for each side while both run, the best there is for the pairs trained on with the same
roles (which side is a collective, which was launched first).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dhelix.profiles.contention import ContentionModel, ends
from dhelix.profiles.hardware import Hardware
from dhelix.profiles.keys import CollectiveKey, Key, PairKey
from dhelix.profiles.profile import Section

METHODS = ("model", "constant", "max", "sum")
LEFT_OUT = ("operators", "collectives")

_STEPS = np.linspace(0.02, 1.0, 50)
_RATES = np.stack(np.meshgrid(_STEPS, _STEPS, indexing="ij")).reshape(2, -1)

type Solo = Callable[[Key], float | None]


@dataclass(frozen=True)
class HeldOut:
    """Mean absolute errors over pairs of shapes that were left out.

    Attributes:
      left_out: `operators` or `collectives`.
      roles: what meets what, first launched first: `compute + collective`, ...; or `all`.
      shapes, pairs: how many shapes were left out in turn, how many predictions were made.
      excess: mean measured excess in seconds, for scale.
      seconds: by method, mean |predicted - measured| excess.
      relative: the same, each error divided by max(T_i, T_j).
    """

    setting: str
    left_out: str
    roles: str
    shapes: int
    pairs: int
    excess: float
    seconds: Mapping[str, float]
    relative: Mapping[str, float]

    @property
    def model_is_best(self) -> bool:
        return min(self.seconds, key=self.seconds.__getitem__) == "model"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "model_is_best": self.model_is_best}


@dataclass(frozen=True)
class _Prediction:
    roles: str
    shape: str
    excess: float
    longer: float
    errors: Mapping[str, float]


def evaluate(section: Section, hardware: Hardware, solo: Solo) -> tuple[HeldOut, ...]:
    """One result for each thing left out and each kind of roles; `solo` as in `ContentionModel.fit`.

    Pairs with a side whose solo time is unknown take no part.
    """
    known = {k: t for k, t in section.pairs.items() if solo(k.first) and solo(k.second)}
    section = replace(section, pairs=known)
    results = []
    for left_out in LEFT_OUT:
        predictions = _predict_left_out(section, hardware, solo, left_out)
        for roles in ("all", *sorted({p.roles for p in predictions})):
            chosen = [p for p in predictions if roles in ("all", p.roles)]
            if chosen:
                results.append(_summary(section.setting, left_out, roles, chosen))
    return tuple(results)


def _summary(setting: str, left_out: str, roles: str, predictions: Collection[_Prediction]) -> HeldOut:
    def mean(values: list[float]) -> float:
        return float(np.mean(values))

    return HeldOut(
        setting,
        left_out,
        roles,
        len({p.shape for p in predictions}),
        len(predictions),
        mean([p.excess for p in predictions]),
        {method: mean([p.errors[method] for p in predictions]) for method in METHODS},
        {method: mean([p.errors[method] / p.longer for p in predictions]) for method in METHODS},
    )


def _predict_left_out(section: Section, hardware: Hardware, solo: Solo, left_out: str) -> list[_Prediction]:
    shapes: dict[str, list[PairKey]] = defaultdict(list)
    for pair in sorted(section.pairs, key=str):
        for shape in sorted(_shapes(pair, left_out)):
            shapes[shape].append(pair)
    predictions = []
    for shape, tested in sorted(shapes.items()):
        trained = {k: t for k, t in section.pairs.items() if shape not in _shapes(k, left_out)}
        if trained:
            training = replace(section, pairs=trained)
            predictions += _predict(section, training, tested, shape, hardware, solo)
    return predictions


def _shapes(pair: PairKey, left_out: str) -> set[str]:
    """What `pair` shows of shapes that may be left out."""
    collectives = left_out == "collectives"
    return {_shape(k) for k in (pair.first, pair.second) if isinstance(k, CollectiveKey) == collectives}


def _shape(key: Key) -> str:
    """An operator's kind and sizes, whatever its layout; a collective's bytes, whatever its kind and mesh."""
    if isinstance(key, CollectiveKey):
        return f"{key.bytes}B"
    return f"{key.kind} {'x'.join(map(str, key.sizes)) or key.family}"


def _predict(
    section: Section, training: Section, tested: Collection[PairKey], shape: str, hardware: Hardware, solo: Solo
) -> list[_Prediction]:
    model = ContentionModel.fit(training, hardware, solo)
    constants = _constant_rates(training, solo)
    predictions = []
    for pair in tested:
        first, second = solo(pair.first) or 0.0, solo(pair.second) or 0.0
        roles = _roles(pair)
        predicted = {
            "model": model.pair(pair.first, first, pair.second, second)[0],
            "max": max(first, second),
            "sum": first + second,
        }
        # Roles never trained on: a constant knows nothing of them, and the model no more than the hardware.
        if roles not in constants:
            continue
        predicted["constant"] = float(np.maximum(*ends(first, second, *constants[roles])))
        measured = section.pairs[pair].seconds
        errors = {method: abs(predicted[method] - measured) for method in METHODS}
        longer = max(first, second)
        predictions.append(_Prediction(roles, shape, measured - longer, longer, errors))
    return predictions


def _constant_rates(training: Section, solo: Solo) -> dict[str, tuple[float, float]]:
    """By roles, the rates with the least mean absolute error of the pair's seconds."""
    errors: dict[str, list[np.ndarray]] = defaultdict(list)
    for pair, timing in training.pairs.items():
        first, second = solo(pair.first) or 0.0, solo(pair.second) or 0.0
        predicted = np.maximum(*ends(first, second, *_RATES))
        errors[_roles(pair)].append(np.abs(predicted - timing.seconds))
    best = {roles: int(np.argmin(np.mean(rows, axis=0))) for roles, rows in errors.items()}
    return {roles: (float(_RATES[0, n]), float(_RATES[1, n])) for roles, n in best.items()}


def _roles(pair: PairKey) -> str:
    sides = ("collective" if isinstance(k, CollectiveKey) else "compute" for k in (pair.first, pair.second))
    return " + ".join(sides)
