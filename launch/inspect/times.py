"""Chooses whose times `dhelix inspect` takes: those of a profile, or those of a roofline."""

from __future__ import annotations

import dataclasses

from dhelix.errors import DhelixError
from dhelix.launch.inspect.flags import AUTO, NONE
from dhelix.passes.evaluation.costs import CostModel, Costs
from dhelix.passes.evaluation.step_time import predict
from dhelix.passes.hlo import HloModule
from dhelix.profiles import hardware as gpus
from dhelix.profiles.estimates.estimator import Source
from dhelix.profiles.files import storage

ROOFLINE = "roofline"


def named(name: str) -> gpus.Hardware:
    """The GPU of this name. Raises DhelixError if there is none."""
    if name not in gpus.ALL:
        raise DhelixError(f"hardware {name!r} is unknown; use one of {', '.join(sorted(gpus.ALL))}")
    return gpus.ALL[name]


def costs_for(
    module: HloModule, gpu: gpus.Hardware, profile: str, setting: str, inter_bandwidth: float = 0.0
) -> tuple[Costs, str]:
    """The costs of a module's instructions, and words for the source of these costs.

    Args:
      inter_bandwidth: bytes per second of each GPU between nodes; 0: the usual value.
    """
    if profile not in (AUTO, NONE):
        known = storage.load(profile)
    else:
        link = next((link for link in gpus.LINKS if gpu.name.endswith(f"-{link}")), gpus.LINKS[0])
        known = storage.find(gpu.name.removesuffix(f"-{link}"), link) if profile == AUTO else None
        if known is None or setting not in known.sections:
            return Costs(dataclasses.replace(gpu, inter_bandwidth=inter_bandwidth or gpu.inter_bandwidth)), ROOFLINE
    costs = CostModel(known, setting, inter_bandwidth=inter_bandwidth).costs()
    guessed = predict(module, costs).shares[Source.GUESS]
    name = storage.file_name(known.hardware, known.link).removesuffix(".json")
    return costs, f"profile {name} (launch setting {setting}, {guessed:.0%} guessed)"
