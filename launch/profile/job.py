"""One call of `dhelix profile` as an object: the step, the GPUs, the launch settings and the profile's file.

job = Job(gpu="H200", link="nvlink", gpus=4, settings=("default",), path=Path("h200-nvlink.json"))
job.steps["default"] = profile_step.of_dump("xla_dump")
job.missing("default")                    # what the file lacks
job.view("default")                       # what is known, as rows for tables and JSON
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dhelix.errors import DhelixError
from dhelix.launch.profile import tables as profile_tables
from dhelix.launch.profile.step import CompiledStep
from dhelix.launch.profile.tables import StepView
from dhelix.passes.evaluation import step_time
from dhelix.passes.evaluation.costs import Costs
from dhelix.profiles import hardware
from dhelix.profiles.estimates.estimator import Estimator
from dhelix.profiles.files import storage, xla_tables
from dhelix.profiles.hardware import Hardware
from dhelix.profiles.profile import ALIKE, SETTINGS, Profile, Provenance
from dhelix.runtime.profiling.measure import Measurer
from dhelix.runtime.profiling.session import Session, Step, Wanted

_XLA_DEVICES = {"H200": "sm_90", "H100": "sm_90", "A100": "sm_80", "A800": "sm_80", "A40": "sm_86"}


@dataclass
class Job:
    """The task of one call, and its results.

    Attributes:
      gpu, link: hardware and link of the profile.
      gpus: number of GPUs that take part.
      gpus_per_node: GPUs that take part on each node, as the workers found it; None: not known yet.
      settings: names of launch settings, from `profile.SETTINGS`.
      path: the profile's file.
      pairs: whether to measure pairs, too.
      again: whether to measure known entries again.
      steps: the step under each setting; empty if only tables of collectives are measured. Steps may differ, because
        autotuning may choose other kernels under another setting.
      here: provenance of the measurements; None until there are any.
      errors: one error for each setting that failed. A failure does not stop the other settings.
    """

    gpu: str
    link: str
    gpus: int
    settings: tuple[str, ...]
    path: Path
    pairs: bool = True
    again: bool = False
    steps: dict[str, CompiledStep] = field(default_factory=dict)
    gpus_per_node: int | None = None
    here: Provenance | None = None
    errors: list[DhelixError] = field(default_factory=list)

    @property
    def hardware(self) -> Hardware:
        """The description of the GPU. `gpus_per_node` is at most the number of GPUs that take part on one node."""
        described = hardware.describe(self.gpu, self.link)
        nodes = 2 if self.link == "two-nodes" else 1
        per_node = self.gpus_per_node or max(self.gpus // nodes, 1)
        return replace(described, gpus_per_node=min(per_node, described.gpus_per_node))

    def in_file(self) -> Profile:
        """The profile in the file; empty if there is no file.

        Raises:
          DhelixError: the file is no profile of this hardware and link.
        """
        found = storage.of_hardware(self.path, self.gpu, self.link, "--out")
        return found or Profile(self.gpu, self.link)

    def known(self) -> Profile:
        """Everything known about the hardware: `in_file`, with gaps filled from the other profiles of the hardware."""
        found = storage.find(self.gpu, self.link, [self.path] if self.path.exists() else [])
        return found or Profile(self.gpu, self.link)

    def session(self, setting: str, profile: Profile | None = None, measurer: Measurer | None = None) -> Session:
        """A measuring session that extends `profile`; default: the profile in the file."""
        profile = self.in_file() if profile is None else profile
        per_node = self.hardware.gpus_per_node
        return Session(profile, setting, measurer, self.hardware, per_node, pairs=self.pairs, again=self.again)

    def missing(self, setting: str) -> Wanted:
        """The operators and pairs of the step under `setting` for which the file has no times."""
        return self.session(setting).missing(Step(self.steps[setting].module))

    def view(self, setting: str, refused: Mapping[str, str] | None = None) -> StepView:
        """What is known about the step under `setting`.

        Args:
          refused: for each instruction that cannot run alone, the reason, by the instruction's name.
        """
        profile, implementation = self.known(), SETTINGS[setting].implementation
        estimator = Estimator(profile, self.hardware, setting)
        costs = Costs(self.hardware, estimator, implementation)
        gap = profile.section(setting).gap_seconds or 0.0
        return profile_tables.step_view(
            estimator, step_time.predict(self.steps[setting].module, costs, gap), refused or {}
        )

    def cost_text(self, setting: str) -> str:
        """Measured or estimated times of the step's instructions, as a text in XLA's PGLE format."""
        module = self.steps[setting].module
        costs = Costs(self.hardware, Estimator(self.known(), self.hardware, setting), SETTINGS[setting].implementation)
        timed = (i for c in module.schedule for i in c.instructions if costs.operator_keys[i] is not None)
        return xla_tables.cost_text({i.name: costs[i].seconds for i in timed})

    def performance_table(self, setting: str) -> str:
        """Measured times of collectives, as a text in the format of XLA's collective performance table.

        Raises:
          DhelixError: no collective that fits into the table is measured, or dhelix does not know the GPU's compute
            capability.
        """
        implementation = SETTINGS[setting].implementation
        section = self.known().section(setting)
        measured = {key: timing for key, timing in section.collectives.items() if timing.source != ALIKE}
        seconds = {key: timing.seconds for key, timing in measured.items() if xla_tables.in_table(key)}
        if not seconds:
            raise DhelixError(
                f"no collective of XLA's table is measured under {setting!r}; run with --collectives to measure them"
            )
        if self.gpu not in _XLA_DEVICES:
            raise DhelixError(
                f"XLA's table names GPUs by compute capability, but the one of {self.gpu} is unknown; leave out "
                "--perf_table"
            )
        return xla_tables.collective_table(seconds, _XLA_DEVICES[self.gpu], implementation)
