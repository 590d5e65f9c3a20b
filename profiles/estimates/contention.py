"""The contention model: how two operators (the sides of a pair) slow each other down when they run at once.

While both sides run, each proceeds at its own rate; a rate of 1 is its speed alone. When one side has ended, the rest
of the other side runs alone. For a GEMM of 400 us (rate 0.8) and an all-gather of 300 us (rate 0.3):

    GEMM        ########## 500 us                first  = 400 / 0.8                          = 500
    all-gather  ###.....###### 650 us            second = 500 + (300 - 0.3 * 500)            = 650

`measured_rates` does the reverse: it computes the rates from a measured pair. If the second side hardly proceeds before
the first side ends, its rate is near 0: the two run one after the other. For example, a GEMM may leave no SMs to a
collective.

Rates of an unmeasured pair come from similar measured pairs. The model has a grid of combinations (first rate, second
rate). For each measured pair and each combination, it stores the error: how far the two predicted ends are from the
measured ends. For an unmeasured pair, the model computes the mean error of each combination over the measured pairs,
weighted by their similarity to the unmeasured pair. The result is the average of the combinations with the least mean
error. This method has three properties:

- A pair has little influence on the rate of its longer side if the shorter side ended soon.
- Errors are absolute, not squared, so outliers have little influence.
- If all pairs had equal weights, the result would be the constant pair of rates that fits best.

Pairs are similar if their sides have equal kinds (`_kind`) and similar features (`_features`). Kinds and features
decide which side gets the SMs and the memory bandwidth. They are known for unmeasured shapes, too. The kind includes
the library: GEMMs of cuBLAS leave no SMs to a collective, but GEMMs of Triton with the same shape share the SMs. The
features are the time alone, an operator's use of memory bandwidth and number of tiles, and a collective's mesh. Only
pairs with the same roles are compared. The roles say which sides are collectives, and which side is launched first.
`benchmarks/prediction/` tests the model on shapes that are left out of the fit.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dhelix.profiles.hardware import Hardware
from dhelix.profiles.keys import CollectiveKey, Key, OperatorKey
from dhelix.profiles.profile import PairTiming, Section

# Lower bound of all rates. A rate of 0 would make times infinite.
MIN_RATE = 0.01
_STEPS = (
    MIN_RATE,
    0.03,
    0.06,
    0.1,
    0.15,
    0.2,
    0.25,
    0.3,
    0.36,
    0.42,
    0.48,
    0.54,
    0.6,
    0.66,
    0.72,
    0.78,
    0.84,
    0.9,
    0.95,
    1.0,
)
# Every combination of a rate of the first side and a rate of the second side. [2, combinations]
RATES = np.stack(np.meshgrid(_STEPS, _STEPS, indexing="ij")).reshape(2, -1)

# Rates count as interpolated if a pair of the same kinds was measured within this distance. The distance corresponds to
# a factor of 4 in the time of one side. Beyond it, errors for left-out pairs on four H200s are about twice as large.
NEAR = 1.0
# The result is the average of the combinations of rates whose error exceeds the least error by at most about this.
_TOLERANCE = 0.01
# Weight of the error in the end of the side that ends first. The end of the whole pair has weight 1. The first end has
# less weight, because the other side may end first when the measurement is repeated.
_FIRST_END = 0.5
# Measured pairs closer than this to the unmeasured pair have about equal weight. Predictions for left-out pairs hardly
# depend on this value. The second value is for pairs of two computations. Two computations run one after the other, so
# more pairs can be averaged.
_WIDTH = 0.7
_WIDTH_OF_COMPUTATIONS = 2.0
# Number of measured pairs that decide the rates of an unmeasured pair: the nearest ones.
_NEIGHBOURS = 32

# Where the features of a pair whose first side is a collective say how many nodes it spans; see `_features`.
_NODES_OF_FIRST = 2

type Ends = tuple[float, float, float]


def ends(
    first: float | np.ndarray,
    second: float | np.ndarray,
    rate_first: float | np.ndarray,
    rate_second: float | np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The time at which each side ends, in seconds after the common start.

    Args:
      first, second: times alone in seconds.
      rate_first, rate_second: rates while both run, above 0.
    """
    both = np.minimum(first / rate_first, second / rate_second)
    return both + (first - rate_first * both), both + (second - rate_second * both)


def measured_rates(timing: PairTiming) -> tuple[float, float]:
    """The rates of both sides in a measured pair, limited to [MIN_RATE, 1].

    T_1 and T_2 are the times alone. Suppose that the first side ends first, at time a. Then its rate is r_1 = T_1 / a.
    The second side ends at time b. From a to b it runs alone, at rate 1. So T_2 - (b - a) of its time alone is done at
    time a. Its rate is r_2 = (T_2 - (b - a)) / a, which is below 0 if the second side starts after a.
    """
    both = max(min(timing.first, timing.second), 1e-12)
    return (
        _cut((timing.first_alone - (timing.first - both)) / both),
        _cut((timing.second_alone - (timing.second - both)) / both),
    )


