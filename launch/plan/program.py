"""The programs for which `dhelix plan` makes plans. They are scheduled steps before `strand_interleave` orders them.

    plain = of_preset(replace(options, plain=True))
    step = of_preset(options)                       # strands interleaved, in XLA's order
    parts = of_preset(options, CollectivesSection(row_parts=2), like=step)   # chains of products in two parts
    memory = confirmed(options, plan)               # compiled again, in the plan's order

Nothing runs, and no GPU is needed. A hook in the compiler records a module at the point where `strand_interleave`
orders modules. So a plan for the recorded module also fits the module in a training run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dhelix.errors import DhelixError
from dhelix.launch.inspect.reading import dumps
from dhelix.launch.inspect.reading.dumps import Memory
from dhelix.launch.profile import step as profile_step
from dhelix.launch.train import trainer
from dhelix.launch.train.meshes.pipelined import PipelinedTraining
from dhelix.models import Training
from dhelix.passes.communication.gradient_reduction import GradientReduction
from dhelix.passes.framework.manager import Pass, Stage
from dhelix.passes.framework.report import CHANGED, UNCHANGED, Report
from dhelix.passes.hlo import HloModule
from dhelix.passes.plans.plan import CollectivesSection, Plan
from dhelix.passes.plans.planned_order import PlannedOrder
from dhelix.runtime.compiler import memory_need, registration, tuned
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.step.pass_lists import alternatives, planned_passes, strand_passes

_NAME = "jit_train_step"
REDUCED = CollectivesSection(reduced=1)
"""The form of the step in which gradients are reduced layer by layer wherever possible."""


@dataclass(frozen=True)
class Program:
    """A step in XLA's order.

    Attributes:
      name: the step in words, for messages and tables.
      module: the scheduled module, serialized.
      gpus: number of GPUs that the step runs on.
      hardware: name of the GPU whose times are used.
      memory: the memory that the step needs on one GPU; None if a dump does not say it.
      collectives: which collectives are replaced, and by what.
      skew: number of layers by which the strands are apart.
      before: the module at `Stage.PRE_SCHEDULER`, before fusion, serialized; None for a dump.
      notes: remarks for the user on how a dump was read, and on the GPU whose times are used.
    """

    name: str
    module: bytes
    gpus: int
    hardware: str
    memory: Memory | None
    collectives: CollectivesSection = CollectivesSection()
    skew: int = 0
    before: bytes | None = None
    notes: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """The name of the GPU as `of_preset` takes it: one of `deviceless.targets()`."""
        return self.hardware.lower()


def of_dump(path: str | Path, gpu: str | None = None) -> Program:
    """The step in a file or folder that `--xla_dump_to` wrote. Raises DhelixError as `profile_step.of_dump` does."""
    step = profile_step.of_dump(path, gpu)
    memory = dumps.read_memory(dumps.find_module(path))
    return Program(step.name, step.module.to_bytes(), step.gpus, step.hardware, memory, notes=step.notes)


def of_preset(
    options: trainer.Options,
    collectives: CollectivesSection = REDUCED,
    target: str = profile_step.TARGET,
    skew: int = 0,
    like: Program | None = None,
) -> Program:
    """The step that `dhelix train` runs with these options, plain or with interleaved strands.

    Args:
      collectives: replacements of collectives to make. In the result, `Program.collectives.reduced` says whether any
        gradients are reduced layer by layer.
      target: one of `deviceless.targets()`.
      skew: number of layers by which the strands are apart.
      like: a step with the same arguments, or None. With `like`, the compiler generates no code, which saves much time.
        The memory is then estimated from the memory of `like` and from the live ranges of both steps.

    Raises:
      DhelixError: the options contradict each other, or there are no strands to interleave, or the GPU compiler (extra
        `compile`) is not installed.
    """
    structure = *strand_passes(skew), *alternatives(collectives)
    passes = () if options.plain else structure
    found = _compile(options, passes, target, strict=True, like=like)
    name = profile_step.name_of(options, found.training)
    changed = () if found.report is None else [e.name for e in found.report if e.outcome == CHANGED]
    instead = replace(collectives, reduced=int(GradientReduction.name in changed))
    gpus = found.training.mesh.size
    return Program(name, found.module, gpus, target.upper(), found.memory, instead, skew, found.before)


def confirmed(options: trainer.Options, plan: Plan, target: str = profile_step.TARGET) -> Memory:
    """The memory that the step needs in the order of `plan`, according to the compiler.

    Raises:
      DhelixError: the plan cannot be carried out.
    """
    found = _compile(options, planned_passes(plan, sys.maxsize), target, strict=False)
    assert found.report is not None  # a step with passes has a report
    done = found.report[PlannedOrder.name]
    if done.outcome not in (CHANGED, UNCHANGED):
        raise DhelixError(f"the plan does not fit the step that it was made for: {'; '.join(map(str, done.notes))}")
    return found.memory


def with_states(plan: Plan, options: trainer.Options) -> Plan:
    """The plan, which also says how `--states` shards the step, so that the file alone is enough."""
    if not options.states:
        return plan
    training, _ = profile_step.deviceless_training(options, profile_step.target_of(plan.target.hardware))
    states = getattr(training, "states", None)
    return plan if states is None else replace(plan, sharding=states.section(training.mesh.shape))


@dataclass(frozen=True)
class _Compiled:
    training: Training
    before: bytes
    module: bytes
    memory: Memory
    report: Report | None


def _compile(
    options: trainer.Options, passes: Sequence[Pass], target: str, strict: bool, like: Program | None = None
) -> _Compiled:
    training, batch = profile_step.deviceless_training(options, target)
    example = training.abstract_state(), training.abstract_batch(batch)
    if isinstance(training, PipelinedTraining):  # the schedule of a pipeline already makes the strands
        passes = [one for one in passes if one.stage is not Stage.LOWERED]
    chosen = StepOptions(passes=passes, strict=strict) if passes else StepOptions()
    step: Any = trainer.make_step(training, not passes, chosen)
    lowered = step.lower(*example)
    modules: dict[Stage, bytes] = {}
    with _recorded(modules):
        known = None if like is None or like.memory is None else tuned.scheduled(lowered)
        if known is None:
            memory = dumps.memory_of(tuned.compile(lowered))
            assert memory is not None  # the GPU compiler always says how much memory a step needs
        else:
            assert like is not None and like.memory is not None
            memory = _memory_by(like.memory, live_bytes(known) - live_bytes(like.module))
    report = step.report(*example) if passes else None
    return _Compiled(training, modules[Stage.PRE_SCHEDULER], modules[Stage.POST_SCHEDULER], memory, report)


def live_bytes(module: bytes) -> int:
    """The largest number of bytes that are live at one time in a module's order. Arguments are not included."""
    return memory_need.of_module(HloModule.from_bytes(module)).beside


def _memory_by(like: Memory, more: int) -> Memory:
    return replace(like, temporaries=like.temporaries + more, source="live ranges, and gaps as of a step like it")


@contextlib.contextmanager
def _recorded(modules: dict[Stage, bytes]) -> Iterator[None]:
    """A context in which a compilation stores its module in `modules` at each stage, after the passes of this stage."""
    with registration.temporary_hook(modules.__setitem__, _NAME):
        yield
