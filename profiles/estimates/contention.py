"""The pair model: how two operators slow each other down when they run at once.

While both run, each proceeds at its own rate; 1 is undisturbed. Then the rest of the longer one runs alone. For a GEMM
of 400 us (rate 0.8) and an all-gather of 300 us (rate 0.3):

    GEMM        ########## 500 us                first  = 400 / 0.8                          = 500
    all-gather  ###.....###### 650 us            second = 500 + (300 - 0.3 * 500)            = 650

`measured_rates` does the reverse: it turns a measured pair into its rates. If the second operator hardly starts before
the first one ends, its rate is near 0: the pair is serialised. This happens to a collective that a GEMM starves.

Rates of an unmeasured pair come from similar measured pairs. Each measured pair stores, for every combination of rates
on a grid, the error of its two predicted ends. A query averages the combinations with the least error over the measured
pairs, weighted by similarity. This is a local fit of the two-phase timeline above. It has three properties:

- A pair has little influence on a rate that it hardly determines because its other side was over soon.
- Errors are absolute, not squared, so outliers have little influence.
- With equal weights, the result would be the best constant slow-down.

Similarity is a distance over what decides who gets the SMs and the memory (`_kind`, `_features`). It is known for
unmeasured shapes too. The kind includes the library, because cuBLAS's GEMMs starve a collective and Triton's of the
same shape share the SMs. The features are length, use of memory and waves of tiles. Only pairs with the same roles
count: which side is a collective, and which was launched first. `benchmarks/prediction/` tests the model on left-out
shapes.
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

# Lower bound of all rates: a rate of 0 would make times infinite.
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

# Rates count as interpolated if a pair of the same kinds was measured within this distance (a factor of 4 in length).
# Chosen by the errors of left-out pairs on four H200s, which about double beyond it.
NEAR = 1.0
# Combinations of rates are averaged if their error exceeds the least error by about this or less.
_TOLERANCE = 0.01
# Weight of the error of the end that comes first. The end of the pair counts more, because the side that is done first
# may change between repetitions.
_FIRST_END = 0.5
# Pairs closer than this to a query count about equally. Predictions of left-out pairs are insensitive to the value.
# Two computations fill the GPU and run in turn, so more of these pairs can be averaged.
_WIDTH = 0.7
_WIDTH_OF_COMPUTATIONS = 2.0
# Number of nearest pairs that a query uses.
_NEIGHBOURS = 32

type Ends = tuple[float, float, float]


def ends(
    first: float | np.ndarray,
    second: float | np.ndarray,
    rate_first: float | np.ndarray,
    rate_second: float | np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds from the common start until each side is done, from the times alone and the rates (above 0)."""
    both = np.minimum(first / rate_first, second / rate_second)
    return both + (first - rate_first * both), both + (second - rate_second * both)


def measured_rates(timing: PairTiming) -> tuple[float, float]:
    """The rates that explain a measured pair, cut to [MIN_RATE, 1].

    Suppose the first side ends first, at time a. It did its T_1 in a, so r_1 = T_1 / a. The second side ends at b. It
    ran alone for b - a at rate 1, so it did T_2 - (b - a) while both ran: r_2 = (T_2 - (b - a)) / a. This is below 0 if
    the second side had not started at a.
    """
    both = max(min(timing.first, timing.second), 1e-12)
    return (
        _cut((timing.first_alone - (timing.first - both)) / both),
        _cut((timing.second_alone - (timing.second - both)) / both),
    )


def guessed_rates(first: Key, second: Key, hardware: Hardware) -> tuple[float, float]:
    """Rates of a pair that has no measured relatives.

    Computation and communication: the hardware's rates. Two computations, or two collectives over one kind of link, run
    in turn. A collective inside a node and one between nodes do not disturb each other.
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
    """Kinds and features of both sides of a pair; they decide its rates."""

    kinds: tuple[str, str]
    features: np.ndarray

    @classmethod
    def of(cls, first: Key, first_seconds: float, second: Key, second_seconds: float, hardware: Hardware) -> _Query:
        features = *_features(first, first_seconds, hardware), *_features(second, second_seconds, hardware)
        return cls((_kind(first), _kind(second)), np.array(features))


@dataclass(frozen=True, eq=False)
class _Class:
    """Measured pairs with the same roles.

    Attributes:
      kinds: `_kind` of each side. [pairs, 2]
      features: `_features` of both sides. [pairs, features]
      losses: error of every combination of rates in `RATES`, relative to the times alone. [pairs, combinations]
      width: distance at which pairs begin to count less.
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
        """The mean of the combinations whose error is close to the least. Rounded, so equal on every host."""
        distances = self.distances(pair)
        nearest = np.argsort(distances, kind="stable")[:_NEIGHBOURS]
        weights = (1.0 + (distances[nearest] / self.width) ** 2) ** -3
        error = weights @ self.losses[nearest] / weights.sum()
        share = np.exp((error.min() - error) / _TOLERANCE)
        first, second = RATES @ share / share.sum()
        return round(float(first), 6), round(float(second), 6)


