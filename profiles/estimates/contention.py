"""What two operators do to each other when they run at once: the pair model.

While both run, each proceeds at a rate of its own, 1 being undisturbed; what is left of the longer one then runs
alone. For a GEMM of 400 us (rate 0.8) beside an all-gather of 300 us (rate 0.3):

    GEMM        ########## 500 us                first  = 400 / 0.8                          = 500
    all-gather  ###.....###### 650 us            second = 500 + (300 - 0.3 * 500)            = 650

`measured_rates` goes the other way, from a measured pair to its rates. A second operator that hardly starts before
the first one ends, as a collective starved by a GEMM, has a rate near 0: the pair is serialised.

Rates of unmeasured pairs come from measured ones that are like them. Each measured pair knows, for every
combination of rates on a grid, how wrong its two ends would have come out; a query takes the combinations with the
least error over the measured pairs, weighted by likeness. This is a local fit of the two-phase timeline above, and
three things follow. A pair that says little about a rate (because the other side was over soon) has little
influence on it. The errors are absolute, so outliers have little influence too. And with equal weights for all it
would be the best constant slow-down.

Likeness is a distance over what decides who gets the SMs and the memory (`_kind`, `_features`) and is known for
unmeasured shapes too: the kind and the library, for cuBLAS's GEMMs starve a collective where Triton's of the same
shape share; length, use of memory, waves of tiles. Only pairs with the same roles count: which side is a collective,
and which came first. What shapes that were left out say of all this: `benchmarks/prediction/`.
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

# A rate of 0 would stop a side for ever beside one that never ends, so nothing is slower.
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
# Every combination of a rate of the first and a rate of the second side. [2, rates]
RATES = np.stack(np.meshgrid(_STEPS, _STEPS, indexing="ij")).reshape(2, -1)

# Rates are no guess if a pair of the same kinds was measured at this distance or closer, a factor of 4 in length. On
# four H200s pairs that were left out came out 5 % wrong up to here, 10 % and more beyond, and where kinds were unknown.
NEAR = 1.0
# Combinations of rates are averaged where their error is within about this of the least.
_TOLERANCE = 0.01
# What an error of the end that comes first weighs. The end of the pair counts more: who is done first may flip from
# one repetition to the next.
_FIRST_END = 0.5
# Pairs closer than this to a query count about alike. Predictions of pairs left out on four H200s hardly change from
# half to one and a half of it. Two computations fill the GPU and run in turn, so of these more can be averaged.
_WIDTH = 0.7
_WIDTH_OF_COMPUTATIONS = 2.0
# Pairs that are farther than so many others count for nothing, and cost nothing.
_NEIGHBOURS = 32

type Ends = tuple[float, float, float]


def ends(
    first: float | np.ndarray,
    second: float | np.ndarray,
    rate_first: float | np.ndarray,
    rate_second: float | np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """When each side is done: solo seconds and rates (above 0) in, seconds from the common start out."""
    both = np.minimum(first / rate_first, second / rate_second)
    return both + (first - rate_first * both), both + (second - rate_second * both)


def measured_rates(timing: PairTiming) -> tuple[float, float]:
    """The rates that explain a measured pair.

    Say the first is done first, at a. It has done its T_1 in a, so r_1 = T_1 / a. The second is done at b, has run
    alone for b - a at rate 1, and so has done T_2 - (b - a) while both ran: r_2 = (T_2 - (b - a)) / a. That is below
    0 if it had not started at a yet. Rates are cut to [MIN_RATE, 1].
    """
    both = max(min(timing.first, timing.second), 1e-12)
    return (
        _cut((timing.first_alone - (timing.first - both)) / both),
        _cut((timing.second_alone - (timing.second - both)) / both),
    )


def guessed_rates(first: Key, second: Key, hardware: Hardware) -> tuple[float, float]:
    """What to believe of a pair before anything like it was measured.

    Computation beside communication: the hardware's rates. Two computations fill the GPU each, two collectives over
    one kind of link share it: in turn. A collective inside a node leaves the network free: no contention.
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
    """What decides the rates of a pair: kinds and features of both sides."""

    kinds: tuple[str, str]
    features: np.ndarray

    @classmethod
    def of(cls, first: Key, first_seconds: float, second: Key, second_seconds: float, hardware: Hardware) -> _Query:
        features = *_features(first, first_seconds, hardware), *_features(second, second_seconds, hardware)
        return cls((_kind(first), _kind(second)), np.array(features))


