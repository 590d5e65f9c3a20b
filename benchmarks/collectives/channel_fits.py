"""Fits the channel model to measured overlaps, and reports its errors on settings that it was not fitted to.

    fitted(parts)                # of one overlap, as `channel_grid.py` measured it; a part for each chunk
    markdown({"fits": {...}})    # the tables of a result file

The settings left out are every other one, each chunk in turn, or each number of channels in turn. Repeats are settings
that ask for at least as many channels as run at most, with the same chunk. They tell the noise. As a model predicts
them easily, its error is also reported for one of each alone, over both halves in turn.

Each chunk was measured by a process of its own, which cut the computation into pieces by its own times. A piece of one
process may so hold another product than that of another. Pieces are joined until all processes cut at the same places.

No GPU and no JAX is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from dhelix.benchmarks.pages.markdown import table
from dhelix.profiles.channels.channel_model import ChannelSetting, Overlap
from dhelix.profiles.channels.model_fit import MeasuredTimes, errors, fit_grid

_SAME = 0.02
"""Two cuts are the same if they differ by at most this fraction of the computation: half of the shortest product."""

_OWN_CHUNK = 2 << 20
"""The chunk of NCCL's own buffers, in bytes."""

type Part = Mapping[str, Any]
type Split = tuple[list[MeasuredTimes], list[MeasuredTimes]]


def fitted(parts: Sequence[Part], left_out: bool = True) -> dict[str, Any]:
    """The model of one overlap, and its errors on settings that it was not fitted to.

    Args:
      parts: results of `channel_grid.measure`, one for each chunk.
      left_out: whether to leave out chunks and channels in turn too. This takes several times as long.
    """
    first = parts[0]
    overlap, measured = measurements(parts)
    model = fit_grid(overlap, measured)
    alike = _alike(measured, model.links.most)
    once = [each[0] for each in alike]
    chunks = {one.settings[0].chunk for one in measured}
    channels = {each.channels for one in measured for each in one.settings}
    splits: dict[str, list[Split]] = {"every other": [(measured[::2], measured[1::2])]}
    if left_out:
        splits["every other, no repeats"] = [(once[::2], once[1::2]), (once[1::2], once[::2])]
        splits["each chunk"] = [_split(measured, "chunk", chunk) for chunk in sorted(chunks)]
        splits["each number of channels"] = [_split(measured, "channels", number) for number in sorted(channels)]
    wholes = [one.whole for one in measured]
    own = next((part for part in parts if part["rows"][0]["chunk"] == _OWN_CHUNK), first)
    computing = [sum(one.computations) for one in measured]
    return {
        "settings": len(measured),
        "pieces": len(overlap.waves),
        "held out": {name: _held_out(overlap, each) for name, each in splits.items()},
        "repeats": _repeats(alike),
        "longest over shortest computation": max(computing) / min(computing),
        "longest over shortest overlap": max(wholes) / min(wholes),
        "default over shortest overlap": own["default"]["whole"] / min(wholes),
        "links": asdict(model.links),
        "factors": dict(zip(overlap.kinds, model.factors, strict=True)),
        "bandwidth": asdict(model.bandwidth),
        "memory": list(model.memory),
    }


def measurements(parts: Sequence[Part]) -> tuple[Overlap, list[MeasuredTimes]]:
    """An overlap and its measured times, with pieces that are the same for all chunks."""
    first, places = parts[0], _common_cuts(parts)
    kinds = tuple(key.split()[0] for _, key, _ in first.get("collectives", ()))  # "all-reduce 33554432B 2x1 ..."
    waves = tuple(math.inf if wave is None else wave for wave in first["waves"])
    if len(places[0]) <= len(waves):
        waves = (math.inf,) * (len(places[0]) - 1)
    found = []
    for part, cuts in zip(parts, places, strict=True):
        for row in part["rows"]:
            pieces = tuple(sum(row["computations"][a:b]) for a, b in zip(cuts, cuts[1:], strict=False))
            settings = tuple(ChannelSetting(channels, row["chunk"]) for channels in row["channels"])
            found.append(MeasuredTimes(settings, tuple(row["collectives"]), pieces, whole=row["whole"]))
    return Overlap(tuple(first["volumes"]), waves, first["sms"], kinds), found


