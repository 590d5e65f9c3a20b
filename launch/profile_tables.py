"""What a profile says of one step, for people: rows of numbers, and tables and JSON made of them."""

from __future__ import annotations

from collections.abc import Iterable

from dhelix.profiles.keys import CollectiveKey, Key, OperatorKey, PairKey
from dhelix.profiles.profile import Profile, Section

_LINKS = {"nvlink": "NVLink", "no-p2p": "no peer-to-peer (host memory)", "two-nodes": "two nodes over sockets"}
_KINDS = {"gemm": "GEMM", "grouped-gemm": "grouped GEMM", "attention-backward": "attention backward"}


def readable(key: Key, among: Iterable[Key] = ()) -> str:
    """A key in words, short; with its whole family where `among` has another key of the same short words."""
    words = _short(key)
    if isinstance(key, OperatorKey) and any(other != key and _short(other) == words for other in among):
        return f"{words} [{key.family}]"
    return words


def _short(key: Key) -> str:
    if isinstance(key, CollectiveKey):
        where = f"{key.gpus_per_node} GPUs" + (f" x {key.nodes} nodes" if key.nodes > 1 else "")
        groups = f", {key.groups} groups" if key.groups > 1 else ""
        how = "" if key.implementation == "nccl" else f", {key.implementation}"
        return f"{key.kind} {bytes_text(key.bytes)}, {where}{groups}{how}"
    sizes = "x".join(map(str, key.sizes))
    return f"{_KINDS.get(key.kind, key.kind)} {sizes}".strip()


def bytes_text(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def time_text(seconds: float) -> str:
    """Three digits: 41.2 µs, 1.23 ms."""
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 0.9995e-3 else f"{1e6 * seconds:.3g} µs"


def setup(profile: Profile) -> str:
    """What it was measured on: `4 x H200, NVLink`."""
    gpus = max((p.gpus for p in profile.measured_on), default=0)
    count = f"{gpus} x " if gpus else ""
    return f"{count}{profile.hardware}, {_LINKS.get(profile.link, profile.link)}"


def oef(section: Section, pair: PairKey) -> float | None:
    """(T_i + T_j - P) / min(T_i, T_j) (DHelix section 3.2); None unless all three are measured."""
    both, first, second = section.pairs.get(pair), section.solo(pair.first), section.solo(pair.second)
    if both is None or first is None or second is None:
        return None
    return (first.seconds + second.seconds - both.seconds) / min(first.seconds, second.seconds)