@dataclass(frozen=True, eq=False)
class _Class:
    """Measured pairs of one pair of roles.

    Attributes:
      kinds: what stands on each side. [pairs, 2]
      features: in units of likeness. [pairs, features]
      losses: error of every combination of rates in `RATES`, relative to the solo times. [pairs, rates]
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
        """The mean of the combinations with hardly more than the least error; the same digits on every host."""
        distances = self.distances(pair)
        nearest = np.argsort(distances, kind="stable")[:_NEIGHBOURS]
        weights = (1.0 + (distances[nearest] / self.width) ** 2) ** -3
        error = weights @ self.losses[nearest] / weights.sum()
        share = np.exp((error.min() - error) / _TOLERANCE)
        first, second = RATES @ share / share.sum()
        return round(float(first), 6), round(float(second), 6)


@dataclass(frozen=True, eq=False)
class ContentionModel:
    """Rates of pairs, learnt from the measured pairs of one section. Deterministic; rates lie in [MIN_RATE, 1]."""

    hardware: Hardware
    classes: Mapping[tuple[bool, bool], _Class]

    @classmethod
    def fit(cls, section: Section, hardware: Hardware) -> ContentionModel:
        """From all pairs of `section`, each by what its sides took alone beside it."""
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
        """How fast each side proceeds while both run; `first` is launched first, seconds are those alone."""
        found = self.classes.get(_roles(first, second))
        if found is None or min(first_seconds, second_seconds) <= 0.0:
            return guessed_rates(first, second, self.hardware)
        return found.rates(_Query.of(first, first_seconds, second, second_seconds, self.hardware))

    def pair(self, first: Key, first_seconds: float, second: Key, second_seconds: float) -> Ends:
        """Seconds of the pair, and until each side is done."""
        rates = self.rates(first, first_seconds, second, second_seconds)
        return pair_seconds(first_seconds, second_seconds, rates)

    def knows(self, first: Key, second: Key) -> bool:
        """Whether any pair with these roles was measured."""
        return _roles(first, second) in self.classes

    def near(self, first: Key, first_seconds: float, second: Key, second_seconds: float) -> bool:
        """Whether a pair of the same kinds and like sizes was measured, so that its rates are no guess."""
        found = self.classes.get(_roles(first, second))
        if found is None or min(first_seconds, second_seconds) <= 0.0:
            return False
        return found.near(_Query.of(first, first_seconds, second, second_seconds, self.hardware))


def pair_seconds(first: float, second: float, rates: tuple[float, float]) -> Ends:
    """Seconds of the pair, and until each side is done, from times alone and rates."""
    if min(first, second) <= 0.0:
        return max(first, second), first, second
    first_end, second_end = ends(first, second, *rates)
    return float(max(first_end, second_end)), float(first_end), float(second_end)


def _cut(rate: float) -> float:
    return min(max(rate, MIN_RATE), 1.0)


def _losses(timing: PairTiming) -> np.ndarray:
    """How wrong each combination of rates has the end of the pair and of the side done first. [rates]

    Relative to the geometric mean of the times alone: 10 us matter more beside two short operators, and neither side
    alone sets the measure.
    """
    first_end, second_end = ends(timing.first_alone, timing.second_alone, *RATES)
    last = np.abs(np.maximum(first_end, second_end) - timing.seconds)
    early = first_end - timing.first if timing.first <= timing.second else second_end - timing.second
    return (last + _FIRST_END * np.abs(early)) / math.sqrt(timing.first_alone * timing.second_alone)


def _roles(first: Key, second: Key) -> tuple[bool, bool]:
    return isinstance(first, CollectiveKey), isinstance(second, CollectiveKey)


# What a pair of another kind, say an all-gather for a reduce-scatter, differs by; in the units of `_features`.
_OTHER_KIND = 1.5
_MEMORY_BOUND = ("fusion", "copy", "other")
_LIBRARY = re.compile(":(cublas|cudnn|triton)")


def _kind(key: Key) -> str:
    """Operators that hold SMs alike: products and attention by library, all that stream memory as one."""
    if isinstance(key, CollectiveKey):
        return f"{key.kind} {key.implementation}"
    if key.kind in _MEMORY_BOUND:
        return "memory-bound"
    library = _LIBRARY.search(key.family)
    return f"{key.kind} {library[1]}" if library else key.kind


def _features(key: Key, seconds: float, hardware: Hardware) -> tuple[float, ...]:
    """What decides how one side disturbs and is disturbed, scaled so that 1 is a notable difference.

    Length; of an operator the share of memory bandwidth that it takes, and its tiles, that is how many waves of blocks
    hold the SMs; of a collective its mesh.
    """
    length = math.log2(seconds) / 2
    if isinstance(key, CollectiveKey):
        return length, math.log2(key.gpus_per_node), 2 * math.log2(key.nodes)
    return length, 4 * key.bytes / seconds / hardware.memory_bandwidth, math.log2(_tiles(key)) / 2


def _tiles(key: OperatorKey) -> int:
    """Output tiles of 128 x 256 of a product, batch counted; 1 for anything else."""
    if key.kind not in ("gemm", "grouped-gemm") or len(key.sizes) < 3:
        return 1
    m, n, _, *batch = key.sizes
    return max(math.ceil(m / 128) * math.ceil(n / 256) * math.prod(batch), 1)
