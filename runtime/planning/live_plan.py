"""Plans how the model states of a user's own train step are sharded.

    planned = dhelix.plan_sharding(train_step, state, batch)      # arrays, or shapes over dhelix.deviceless.mesh(...)
    print(planned)                                                # the factors, and what of it is measured or guessed
    step = strand_interleave(train_step, sharding=planned, donate_argnums=0)
    state = dhelix.shard_state(state, planned)

The plain step is compiled. Where each number comes from:

    bytes of states        the arguments of the step (`step_sizes.py`)
    other memory           the formulas of `memory.py`, corrected by memory_analysis() of the plain step
    compute                the schedule of the plain step, with the profile of its GPUs
    collectives            the profile of its GPUs (`collective_times.py`)
    type of sums           the reductions of the plain step (`summed_bytes`)
    compute of a layer     in proportion to its parameters: a guess

Candidates that these numbers cannot tell apart are compiled as they would run (`finalists.py`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dhelix.passes import jax_compat
from dhelix.passes.evaluation.step_parts import step_parts
from dhelix.passes.framework.gain import StepParts
from dhelix.passes.framework.units import milliseconds, parse_bytes
from dhelix.passes.hlo.constraints import Axes
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import Plan, PlanTarget
from dhelix.passes.sharding import memory as memories
from dhelix.passes.sharding.collective_times import CollectiveTimes, times_of
from dhelix.passes.sharding.factors import Factor, Factors, ShardingError, admissible
from dhelix.passes.sharding.groups import ParameterGroup, PlannedGroups, held, part_of, plan_groups
from dhelix.passes.sharding.overlap import NOTHING, Overlap
from dhelix.passes.sharding.planner import TIE, Planned, in_words, plan
from dhelix.passes.sharding.sharding_plan import ShardingPlan, axis_names, axis_sizes, check_group
from dhelix.passes.sharding.sizes import Batch, check_names
from dhelix.passes.sharding.step_times import Compute, Job
from dhelix.profiles.files import storage
from dhelix.profiles.hardware import Hardware
from dhelix.profiles.profile import Section
from dhelix.runtime.compiler import deviceless, lowering, memory_need, tuned
from dhelix.runtime.planning.finalists import by_programs, finalists, near
from dhelix.runtime.planning.step_sizes import StepSizes, mesh_of_arguments, summed_bytes
from dhelix.runtime.sharding import nnx_objects
from dhelix.runtime.sharding.placed_states import without_axes
from dhelix.runtime.sharding.state_plan import StatePlan
from dhelix.runtime.step.frameworks import nnx_front
from dhelix.runtime.step.interleaved_step import InterleavedStep
from dhelix.runtime.step.options import AUTO, StepOptions
from dhelix.runtime.step.strand_interleave import interleaved
from dhelix.runtime.step.target import Target

_INSIDE = "inside"


@dataclass(frozen=True)
class AtHand:
    """What the planner needs to know about a step at hand.

    Attributes:
      job: sizes, bytes and speed of the step on one GPU.
      mesh: all data-parallel devices.
      axes: their mesh axes.
      choices: the factors that these axes carry out for this step.
      hardware: the GPU, with `mesh.gpus` data-parallel devices in a node.
      link, setting: link and launch setting of the profile.
      times: how long collectives take.
      source: where these times come from, in words.
      overlap: how much compute and collectives slow each other down.
      limit: bytes of memory of a GPU that may be used.
      notes: what is measured, scaled and guessed.
      groups: the groups of parameters that choose factors of their own, and the others; empty if all have the same.
      states: numbers of the step's arguments (leaves, in order) that are states.
      target: the GPUs and the costs of operators.
    """

    job: Job
    mesh: Factor
    axes: Axes
    choices: tuple[Factors, ...]
    hardware: Hardware
    link: str
    setting: str
    times: CollectiveTimes
    source: str
    overlap: Overlap
    limit: float
    notes: tuple[str, ...]
    groups: tuple[ParameterGroup, ...] = ()
    states: frozenset[int] = frozenset()
    target: Target | None = None


@dataclass(frozen=True)
class PlannedStates:
    """How the states of a step are best sharded. `strand_interleave(sharding=...)` and `shard_state` take it.

    Attributes:
      sharding: the section of a plan file: factors and mesh axes.
      planned: the planner's result, with memory and times of all factors that the mesh carries out.
      at_hand: what was planned for.
      notes: what is measured, scaled and guessed, and what would be faster on another mesh.
      groups: the result for groups of parameters; None without groups. Then `planned` is for equal factors of all.
    """

    sharding: ShardingPlan
    planned: Planned
    at_hand: AtHand
    notes: tuple[str, ...]
    groups: PlannedGroups | None = None

    def __str__(self) -> str:
        best = self.planned.best if self.groups is None else self.groups.best
        name = best.factors.strategy
        step = milliseconds(best.times.step)
        if self.groups is None and best.factors in self.planned.compiled:
            step = f"{milliseconds(self.planned.compiled[best.factors])} by its program and {step} by formulas"
        times = f"a step takes {step}, {milliseconds(best.times.exposed)} of it exposed"
        memory = f"{in_words(best.memory.total)} of {in_words(self.planned.limit)}"
        said = f"{best.factors} over {', '.join(self.sharding.axes)}"
        if self.groups is None:
            return "\n".join([f"{name or 'sharding'}: {said}; {times}; {memory}", *self.notes])
        rows = [
            f"  {key}: {found.factors.strategy or 'sharding'}, {found.factors}; {in_words(held(found))}, "
            f"{milliseconds(found.times.exposed)} exposed"
            for key, found in self.groups.of_group.items()
        ]
        first = f"groups of parameters over {', '.join(self.sharding.axes)}: {times}; {memory}"
        return "\n".join([first, *rows, self.groups.gain, *self.notes])

    def save(self, path: str | Path) -> None:
        """Writes a plan file. Raises PlanError if it cannot be written."""
        here = self.at_hand
        gpu = here.hardware.name.removesuffix(f"-{here.link}")
        target = PlanTarget.of(gpu, here.link, here.setting, here.mesh.gpus)
        plan_files.save(Plan(f"states of {here.job.sizes.name}", target, sharding=self.sharding), path)


def plan_sharding(
    step: Callable[..., Any],
    *args: Any,
    axes: str | Sequence[str] = "dp",
    microbatches: int | None = None,
    memory: int | str | None = None,
    profile: Any = AUTO,
    groups: str | Sequence[str] = (),
    compare: bool = True,
) -> PlannedStates:
    """Plans how the states of a train step are sharded, over the mesh that its arguments are on.

    Args:
      step: the step for plain data parallelism: a function, the result of `jax.jit`, or of `strand_interleave`.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s with shardings. States are whole, or sharded already.
      axes: the data-parallel mesh axes, the major one first.
      microbatches: micro-batches of a step; default: those of `strand_interleave`, or 1.
      memory: memory of a GPU that may be used, in bytes or as "60GiB"; default: all of it.
      profile: "auto", the file of a profile, or None for times from bandwidths, as for `strand_interleave`.
      groups: keys of groups of parameters that choose factors of their own, such as ("embedding", "lora_*"): parts of
        their paths, as for `sharding_plan`. All other parameters are a group, too.
      compare: whether candidates whose times are within 10 % are compiled as they would run, and their programs decide.
        This takes as long as compiling the step some times. It is not done for `groups`.

    Returns:
      The plan with the least exposed communication that fits, among those that the mesh carries out. With `groups`,
      it has the same factors for all of them, unless others gain more than 2 %.

    Raises:
      ShardingError: nothing fits, the mesh is not one of GPUs, the step has no states, or a key matches no parameter.
      DhelixError: the profile cannot be read, or has no times for this launch setting, or OR-tools is missing.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    here = at_hand(step, args, names, microbatches, memory, profile, groups=keys_of(groups))
    if here.groups:
        of_groups = plan_groups(here.job, here.groups, here.times, here.limit, here.overlap)
        return PlannedStates(of_groups.plan(names), of_groups.alike, here, here.notes, of_groups)
    found = plan(here.job, here.mesh, here.times, here.limit, here.overlap, choices=here.choices)
    found, lines = compared(found, here, step, args) if compare else (found, ())
    better = better_elsewhere(found, here)
    section = ShardingPlan(found.best.factors, _INSIDE, axes=names)
    return PlannedStates(section, found, here, (*here.notes, *lines, *better))


