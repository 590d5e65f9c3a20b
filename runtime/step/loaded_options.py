"""Reads the files that a step's options name: the plan, the plan of `tuning`, and the profile.

This module is apart from the decorator, because `dhelix run` reads options while a program is being compiled.
`value_and_grad` registers a context with JAX. If it is imported then, JAX traces and compiles that program again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dhelix.errors import DhelixError
from dhelix.passes.plans import plan_files
from dhelix.profiles.files import storage
from dhelix.runtime.sharding.state_plan import agreed
from dhelix.runtime.step.options import AUTO, StepOptions
from dhelix.runtime.tuning import in_effect


def loaded(options: StepOptions) -> StepOptions:
    """Returns `options` with the content of the plan and the profile instead of their paths, and with its sections.

    Raises DhelixError if a file cannot be read.
    """
    plan, profile = options.plan, options.profile
    if isinstance(plan, (str, Path)):
        options = options.but(plan=plan_files.load(plan))
    if isinstance(options.tuning, (str, Path)):
        options = options.but(tuning=plan_files.load(options.tuning))
    options = _with_sections(options)
    if isinstance(profile, (str, Path)) and profile != AUTO:
        if not Path(profile).exists():
            raise DhelixError(f"profile={str(profile)!r}: no such file; give a profile's path, or 'auto'")
        options = options.but(profile=storage.load(profile))
    return options


def _with_sections(options: StepOptions) -> StepOptions:
    """Returns `options` with the plan's sharding and tuning as options. A plan that has nothing else orders nothing.

    Raises:
      ShardingError: `sharding` contradicts the plan.
      DhelixError: the plan that was given as `tuning` has no settings.
    """
    if options.plan is not None:
        plan = options.loaded_plan
        changed: dict[str, Any] = {"plan": None} if plan.leaves_program else {}
        if plan.sharding is not None:
            changed["sharding"] = agreed(options.sharding, plan.sharding)
        if plan.tuning is not None and options.tuning is None:
            changed["tuning"] = plan
        options = options.but(**changed)
    if options.tuning is not None:
        if options.loaded_tuning.tuning is None:
            raise DhelixError("the plan of tuning= has no settings of collectives: make them with `dhelix tune --out`")
        in_effect.prepare(options.loaded_tuning)
    return options
