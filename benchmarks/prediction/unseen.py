"""Costs as if nothing of a program had ever been measured: its keys are taken out of the profile.

    model = unseen(CostModel.find("H200"), module)

Times of its operators and collectives then come from other sizes and meshes, or from the roofline. So a prediction
with them says how well dhelix simulates a step that nobody profiled.

Steps with a limit on NCCL's channels stand for slower links, and a user describes a link by its bandwidth. So under a
limit no collective counts as measured, and the link has the bandwidth of so many channels:

    model = unseen(model, module, link=capped_bandwidth(4))      # 4 times what a channel moved under other limits
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Mapping
from pathlib import Path

from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.hlo import HloModule
from dhelix.passes.simulation.cluster_costs import ClusterCosts
from dhelix.profiles.estimates.roofline import wire_bytes
from dhelix.profiles.files import storage
from dhelix.profiles.hardware import with_links
from dhelix.profiles.keys import CollectiveKey, Key, PairKey
from dhelix.profiles.profile import Profile, Section

_RESULTS = Path(__file__).parents[1] / "results"
_LIMITS = (1, 2, 4, 8)
_LARGE = 32 * 2**20  # bytes of collectives whose time is that of their bytes


def unseen(model: CostModel, module: HloModule, link: float = 0.0) -> CostModel:
    """`model` without the times of any key of a scheduled module, and without the pairs of these keys.

    Args:
      link: bytes per second of the links inside a node; no collective counts as measured then. 0: the model's.
    """
    costs = model.costs()
    keys = {key for c in module.schedule for i in c.instructions if (key := costs.key(i)) is not None}
    if not link:
        return dataclasses.replace(model, profile=without(model.profile, keys))
    keys |= {key for section in model.profile.sections.values() for key in section.collectives}
    described = with_links(model.hardware, link)
    return ClusterCosts(without(model.profile, keys), model.setting, model.matmuls, described=described)


def costs_under(channels: int) -> Path:
    """The folder of a profile that was measured under this limit on NCCL's channels."""
    return _RESULTS / f"costs_h200x2_channels{channels}"


def capped_bandwidth(channels: int) -> float:
    """Bytes per second that so many channels move over NVLink, from what was measured under the other limits."""
    rates = [rate / other for other in _LIMITS if other != channels for rate in _measured_rates(other)]
    return channels * statistics.median(rates)


def _measured_rates(channels: int) -> list[float]:
    (file,) = costs_under(channels).glob("*.json")
    profile = storage.load(file)
    return [
        wire_bytes(key.kind, key.bytes, key.gpus_per_node) / timing.seconds
        for section in profile.sections.values()
        for key, timing in section.collectives.items()
        if isinstance(key, CollectiveKey) and key.implementation == "nccl" and key.bytes >= _LARGE
    ]


def without(profile: Profile, keys: Collection[Key]) -> Profile:
    """A profile without these keys, in all launch settings and for all links."""
    gone = frozenset(keys)
    sections = {name: _without(section, gone) for name, section in profile.sections.items()}
    elsewhere = {key: timing for key, timing in profile.elsewhere.items() if key not in gone}
    return dataclasses.replace(profile, sections=sections, elsewhere=elsewhere)


def _without(section: Section, gone: frozenset[Key]) -> Section:
    def kept[K, T](times: Mapping[K, T]) -> dict[K, T]:
        return {key: timing for key, timing in times.items() if not _mentions(key, gone)}

    return dataclasses.replace(
        section,
        operators=kept(section.operators),
        collectives=kept(section.collectives),
        pairs=kept(section.pairs),
    )


def _mentions(key: object, gone: frozenset[Key]) -> bool:
    return not gone.isdisjoint((key.first, key.second)) if isinstance(key, PairKey) else key in gone