def compared(
    found: Planned, here: AtHand, step: Callable[..., Any], args: Sequence[Any]
) -> tuple[Planned, tuple[str, ...]]:
    """The planner's result after a comparison of its closest candidates by their programs, and a line about it."""
    if here.target is None or not (closest := near(found)):
        return found, ()
    return by_programs(found, finalists(step, args, here.states, here.axes, closest, here.target))


def keys_of(groups: Any) -> tuple[str, ...]:
    """The keys of groups of parameters. Raises ShardingError if one is none, or occurs twice."""
    if isinstance(groups, Mapping):
        raise ShardingError(
            f"groups={groups!r}: the planner chooses what groups have, so give their keys alone, such as "
            f"groups={tuple(groups)!r}; dhelix.sharding_plan takes what you choose"
        )
    keys = (groups,) if isinstance(groups, str) else tuple(groups)
    for key in keys:
        check_group(key)
    check_names(keys)
    return keys


def better_elsewhere(found: Planned, here: AtHand) -> tuple[str, ...]:
    """A line about factors that the mesh at hand cannot carry out, if they are faster than those that it can."""
    other = plan(found.job, here.mesh, here.times, found.limit, here.overlap, found.objective).best
    saved = found.best.value(found.objective) - other.value(found.objective)
    if other.factors in here.choices or saved <= TIE * found.best.value(found.objective):
        return ()
    sizes = axis_sizes(other.factors)
    axes = " x ".join(f"{name}={size}" for name, size in zip(axis_names(len(sizes)), sizes, strict=True))
    return (f"{other.factors} would save {milliseconds(saved)}, on a mesh of {axes} (dhelix.mesh_of makes it)",)


