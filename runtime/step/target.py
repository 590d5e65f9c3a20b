"""Describes the target of a program: its GPUs, the link between them, and the costs of operators on them.

    target = Target.of(lowered, options)     # None: devices other than GPUs, which have no costs
    target.costs()

A target is made once per program. It is passed to all code whose decisions depend on GPUs or costs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat
from dhelix.passes.evaluation.costs import CostModel, Costs
from dhelix.passes.framework.manager import say_once
from dhelix.passes.plans.plan import Plan
from dhelix.profiles.estimates import alike
from dhelix.profiles.files import storage
from dhelix.profiles.hardware import Hardware, describe, gpu_name
from dhelix.profiles.profile import Profile, Provenance
from dhelix.runtime.processes import launch_settings
from dhelix.runtime.processes.nodes import gpus_per_node
from dhelix.runtime.step.collective_matmuls.jax_forms import times_on
from dhelix.runtime.step.options import StepOptions


@dataclass(frozen=True)
class Target:
    """The GPUs of a program, and the link between them.

    Attributes:
      gpu: name of the GPU.
      link: how GPUs of a node reach each other (`hardware.LINKS`).
      hardware: description of GPU and link. It includes the GPUs per node if the program spans several nodes.
      model: measured costs under the launch setting of this process. None: costs come from a roofline model.
    """

    gpu: str
    link: str
    hardware: Hardware
    model: CostModel | None = None

    @classmethod
    def of(cls, lowered: jax.stages.Lowered, options: StepOptions) -> Target | None:
        """Returns the target of a program; None for devices other than GPUs.

        Raises DhelixError if the user gave a profile that has no times for this launch setting.
        """
        devices = jax_compat.devices(lowered) or jax.devices()
        if devices[0].platform not in ("gpu", "cuda"):
            return None
        kind, link = devices[0].device_kind, launch_settings.link_of(os.environ)
        gpu, nodes = gpu_name(kind), gpus_per_node(jax_compat.devices(lowered))
        here = cls(gpu, link, describe(gpu, link, nodes))
        found = here._profile(options.profile)
        setting = None if found is None else here._setting(found, options)
        if found is None or setting is None:
            return here
        for line in filter(None, (alike.told(found, [setting]), *storage.differences(found, _JAX))):
            say_once(line, (line,))
        return cls(gpu, link, here.hardware, CostModel(found, setting, times_on(kind), nodes))

    def costs(self) -> Costs:
        """Returns a new object that computes operator costs and caches them."""
        return Costs(self.hardware) if self.model is None else self.model.costs()

    def compare(self, plan: Plan, options: StepOptions) -> None:
        """Logs the differences between this target and the plan's target.

        If the launch setting differs, the log says how to start the process for the plan.
        """
        made_for = plan.target
        told = [launch_settings.difference(made_for, options=options.xla)]
        if other := self._unlike(made_for.hardware, made_for.link):
            told.append(f"the plan is for {other}")
        for line in filter(None, told):
            say_once(line, (line,))

    def _profile(self, asked: Any) -> Profile | None:
        """The profile `asked`, if the user gave one; else the shipped or the user's own profile of these GPUs.

        None if the user asked for no profile, or there is none.
        """
        if asked is None:
            return None
        if isinstance(asked, Profile):
            if other := self._unlike(asked.hardware, asked.link):
                say_once(f"costs are for {other}", (other,))
            return asked
        try:
            found = storage.find(self.gpu, self.link)
        except DhelixError as error:  # a file that the user did not name must not stop a job
            say_once(f"costs are estimated by a roofline: {error}", ("profile",))
            return None
        if found is None:
            what = f"{self.gpu} with link {self.link}"
            say_once(
                f"nothing was measured on {what}, so costs are estimated by a roofline; run `dhelix profile`", (what,)
            )
        return found

    def _setting(self, profile: Profile, options: StepOptions) -> str | None:
        """The launch setting in the profile whose costs are used; None if no setting fits the process.

        Raises DhelixError if no setting fits and the user gave the profile.
        """
        setting, line = launch_settings.nearest(profile.sections, os.environ, options.xla)
        if setting is None and isinstance(options.profile, Profile):  # the next line raises the error
            CostModel(profile, launch_settings.setting_of(os.environ, options.xla).name)
        if line:
            say_once(f"{profile.hardware} with link {profile.link}: {line}", ("launch setting",))
        return setting

    def _unlike(self, hardware: str, link: str) -> str:
        """A text that says how `hardware` and `link` differ from this target; "" if they are equal.

        The link "two-nodes" counts as equal, because a process cannot detect whether it has this link.
        """
        if hardware == self.gpu and link in (self.link, "two-nodes"):
            return ""
        return f"{hardware} with link {link}, not {self.gpu} with {self.link}"


_JAX = Provenance("", 0, jax=jax.__version__)