def guessed_rates(first: Key, second: Key, hardware: Hardware) -> tuple[float, float]:
    """The rates of a pair if no pair with the same roles was measured.

    A computation and a collective have the rates in `hardware`. Two computations run one after the other, and so do two
    collectives over the same kind of link. A collective inside a node and a collective between nodes do not slow each
    other down.
    """
    if isinstance(first, CollectiveKey) and isinstance(second, CollectiveKey):
        return (1.0, 1.0) if (first.nodes > 1) != (second.nodes > 1) else (1.0, MIN_RATE)
    if isinstance(second, CollectiveKey):
        return hardware.rates(second.nodes > 1)
    if isinstance(first, CollectiveKey):
        compute, communication = hardware.rates(first.nodes > 1)
        return communication, compute
    return 1.0, MIN_RATE


@dataclass(frozen=True, eq=False)
class _Query:
    """What decides the rates of a pair: the kinds and the features of both sides."""

    kinds: tuple[str, str]
    features: np.ndarray

    @classmethod
    def of(cls, first: Key, first_seconds: float, second: Key, second_seconds: float, hardware: Hardware) -> _Query:
        features = *_features(first, first_seconds, hardware), *_features(second, second_seconds, hardware)
        return cls((_kind(first), _kind(second)), np.array(features))


@dataclass(frozen=True, eq=False)
class _Class:
    """All measured pairs with the same roles.

    Attributes:
      kinds: `_kind` of each side. [pairs, 2]
      features: `_features` of both sides. [pairs, features]
      losses: `_losses` of each pair: its error for each combination of rates. [pairs, combinations]
      width: pairs closer than this to an unmeasured pair have about equal weight.
    """

    kinds: np.ndarray
    features: np.ndarray
    losses: np.ndarray
    width: float

    def distances(self, pair: _Query) -> np.ndarray:
        unlike = (self.kinds != np.array(pair.kinds)).sum(axis=1) * _OTHER_KIND**2
        return np.sqrt(((self.features - pair.features) ** 2).sum(axis=1) + unlike)

    def near(self, pair: _Query) -> bool:
        same_kinds = (self.kinds == np.array(pair.kinds)).all(axis=1)
        return bool((same_kinds & (self.distances(pair) <= NEAR)).any())

    def rates(self, pair: _Query) -> tuple[float, float]:
        """The rates that fit the nearest measured pairs best."""
        distances = self.distances(pair)
        nearest = np.argsort(distances, kind="stable")[:_NEIGHBOURS]
        weights = (1.0 + (distances[nearest] / self.width) ** 2) ** -3
        return _best(weights @ self.losses[nearest] / weights.sum())


@dataclass(frozen=True, eq=False)
class ContentionModel:
    """Predicts rates of pairs from the measured pairs of one section. Rates lie in [MIN_RATE, 1]."""

    hardware: Hardware
    classes: Mapping[tuple[bool, bool], _Class]

    @classmethod
    def fit(cls, section: Section, hardware: Hardware) -> ContentionModel:
        """The model for the measured pairs of `section`.

        A pair's measurement contains the times of its sides alone. The model uses these times, not those in the
        section's tables of single operators.
        """
        pairs: dict[tuple[bool, bool], list[tuple[_Query, np.ndarray]]] = defaultdict(list)
        for key, timing in sorted(section.pairs.items(), key=lambda item: str(item[0])):
            if min(timing.first_alone, timing.second_alone) > 0.0:
                query = _Query.of(key.first, timing.first_alone, key.second, timing.second_alone, hardware)
                pairs[_roles(key.first, key.second)].append((query, _losses(timing)))
        classes = {}
        for roles, measured in pairs.items():
            queries, losses = zip(*measured, strict=True)
            kinds, features = (np.array([getattr(q, name) for q in queries]) for name in ("kinds", "features"))
            width = _WIDTH if any(roles) else _WIDTH_OF_COMPUTATIONS
            classes[roles] = _Class(kinds, features, np.array(losses), width)
        return cls(hardware, classes)

    def rates(self, first: Key, first_seconds: float, second: Key, second_seconds: float) -> tuple[float, float]:
        """The rates of both sides while both run.

        Args:
          first, second: keys of the sides; `first` is launched first.
          first_seconds, second_seconds: times alone, in seconds.
        """
        found = self.classes.get(_roles(first, second))
        if found is None or min(first_seconds, second_seconds) <= 0.0:
            return guessed_rates(first, second, self.hardware)
        return found.rates(_Query.of(first, first_seconds, second, second_seconds, self.hardware))

    def pair(self, first: Key, first_seconds: float, second: Key, second_seconds: float) -> Ends:
        """Time of the pair, and time from its start to the end of each side, in seconds."""
        rates = self.rates(first, first_seconds, second, second_seconds)
        return pair_seconds(first_seconds, second_seconds, rates)

    def typical(self, between_nodes: bool) -> tuple[float, float] | None:
        """The rates of compute and of a collective that starts before it, which fit all measured pairs best.

        Args:
          between_nodes: whether the collectives are those between nodes, or those inside a node.

        Returns:
          None if no such pair was measured.
        """
        found = self.classes.get((True, False))
        if found is None:
            return None
        across = found.features[:, _NODES_OF_FIRST] > 0.0
        if not (across == between_nodes).any():
            return None
        communication, compute = _best(found.losses[across == between_nodes].mean(axis=0))
        return compute, communication

    def knows(self, first: Key, second: Key) -> bool:
        """Whether any pair with the same roles was measured."""
        return _roles(first, second) in self.classes

    def near(self, first: Key, first_seconds: float, second: Key, second_seconds: float) -> bool:
        """Whether a pair of the same kinds and with similar features was measured. If not, the rates are a guess."""
        found = self.classes.get(_roles(first, second))
        if found is None or min(first_seconds, second_seconds) <= 0.0:
            return False
        return found.near(_Query.of(first, first_seconds, second, second_seconds, self.hardware))


