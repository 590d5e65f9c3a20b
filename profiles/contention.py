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
is the best constant slow-down.

Likeness is a distance over features that are known for unmeasured shapes (`_features`); pairs of other kinds are
like the query at a price. Only pairs with the same roles count: which side is a collective, and which came first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dhelix.profiles import roofline
from dhelix.profiles.hardware import Hardware
from dhelix.profiles.keys import CollectiveKey, Key, OperatorKey
from dhelix.profiles.profile import PairTiming, Section

# A rate of 0 would stop a side for ever beside one that never ends, so nothing is slower.
MIN_RATE = 0.01
_STEPS = (MIN_RATE, 0.04, 0.08, 0.12, 0.18, 0.25, 0.32, 0.4, 0.48, 0.56, 0.64, 0.72, 0.8, 0.86, 0.92, 0.96, 1.0)
# Every combination of a rate of the first and a rate of the second side. [2, rates]
RATES = np.stack(np.meshgrid(_STEPS, _STEPS, indexing="ij")).reshape(2, -1)

# Rates are no guess if a pair of the same kinds was measured at this distance or closer.
NEAR = 2.0
# Combinations of rates are averaged where their error, relative to the longer side, is within about this of the least.
_TOLERANCE = 0.01
_WIDTHS = (0.5, 1.0, 2.0, 4.0, math.inf)

type Ends = tuple[float, float, float]


def overlap_effectiveness(first: float, second: float, pair: float) -> float:
    """DHelix section 3.2: OEF = (T_i + T_j - P_ij) / min(T_i, T_j).

    The share of the shorter operator that the longer one hides: 1 all of it, 0 none, below 0 worse than in turn.
    """
    return (first + second - pair) / min(first, second)


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
    roles = isinstance(first, CollectiveKey), isinstance(second, CollectiveKey)
    if roles == (False, True):
        return hardware.compute_rate, hardware.communication_rate
    if roles == (True, False):
        return hardware.communication_rate, hardware.compute_rate
    if isinstance(first, CollectiveKey) and isinstance(second, CollectiveKey):
        if (first.nodes > 1) != (second.nodes > 1):
            return 1.0, 1.0
    return 1.0, MIN_RATE


@dataclass(frozen=True, eq=False)
class _Query:
    """What decides the rates of a pair: kinds of both sides, features of both and how long one is next to the other."""

    kinds: tuple[str, str]
    features: np.ndarray

    @classmethod
    def of(cls, first: Key, first_seconds: float, second: Key, second_seconds: float, hardware: Hardware) -> _Query:
        sides = *_features(first, first_seconds, hardware), *_features(second, second_seconds, hardware)
        ratio = math.log2(first_seconds / second_seconds)
        return cls((_kind(first), _kind(second)), np.array([*sides, ratio]))


@dataclass(frozen=True, eq=False)
class _Pair(_Query):
    """A measured pair: what stands on its sides, and a row of `_Class.losses`."""

    sides: tuple[str, str]
    losses: np.ndarray


@dataclass(frozen=True, eq=False)
class _Class:
    """Measured pairs of one pair of roles.

    Attributes:
      kinds: what stands on each side. [pairs, 2]
      features: in units of likeness. [pairs, features]
      losses: error of every combination of rates in `RATES`, relative to the longer solo time. [pairs, rates]
      width: pairs closer than this to a query count about alike.
    """

    kinds: np.ndarray
    features: np.ndarray
    losses: np.ndarray
    width: float

    @classmethod
    def of(cls, pairs: Sequence[_Pair]) -> _Class:
        kinds = np.array([pair.kinds for pair in pairs])
        features = np.array([pair.features for pair in pairs])
        losses = np.array([pair.losses for pair in pairs])
        sides = np.unique([pair.sides for pair in pairs], return_inverse=True)[1].reshape(-1, 2)
        distances = np.array([_distances(kinds, features, k, f) for k, f in zip(kinds, features, strict=True)])
        return cls(kinds, features, losses, _best_width(distances, losses, sides))

    def distances(self, pair: _Query) -> np.ndarray:
        return _distances(self.kinds, self.features, np.array(pair.kinds), pair.features)

    def near(self, pair: _Query) -> bool:
        same_kinds = (self.kinds == np.array(pair.kinds)).all(axis=1)
        return bool((same_kinds & (self.distances(pair) <= NEAR)).any())

    def rates(self, pair: _Query) -> tuple[float, float]:
        """The mean of the combinations with hardly more than the least error; the same digits on every host."""
        error = _weights(self.distances(pair), self.width) @ self.losses
        share = np.exp((error.min() - error) / _TOLERANCE)
        first, second = RATES @ share / share.sum()
        return round(float(first), 6), round(float(second), 6)