@dataclass(frozen=True, eq=False)
class ContentionModel:
    """Rates of pairs, fitted to the measured pairs of one section. Deterministic; rates lie in [MIN_RATE, 1]."""

    hardware: Hardware
    classes: Mapping[tuple[bool, bool], _Class]

    @classmethod
    def fit(cls, section: Section, hardware: Hardware) -> ContentionModel:
        """From all pairs of `section`, each with its sides' times alone in the same measurement."""
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
        """How fast each side proceeds while both run.

        Args:
          first, second: `first` is launched first.
          first_seconds, second_seconds: times alone.
        """
        found = self.classes.get(_roles(first, second))
        if found is None or min(first_seconds, second_seconds) <= 0.0:
            return guessed_rates(first, second, self.hardware)
        return found.rates(_Query.of(first, first_seconds, second, second_seconds, self.hardware))

    def pair(self, first: Key, first_seconds: float, second: Key, second_seconds: float) -> Ends:
        """Seconds of the pair, and of each side until it is done."""
        rates = self.rates(first, first_seconds, second, second_seconds)
        return pair_seconds(first_seconds, second_seconds, rates)

    def knows(self, first: Key, second: Key) -> bool:
        """Whether any pair with these roles was measured."""
        return _roles(first, second) in self.classes

    def near(self, first: Key, first_seconds: float, second: Key, second_seconds: float) -> bool:
        """Whether a pair of the same kinds and similar sizes was measured, so that its rates are no guess."""
        found = self.classes.get(_roles(first, second))
        if found is None or min(first_seconds, second_seconds) <= 0.0:
            return False
        return found.near(_Query.of(first, first_seconds, second, second_seconds, self.hardware))


def pair_seconds(first: float, second: float, rates: tuple[float, float]) -> Ends:
    """Seconds of the pair, and of each side until it is done, from times alone and rates."""
    if min(first, second) <= 0.0:
        return max(first, second), first, second
    first_end, second_end = ends(first, second, *rates)
    return float(max(first_end, second_end)), float(first_end), float(second_end)


def _cut(rate: float) -> float:
    return min(max(rate, MIN_RATE), 1.0)


def _losses(timing: PairTiming) -> np.ndarray:
    """Error that each combination of rates makes in the pair's end and in the earlier side's end. [combinations]

    Relative to the geometric mean of the times alone, so that neither side alone sets the scale.
    """
    first_end, second_end = ends(timing.first_alone, timing.second_alone, *RATES)
    last = np.abs(np.maximum(first_end, second_end) - timing.seconds)
    early = first_end - timing.first if timing.first <= timing.second else second_end - timing.second
    return (last + _FIRST_END * np.abs(early)) / math.sqrt(timing.first_alone * timing.second_alone)


def _roles(first: Key, second: Key) -> tuple[bool, bool]:
    return isinstance(first, CollectiveKey), isinstance(second, CollectiveKey)


# Distance between different kinds, such as all-gather and reduce-scatter, in the units of `_features`.
_OTHER_KIND = 1.5
_MEMORY_BOUND = ("fusion", "copy", "other")
_LIBRARY = re.compile(":(cublas|cudnn|triton)")


def _kind(key: Key) -> str:
    """Groups operators that hold SMs alike: products and attention by library, all memory-bound operators as one."""
    if isinstance(key, CollectiveKey):
        return f"{key.kind} {key.implementation}"
    if key.kind in _MEMORY_BOUND:
        return "memory-bound"
    library = _LIBRARY.search(key.family)
    return f"{key.kind} {library[1]}" if library else key.kind


def _features(key: Key, seconds: float, hardware: Hardware) -> tuple[float, ...]:
    """What decides how one side disturbs and is disturbed, scaled so that 1 is a notable difference.

    For all: length. For an operator: its share of the memory bandwidth, and its tiles, which decide how many waves of
    blocks hold the SMs. For a collective: its mesh.
    """
    length = math.log2(seconds) / 2
    if isinstance(key, CollectiveKey):
        return length, math.log2(key.gpus_per_node), 2 * math.log2(key.nodes)
    return length, 4 * key.bytes / seconds / hardware.memory_bandwidth, math.log2(_tiles(key)) / 2


def _tiles(key: OperatorKey) -> int:
    """Number of 128 x 256 output tiles of a product, including its batch; 1 for other operators."""
    if key.kind not in ("gemm", "grouped-gemm") or len(key.sizes) < 3:
        return 1
    m, n, _, *batch = key.sizes
    return max(math.ceil(m / 128) * math.ceil(n / 256) * math.prod(batch), 1)