def at_hand(
    step: Callable[..., Any],
    args: Sequence[Any],
    axes: Axes,
    microbatches: int | None = None,
    memory: int | str | None = None,
    profile: Any = AUTO,
    batch: Batch | None = None,
    name: str | None = None,
    target: Target | None = None,
    groups: Sequence[str] = (),
) -> AtHand:
    """What the planner needs to know. The plain step is compiled.

    Args:
      batch: what a GPU computes, with its micro-batches; None: `microbatches`, of as many tokens as it looks up.
      name: name of the model; None: that of the step.
      target: the GPUs and the source of costs; None: those of the step's devices and of `profile`.
      groups: keys of groups of parameters.
      others: as in `plan_sharding`, which also says what is raised.
    """
    of_step = step.options.microbatches if isinstance(step, InterleavedStep) else None
    name = name or str(getattr(step, "__name__", "step"))
    mesh = mesh_of_arguments(args)
    whole = StatePlan("dp", axes)
    whole.on(mesh.shape)
    lowered = _lowered(step, args)
    found = StepSizes.of(lowered, args, axes, name, groups)
    if found.split:
        leaves, tree = jax.tree.flatten(tuple(args))
        placed = [without_axes(leaf, axes) if n in found.states else leaf for n, leaf in enumerate(leaves)]
        lowered = _lowered(step, jax.tree.unflatten(tree, placed))
    target = target or _target(lowered, profile)
    attached = deviceless.are_attached(jax_compat.devices(lowered))
    compiled = lowered.compile() if attached else tuned.compile(lowered)
    module = lowering.compiled_module(compiled)
    if batch is None:
        count = microbatches or of_step or 1
        batch = Batch(1, max(found.rows // count, 1), count)
    found = found.summed(summed_bytes(module, mesh, axes, found.gradient))
    parts = step_parts(module, target.costs())
    need = memory_need.of_compiled(compiled).total
    factor = _factor(mesh, axes, target.hardware.gpus_per_node)
    hardware = replace(target.hardware, gpus_per_node=factor.gpus)
    job = _job(found, batch, hardware, factor, parts, need)
    section = None if target.model is None else target.model.profile.section(target.model.setting)
    times, source = _times(hardware, target, section)
    overlap = overlap_of(step)
    setting = "default" if target.model is None else target.model.setting
    limit = hardware.memory_bytes if memory is None else float(parse_bytes("memory", memory))
    where = "on these GPUs" if attached else f"for {target.gpu} without a GPU"
    choices = _choices(factor, axes, mesh)
    notes = _notes(found, job, need, parts, where)
    if overlap is NOTHING:
        notes = (*notes, "a pipeline: its ticks wait for every collective of the states, so none is hidden")
    of_groups = tuple(part_of(job, sizes, factor, kept, choices) for sizes, kept in found.parts)
    return AtHand(
        job, factor, axes, choices, hardware, target.link, setting, times,
        source, overlap.on(hardware, section), limit, notes, of_groups, found.states, target,
    )  # fmt: skip


def overlap_of(step: Callable[..., Any]) -> Overlap:
    """Which collectives of the states run beside compute. The ticks of a pipeline wait for all of them."""
    piped = isinstance(step, InterleavedStep) and step.options.pipeline is not None
    return NOTHING if piped else Overlap()


def _lowered(step: Callable[..., Any], args: Sequence[Any]) -> jax.stages.Lowered:
    """The plain program of a step. A step of NNX objects returns them changed, as `nnx.jit` makes it."""
    if nnx_front.has_objects(args) and not isinstance(step, InterleavedStep):
        step = interleaved(step, StepOptions())
    if isinstance(step, InterleavedStep):
        lowered = nnx_objects.unwrapped(step.trace(*args).lower())
        _check_shared(lowered, args)
        return lowered
    if jax_compat.is_jitted(step):
        return step.lower(*args)  # pyright: ignore[reportFunctionMemberAccess]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")  # those of the batch
        return jax.jit(step, donate_argnums=tuple(range(len(args)))).lower(*args)


def _check_shared(lowered: jax.stages.Lowered, args: Sequence[Any]) -> None:
    """Refuses NNX objects that share variables: these are arguments once, and leaves of the objects twice."""
    arguments, leaves = len(jax.tree.leaves(lowered.args_info)), len(jax.tree.leaves(tuple(args)))
    if nnx_front.has_objects(args) and arguments != leaves:
        shared = leaves - arguments
        belong = "1 variable belongs" if shared == 1 else f"{shared} variables belong"
        raise ShardingError(
            f"{belong} to several objects; give one `nnx.state((model, optimizer))` to a step that merges it"
        )


def _target(lowered: jax.stages.Lowered, profile: Any) -> Target:
    if isinstance(profile, str | Path) and profile != AUTO:
        profile = storage.load(profile)
    target = Target.of(lowered, StepOptions(profile=profile))
    if target is None:
        raise ShardingError(
            "the step's arguments are not on GPUs; without a GPU, give jax.ShapeDtypeStructs with shardings over a "
            'mesh of GPUs such as dhelix.deviceless.mesh({"dp": 8}, "h200")'
        )
    return target


def _factor(mesh: Mesh, axes: Axes, gpus_per_node: int) -> Factor:
    """The data-parallel devices as GPUs of a node x nodes. Axes after the last data-parallel one lie within it."""
    names, data = list(mesh.axis_names), prod(mesh.shape[axis] for axis in axes)
    inner = prod(mesh.shape[name] for name in names[names.index(axes[-1]) + 1 :] if name not in axes)
    gpus = gcd(data, max(gpus_per_node // inner, 1))
    return Factor(gpus, data // gpus)


def _job(found: StepSizes, batch: Batch, hardware: Hardware, mesh: Factor, parts: StepParts, need: int) -> Job:
    """The job whose plain step needs `need` bytes, and computes for as long as `parts` say."""
    bandwidth = hardware.memory_bandwidth * hardware.memory_efficiency
    one = Job(found.sizes, batch, Compute(1.0, bandwidth), found.kept, split=_INSIDE)
    plain = Factors(mesh)
    known = memories.memory(one.sizes, plain, one.kept, batch, one.bucket, _INSIDE).total
    if batch.microbatches > 1:  # the plain step has no strands, so it keeps the gradients of one micro-batch
        known += one.kept.moved_parameter * one.sizes.parameters * found.trained
    seconds = parts.compute + parts.copies + parts.clock + parts.idle
    work = batch.microbatches * (one.forward + one.backward)  # at one operation per second
    speed = work / max(seconds - one.update_seconds(plain), 0.1 * seconds)
    return replace(one, compute=Compute(speed, bandwidth), rest=need - known)


def _choices(factor: Factor, axes: Axes, mesh: Mesh) -> tuple[Factors, ...]:
    """The factors that the axes carry out."""
    choices = []
    for factors in admissible(factor):
        with contextlib.suppress(ShardingError):
            StatePlan(factors, axes).on(mesh.shape)
            choices.append(factors)
    return tuple(choices)


def _times(hardware: Hardware, target: Target, section: Section | None) -> tuple[CollectiveTimes, str]:
    measured = section.collectives if section else None
    source = f"the profile {target.gpu} {target.link} and the GPU's links"
    return times_of(measured, hardware), source if measured else f"the links of {hardware.name}"


def _notes(found: StepSizes, job: Job, need: int, parts: StepParts, where: str) -> tuple[str, ...]:
    kept = job.kept
    strands = "; strands keep no gradients of a micro-batch, so they need less" if job.batch.microbatches > 1 else ""
    widths = f"{kept.parameter:g}, {kept.gradient:g} and {kept.optimizer:.3g}"
    notes = [
        f"memory: the plain step needs {in_words(need)} by memory_analysis(), compiled {where}; a parameter has "
        f"{widths} bytes of parameter, gradient and optimizer state{strands}",
        f"compute: predicted with costs from the {parts.costs}, {parts.guessed:.0%} of it guessed; a layer's share is "
        "guessed from its parameters",
    ]
    if found.split:
        notes.append("states are sharded already; the plan is for whole ones")
    return tuple(notes)