def _best_width(distances: np.ndarray, losses: np.ndarray, sides: np.ndarray) -> float:
    """The width that predicts best when all pairs with the same first, or the same second side are left out.

    Args:
      distances: [pairs, pairs]
      losses: [pairs, rates]
      sides: a number per key. [pairs, 2]
    """
    others = [side[:, None] != side[None, :] for side in sides.T]

    def error(width: float) -> float:
        total = 0.0
        for other in others:
            best = np.argmin(np.round(_weights(distances, width, other) @ losses, 9), axis=1)
            total += float(np.take_along_axis(losses, best[:, None], axis=1).sum())
        return round(total, 9)

    return min(_WIDTHS, key=error)


def _weights(distances: np.ndarray, width: float, counted: np.ndarray | float = 1.0) -> np.ndarray:
    """How much each measured pair counts, 1 in total over the last axis; 0 in `counted` leaves one out."""
    weights = counted * (1.0 + (distances / width) ** 2) ** -2
    return weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)


def _distances(kinds: np.ndarray, features: np.ndarray, kinds_there: np.ndarray, there: np.ndarray) -> np.ndarray:
    unlike = (kinds != kinds_there).sum(axis=1) * _OTHER_KIND**2
    return np.sqrt(((features - there) ** 2).sum(axis=1) + unlike)


@dataclass(frozen=True, eq=False)
class ContentionModel:
    """Rates of pairs, learnt from the measured pairs of one section. Deterministic; rates lie in [MIN_RATE, 1]."""

    hardware: Hardware
    classes: Mapping[tuple[bool, bool], _Class]

    @classmethod
    def fit(
        cls, section: Section, hardware: Hardware, solo: Callable[[Key], float | None] | None = None
    ) -> ContentionModel:
        """From all pairs of `section` whose sides have a solo time.

        `solo` gives seconds of a key alone, or None if unknown: those of `section` if not given.
        """
        solo = solo or _solo_of(section)
        classes: dict[tuple[bool, bool], list[_Pair]] = defaultdict(list)
        for key, timing in sorted(section.pairs.items(), key=lambda item: str(item[0])):
            first, second = solo(key.first), solo(key.second)
            if first and second:
                query = _Query.of(key.first, first, key.second, second, hardware)
                sides = str(key.first), str(key.second)
                pair = _Pair(query.kinds, query.features, sides, _losses(first, second, timing))
                classes[_roles(key.first, key.second)].append(pair)
        return cls(hardware, {roles: _Class.of(pairs) for roles, pairs in classes.items()})

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


def _solo_of(section: Section) -> Callable[[Key], float | None]:
    def seconds(key: Key) -> float | None:
        timing = section.solo(key)
        return timing.seconds if timing else None

    return seconds


def _losses(first: float, second: float, timing: PairTiming) -> np.ndarray:
    """How wrong each combination of rates has the end of the pair and of the side done first. [rates]"""
    first_end, second_end = ends(first, second, *RATES)
    last = np.abs(np.maximum(first_end, second_end) - timing.seconds)
    early = first_end - timing.first if timing.first <= timing.second else second_end - timing.second
    return (last + np.abs(early)) / max(first, second)


def _roles(first: Key, second: Key) -> tuple[bool, bool]:
    return isinstance(first, CollectiveKey), isinstance(second, CollectiveKey)


# What a pair of another kind, say an all-gather for a reduce-scatter, differs by; in the units of `_features`.
_OTHER_KIND = 1.5
_MEMORY_BOUND = ("fusion", "copy", "other")


def _kind(key: Key) -> str:
    if isinstance(key, CollectiveKey):
        return f"{key.kind} {key.implementation}"
    return "memory-bound" if key.kind in _MEMORY_BOUND else key.kind


def _features(key: Key, seconds: float, hardware: Hardware) -> tuple[float, ...]:
    """What decides how one side disturbs and is disturbed, scaled so that 1 is a notable difference.

    Length; the share of the GPU's arithmetic, memory or link speed that it takes; how many tiles a product has, that
    is how many waves of blocks hold the SMs; for a collective its mesh.
    """
    length = math.log2(seconds) / 2
    if isinstance(key, CollectiveKey):
        bandwidth = hardware.inter_bandwidth if key.nodes > 1 else hardware.intra_bandwidth
        link = roofline.wire_bytes(key.kind, key.bytes, key.group_size) / seconds / bandwidth
        return length, 2 * link, 0.0, math.log2(key.gpus_per_node), 2 * math.log2(key.nodes)
    arithmetic = key.flops / seconds / hardware.peak_flops
    memory = key.bytes / seconds / hardware.memory_bandwidth
    return length, 4 * arithmetic, 4 * memory, math.log2(_tiles(key)) / 2, 0.0


def _tiles(key: OperatorKey) -> int:
    """Output tiles of 128 x 256 of a product, batch counted; 1 for anything else."""
    if key.kind not in ("gemm", "grouped-gemm") or len(key.sizes) < 3:
        return 1
    m, n, _, *batch = key.sizes
    return max(math.ceil(m / 128) * math.ceil(n / 256) * math.prod(batch), 1)