def pair_seconds(first: float, second: float, rates: tuple[float, float]) -> Ends:
    """Time of the pair, and time from its start to the end of each side, in seconds.

    Args:
      first, second: times alone in seconds.
      rates: the rates of both sides while both run.
    """
    if min(first, second) <= 0.0:
        return max(first, second), first, second
    first_end, second_end = ends(first, second, *rates)
    return float(max(first_end, second_end)), float(first_end), float(second_end)


def _best(error: np.ndarray) -> tuple[float, float]:
    """The average of the combinations of rates whose error is close to the least error.

    The result is rounded, so that it is equal on every host.

    Args:
      error: the mean error of each combination. [combinations]
    """
    share = np.exp((error.min() - error) / _TOLERANCE)
    first, second = RATES @ share / share.sum()
    return round(float(first), 6), round(float(second), 6)


def _cut(rate: float) -> float:
    return min(max(rate, MIN_RATE), 1.0)


def _losses(timing: PairTiming) -> np.ndarray:
    """The error of each combination of `RATES` for a measured pair. [combinations]

    The error is a weighted sum of two errors: of the time at which the pair ends, and of the time at which its first
    side ends. It is
    a fraction of the geometric mean of the times alone, so that both sides set the scale.
    """
    first_end, second_end = ends(timing.first_alone, timing.second_alone, *RATES)
    last = np.abs(np.maximum(first_end, second_end) - timing.seconds)
    early = first_end - timing.first if timing.first <= timing.second else second_end - timing.second
    return (last + _FIRST_END * np.abs(early)) / math.sqrt(timing.first_alone * timing.second_alone)


def _roles(first: Key, second: Key) -> tuple[bool, bool]:
    return isinstance(first, CollectiveKey), isinstance(second, CollectiveKey)


# The distance between two kinds, such as all-gather and reduce-scatter, in the units of `_features`.
_OTHER_KIND = 1.5
_MEMORY_BOUND = ("fusion", "copy", "other")
_LIBRARY = re.compile(":(cublas|cudnn|triton)")


def _kind(key: Key) -> str:
    """The kind of a key. Operators of the same kind occupy SMs in the same way.

    The kind of a product or attention includes its library. The kind of a collective includes its implementation. All
    memory-bound operators are one kind.
    """
    if isinstance(key, CollectiveKey):
        return f"{key.kind} {key.implementation}"
    if key.kind in _MEMORY_BOUND:
        return "memory-bound"
    library = _LIBRARY.search(key.family)
    return f"{key.kind} {library[1]}" if library else key.kind


def _features(key: Key, seconds: float, hardware: Hardware) -> tuple[float, ...]:
    """The features of one side: numbers that decide how much it slows the other side of a pair down.

    They are scaled so that a difference of 1 is notable (`NEAR`). The first feature is the logarithm of the time alone.
    An operator also has its share of the memory bandwidth and the logarithm of its number of tiles. The tiles decide
    how many waves of thread blocks occupy the SMs. A collective also has the logarithms of its GPUs per node and of its
    nodes.
    """
    length = math.log2(seconds) / 2
    if isinstance(key, CollectiveKey):
        return length, math.log2(key.gpus_per_node), 2 * math.log2(key.nodes)
    return length, 4 * key.bytes / seconds / hardware.memory_bandwidth, math.log2(_tiles(key)) / 2


def _tiles(key: OperatorKey) -> int:
    """Number of 128 x 256 tiles in the output of a product, batch included; 1 for other operators."""
    if key.kind not in ("gemm", "grouped-gemm") or len(key.sizes) < 3:
        return 1
    m, n, _, *batch = key.sizes
    return max(math.ceil(m / 128) * math.ceil(n / 256) * math.prod(batch), 1)
