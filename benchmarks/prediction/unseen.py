"""Costs as if nothing of a program had ever been measured: its keys are taken out of the profile.

    model = unseen(CostModel.find("H200"), module)

Times of its operators and collectives then come from other sizes and meshes, or from the roofline. So a prediction
with them says how well dhelix simulates a step that nobody profiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.hlo import HloModule
from dhelix.profiles.keys import Key, PairKey
from dhelix.profiles.profile import Profile, Section


def unseen(model: CostModel, module: HloModule) -> CostModel:
    """`model` without the times of any key of a scheduled module, and without the pairs of these keys."""
    costs = model.costs()
    keys = {key for c in module.schedule for i in c.instructions if (key := costs.key(i)) is not None}
    return dataclasses.replace(model, profile=without(model.profile, keys))


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