def _common_cuts(parts: Sequence[Part]) -> list[list[int]]:
    """For each part, the numbers of pieces before the cuts that all parts have."""
    ends = []
    for part in parts:
        least = min((row["computations"] for row in part["rows"]), key=sum)  # the least slowed
        ends.append(np.cumsum(least) / np.sum(least))
    cuts = [[0] for _ in parts]
    for end in ends[0]:
        nearest = [int(np.abs(each - end).argmin()) for each in ends]
        if all(abs(each[n] - end) <= _SAME for each, n in zip(ends, nearest, strict=True)):
            for mine, n in zip(cuts, nearest, strict=True):
                mine.append(n + 1)
    return cuts


def _split(measured: Sequence[MeasuredTimes], what: str, value: int) -> Split:
    """The settings without a value, and those with it."""
    has = [any(getattr(each, what) == value for each in one.settings) for one in measured]
    return (
        [one for one, there in zip(measured, has, strict=True) if not there],
        [one for one, there in zip(measured, has, strict=True) if there],
    )


def _held_out(overlap: Overlap, splits: Sequence[Split]) -> dict[str, float]:
    both = [errors(fit_grid(overlap, known), rest) for known, rest in splits]
    x, y = (np.concatenate([np.abs(each).ravel() for each in part]) for part in zip(*both, strict=True))
    return {
        "settings": sum(len(rest) for _, rest in splits),
        "collectives, median": float(np.median(x)),
        "collectives, 90 %": float(np.quantile(x, 0.9)),
        "computation, median": float(np.median(y)),
        "computation, 90 %": float(np.quantile(y, 0.9)),
    }


def _alike(measured: Sequence[MeasuredTimes], most: float) -> list[list[MeasuredTimes]]:
    """Groups of measurements whose collectives ran alike."""
    found: dict[tuple[tuple[float, int], ...], list[MeasuredTimes]] = {}
    for one in measured:
        found.setdefault(tuple((min(each.channels, most), each.chunk) for each in one.settings), []).append(one)
    return list(found.values())


def _repeats(alike: Sequence[Sequence[MeasuredTimes]]) -> dict[str, float]:
    """How far times of settings that ran alike are from their mean: the median and the 90 % quantile."""
    found: dict[str, float] = {}
    for name in ("collectives", "computations"):
        times = [np.array([getattr(one, name) for one in each]) for each in alike if len(each) > 1]
        off = [np.abs(each / each.mean(axis=0) - 1.0).ravel() for each in times]
        if off:
            found[f"{name}, median"] = float(np.median(np.concatenate(off)))
            found[f"{name}, 90 %"] = float(np.quantile(np.concatenate(off), 0.9))
    return found


def markdown(found: Mapping[str, Any]) -> str:
    """The tables of a result file."""
    fits: Mapping[str, Any] = found["fits"]
    rows = [
        [name, left, *(_cell(value) for value in each.values())]
        for name, fit in fits.items()
        for left, each in fit["held out"].items()
    ]
    heads = ["overlap", "left out", *next(iter(next(iter(fits.values()))["held out"].values()))]
    parts = ["**Errors of the model on settings that were left out.**", table(heads, rows)]
    names = list(dict.fromkeys(name for fit in fits.values() for name in fit["repeats"]))
    if names:
        rows = [[name, *(_cell(fit["repeats"].get(head, 0.0)) for head in names)] for name, fit in fits.items()]
        parts += ["**Equal settings: how far each time is from their mean.**", table(["overlap", *names], rows)]
    names = ["longest over shortest computation", "longest over shortest overlap", "default over shortest overlap"]
    rows = [[name, *(f"{fit[head]:.3f}" for head in names)] for name, fit in fits.items()]
    parts += ["**Contention.** Default: NCCL's channels and its buffers of 4 MiB.", table(["overlap", *names], rows)]
    heads = ["overlap", "channels at most", "link GB/s", "channel GB/s", "channel of other types, GB/s"]
    return "\n\n".join([*parts, "**The fitted links.**", table(heads, [_links(*one) for one in fits.items()])])


def _links(name: str, fit: Mapping[str, Any]) -> list[str]:
    links = fit["links"]
    others = [f"{kind} {rate * links['channel'] / 1e9:.1f}" for kind, (rate, _) in list(fit["factors"].items())[1:]]
    most = f"{links['most']:g}" if math.isfinite(links["most"]) else "not seen"
    return [name, most, f"{links['link'] / 1e9:.1f}", f"{links['channel'] / 1e9:.1f}", ", ".join(others)]


def _cell(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.1%}"
