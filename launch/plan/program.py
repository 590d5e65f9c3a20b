"""The programs that `dhelix plan` plans: steps as the compiler hands them to the last passes, and their memory.

    plain = of_preset(replace(options, plain=True))
    step = of_preset(options)                       # its strands interleaved, its order XLA's
    parts = of_preset(options, CollectivesSection(row_parts=2), like=step)   # chains of products in two parts
    memory = confirmed(options, plan)               # compiled again, in the order of the plan

Nothing runs and no GPU is needed. Modules are taken out of the compiler where `strand_interleave` orders them, so a
plan made here meets the same program there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dhelix.errors import DhelixError
from dhelix.launch.inspect import dumps
from dhelix.launch.inspect.dumps import Memory
from dhelix.launch.profile import step as profile_step
from dhelix.launch.train import trainer
from dhelix.launch.train.pipelined import PipelinedTraining
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
"""Gradients are reduced layer by layer where they can be."""


@dataclass(frozen=True)
class Program:
    """A step in XLA's order.

    Attributes:
      name: for people.
      module: scheduled, serialized.
      gpus: how many it runs on.
      hardware: as of `CompiledStep`.
      memory: of one GPU, in XLA's order; None if a dump does not say.
      collectives: what stands in place of some.
      skew: layers that the strands are apart.
      before: the module as passes before fusion see it, serialized; None of a dump.
      notes: as of `CompiledStep`.
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
        """As `of_preset` has it."""
        return self.hardware.lower()


def of_dump(path: str | Path, gpu: str | None = None) -> Program:
    """The step in a file or a folder of `--xla_dump_to`, as it is. Raises DhelixError: see `profile_step.of_dump`."""
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
      collectives: what is to stand in place of some; `Program.collectives` says whether any gradients are reduced.
      like: a step of the same arguments. Memory then follows from its own, by live ranges, and no code is made for this
        one, which takes a third of the time.

    Raises DhelixError: options that do not fit each other, no strands to interleave, or nothing to compile with.
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
    """Memory of the step in the order of `plan`, by the compiler.

    Raises DhelixError if the plan cannot be carried out.
    """
    found = _compile(options, planned_passes(plan, sys.maxsize), target, strict=False)
    assert found.report is not None  # there are passes
    done = found.report[PlannedOrder.name]
    if done.outcome not in (CHANGED, UNCHANGED):
        raise DhelixError(f"the plan does not fit the step that it was made of: {'; '.join(map(str, done.notes))}")
    return found.memory


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
    if isinstance(training, PipelinedTraining):  # its strands are there already
        passes = [one for one in passes if one.stage is not Stage.LOWERED]
    chosen = StepOptions(passes=passes, strict=strict) if passes else StepOptions()
    step: Any = trainer.make_step(training, not passes, chosen)
    lowered = step.lower(*example)
    modules: dict[Stage, bytes] = {}
    with _recorded(modules):
        known = None if like is None or like.memory is None else tuned.scheduled(lowered)
        if known is None:
            memory = dumps.memory_of(tuned.compile(lowered))
            assert memory is not None  # the GPU's compiler always says
        else:
            assert like is not None and like.memory is not None
            memory = _memory_by(like.memory, live_bytes(known) - live_bytes(like.module))
    report = step.report(*example) if passes else None
    return _Compiled(training, modules[Stage.PRE_SCHEDULER], modules[Stage.POST_SCHEDULER], memory, report)


def live_bytes(module: bytes) -> int:
    """What lives at once beside the arguments, in the order of a scheduled module."""
    return memory_need.of_module(HloModule.from_bytes(module)).beside


def _memory_by(like: Memory, more: int) -> Memory:
    return replace(like, temporaries=like.temporaries + more, source="live ranges, and gaps as of a step like it")


@contextlib.contextmanager
def _recorded(modules: dict[Stage, bytes]) -> Iterator[None]:
    """Compilations inside leave the module that comes to the passes of each stage in `modules`."""
    with registration.temporary_hook(modules.__setitem__, _NAME):
        yield
