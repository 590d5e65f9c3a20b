"""Estimates times of operators and collectives alone, from measured relatives: keys that differ only in some parts.

Collectives follow AMSP section IV-A. A collective op has v bytes and runs over p0 GPUs on each of p1 nodes. Its time is
t(op, v, p0 x p1) = v / w(op, v, p0 x p1). The effective bandwidth w is measured on a grid of sizes v. Between these
sizes, times are interpolated linearly on log-log axes. Outside the grid, times are proportional to the roofline's
times. So latency decides below the grid, and a constant bandwidth decides above it.

    64 MiB 250 us, 256 MiB 950 us measured   ->   128 MiB is 487 us; 512 MiB is near 1900 us

Operators of one family (`OperatorKey.family`: same types, layouts, library) differ only in size. The *slowness* of a
measured operator is its measured time, divided by the time that the roofline predicts. The estimate is the roofline's
time, multiplied by the geometric mean of the slowness of the nearest measured operators of the family. Weights are the
inverse squared distances. So the slowness of an estimate lies between the least and the greatest slowness of these
operators.

If no relative is near, the estimate uses the slowness of relatives that are farther away. Then
`Interpolation.near` is False, and the result counts as a guess.
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dhelix.profiles.channels.nccl_setting import AS_NCCL_HAS_IT, NcclSetting
from dhelix.profiles.estimates import roofline
from dhelix.profiles.hardware import Hardware
from dhelix.profiles.keys import CollectiveKey, Key, OperatorKey
from dhelix.profiles.profile import Timing

# An estimate is a guess if every measured relative differs in size by more than this factor. For a collective, the size
# is its bytes. For an operator, the logarithm of the factor is the Euclidean distance of the logarithms of all sizes.
REACH = 4.0
_ROUNDING = 1e-9
_HEAD = 5  # place of the head size among the sizes of an attention key
NEIGHBOURS = 8

_WIDTH = re.compile(r"[a-z]+(\d+)")


@dataclass(frozen=True, slots=True)
class Interpolation:
    """A time that is estimated from measured relatives, in seconds.

    Attributes:
      spread: like `Timing.spread`, plus how much the relatives disagree.
      near: whether a measured relative differs in size by at most the factor `REACH`.
    """

    seconds: float
    spread: float
    near: bool


def roofline_seconds(key: Key, hardware: Hardware) -> float:
    """The time of `key` alone according to the roofline, in seconds; always above 0."""
    if isinstance(key, CollectiveKey):
        seconds = roofline.collective_seconds(key.kind, key.bytes, key.group_size, key.nodes, hardware)
    elif key.kind in ("gemm", "grouped-gemm"):
        width = _WIDTH.match(key.family)
        seconds = roofline.gemm_seconds(key.flops, key.bytes, hardware, int(width[1]) if width else 16)
    elif key.kind in ("attention", "attention-backward"):
        head, options = key.sizes[_HEAD] if len(key.sizes) > _HEAD else 0, key.family.split(":")
        executed = roofline.executed(head, not {"causal", "bias"} <= set(options))
        seconds = roofline.attention_seconds(key.flops, key.bytes, hardware, executed)
    else:
        seconds = roofline.memory_seconds(key.bytes, hardware)
    return max(seconds, 1e-9)


class OperatorFamilies:
    """Estimates times of operators from measured operators of the same family with other sizes."""

    def __init__(self, times: Mapping[OperatorKey, Timing], hardware: Hardware) -> None:
        self.hardware = hardware
        self._families: dict[tuple[str, str, int], list[_Member]] = defaultdict(list)
        slowness: dict[str, list[float]] = defaultdict(list)
        for key in sorted(key for key, timing in times.items() if timing.seconds > 0.0):
            member = _Member(_octaves(key), times[key].seconds / roofline_seconds(key, hardware), times[key])
            self._families[key.kind, key.family, len(key.sizes)].append(member)
            slowness[key.kind].append(member.slowness)
        self._kinds = {kind: statistics.median(values) for kind, values in slowness.items()}

    def at(self, key: OperatorKey) -> Interpolation | None:
        """The estimate for `key`, from the measured operators of its family.

        If the family has no measured operator, the roofline's time is multiplied by the median slowness of all measured
        operators of the same kind. None if there are no such operators.
        """
        expected = roofline_seconds(key, self.hardware)
        members = self._families.get((key.kind, key.family, len(key.sizes)))
        if not members:
            slowness = self._kinds.get(key.kind)
            return None if slowness is None else Interpolation(expected * slowness, expected * slowness, False)
        where = _octaves(key)
        distances = np.array([np.linalg.norm(where - member.where) for member in members])
        nearest = np.argsort(distances, kind="stable")[:NEIGHBOURS]
        weights = 1.0 / np.maximum(distances[nearest], 1e-6) ** 2
        weights /= weights.sum()
        logs = np.log([members[n].slowness for n in nearest])
        mean = float(weights @ logs)
        seconds = expected * math.exp(mean)
        closest = members[nearest[0]].timing
        spread = float(weights @ np.abs(logs - mean)) + closest.spread / closest.seconds
        return Interpolation(seconds, seconds * spread, bool(distances[nearest[0]] <= math.log2(REACH) + _ROUNDING))


@dataclass(frozen=True, slots=True)
class _Member:
    where: np.ndarray
    slowness: float
    timing: Timing


def _octaves(key: OperatorKey) -> np.ndarray:
    return np.log2(np.maximum(np.array(key.sizes, dtype=float), 1.0))


class CollectiveCurves:
    """Estimates times of collectives from curves: measured times over bytes.

    There is one curve for each combination of kind, mesh, number of groups, implementation and configuration.
    """

    def __init__(self, times: Mapping[CollectiveKey, Timing], hardware: Hardware) -> None:
        self.hardware = hardware
        measured: dict[_Curve, list[tuple[CollectiveKey, Timing]]] = defaultdict(list)
        for key in sorted(key for key, timing in times.items() if timing.seconds > 0.0 and key.bytes > 0):
            measured[_curve(key)].append((key, times[key]))
        self._points = {curve: _Points.of(points) for curve, points in measured.items()}

    def at(self, key: CollectiveKey) -> Interpolation | None:
        """The estimate for `key`, from its own curve or from the most similar curve.

        A time from another curve is multiplied by the ratio of the roofline's times, and it is not `near`. But inside a
        node, a curve that differs only in the number of groups counts as the own curve, because groups share no links
        there. Curves of settings other than the key's or NCCL's own say nothing. None if nothing was measured over the
        same kind of link (inside a node, or across nodes).
        """
        curve = _curve(key)
        comparable = key.configuration, AS_NCCL_HAS_IT
        candidates = [c for c in self._points if (c.nodes > 1) == (key.nodes > 1) and c.configuration in comparable]
        if not candidates:
            return None
        nearest = min(candidates, key=lambda c: (_distances(c, curve), c))
        there = CollectiveKey(
            nearest.kind,
            key.bytes,
            nearest.gpus_per_node,
            nearest.nodes,
            nearest.groups,
            nearest.implementation,
            nearest.configuration,
        )
        points = self._points[nearest]
        seconds = points.seconds(there, self.hardware)
        seconds *= roofline_seconds(key, self.hardware) / roofline_seconds(there, self.hardware)
        other_implementation, other_kind, other_mesh, other_groups, configured = _distances(nearest, curve)
        other = other_implementation or other_kind or other_mesh or configured
        same = not (other or (other_groups and key.nodes > 1))
        return Interpolation(seconds, seconds * points.spread(key.bytes), same and points.reach(key.bytes))


@dataclass(frozen=True, order=True, slots=True)
class _Curve:
    """What identifies a curve: a `CollectiveKey` without its bytes."""

    kind: str
    gpus_per_node: int
    nodes: int
    groups: int
    implementation: str
    configuration: NcclSetting


def _curve(key: CollectiveKey) -> _Curve:
    return _Curve(key.kind, key.gpus_per_node, key.nodes, key.groups, key.implementation, key.configuration)


def _distances(a: _Curve, b: _Curve) -> tuple[bool, bool, float, float, bool]:
    """How different two curves are, for sorting.

    The implementation counts most, then the kind of collective, then the mesh, then the number of groups, then the
    configuration.
    """
    mesh = abs(math.log(a.gpus_per_node / b.gpus_per_node)) + abs(math.log(a.nodes / b.nodes))
    groups = abs(math.log(a.groups / b.groups))
    other_configuration = a.configuration != b.configuration
    return a.implementation != b.implementation, a.kind != b.kind, mesh, groups, other_configuration


@dataclass(frozen=True, slots=True)
class _Points:
    """The measured points of one curve: keys by increasing size, and their times."""

    keys: Sequence[CollectiveKey]
    log_bytes: np.ndarray
    log_seconds: np.ndarray
    spreads: np.ndarray

    @classmethod
    def of(cls, points: Sequence[tuple[CollectiveKey, Timing]]) -> "_Points":
        keys, times = zip(*points, strict=True)
        return cls(
            keys,
            np.log([key.bytes for key in keys]),
            np.log([time.seconds for time in times]),
            np.array([time.spread / time.seconds for time in times]),
        )

    def seconds(self, key: CollectiveKey, hardware: Hardware) -> float:
        inside = math.exp(float(np.interp(math.log(max(key.bytes, 1)), self.log_bytes, self.log_seconds)))
        if self.keys[0].bytes <= key.bytes <= self.keys[-1].bytes:
            return inside
        end = self.keys[0] if key.bytes < self.keys[0].bytes else self.keys[-1]
        return inside * roofline_seconds(key, hardware) / roofline_seconds(end, hardware)

    def spread(self, size: int) -> float:
        return float(np.interp(math.log(max(size, 1)), self.log_bytes, self.spreads))

    def reach(self, size: int) -> bool:
        return bool(np.min(np.abs(self.log_bytes - math.log(max(size, 1)))) <= math.log(REACH) + _ROUNDING)
