"""Makes the options of a step from those of a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dhelix.runtime.step.loaded_options import loaded
from dhelix.runtime.step.options import StepOptions


def step_options(given: Mapping[str, Any]) -> StepOptions:
    """The options, with the plan and the profile loaded. Raises DhelixError if they are invalid."""
    return loaded(StepOptions(**given))
