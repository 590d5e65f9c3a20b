"""`dhelix shard --live`: plans for the step of `dhelix train` that the flags describe.

The step is compiled on the GPUs at hand, or without any. Nothing is run. `runtime/planning/live_plan.py` says where
each number comes from.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.launch.profile import step as profile_step
from dhelix.launch.shard.groups import keys_of, notes_of
from dhelix.launch.shard.job import Task
from dhelix.launch.train import step_flags, trainer
from dhelix.launch.train.options import Options
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.sharding.planner import OBJECTIVES, Planned
from dhelix.passes.sharding.sizes import Batch
from dhelix.profiles.files import storage
from dhelix.profiles.hardware import LINKS, describe, gpu_name
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.planning import live_plan
from dhelix.runtime.planning.live_plan import AtHand
from dhelix.runtime.processes import launch_settings
from dhelix.runtime.step.target import Target

_GB = 1e9
_AXES = ("dp",)  # the data-parallel axis of the models' meshes


def task_of(chosen: Mapping[str, Any]) -> tuple[Task, AtHand]:
    """What the planner needs, for the flags of a step of `dhelix train`.

    Raises:
      DhelixError: the flags contradict each other, or the step cannot be compiled here.
    """
    options = _options(chosen)
    devices = _devices(options, chosen["hardware"])
    config = trainer.configuration(options)
    training, rows = trainer.make_training(options, config, devices)
    axes = training.mesh.shape
    sequences = rows // options.microbatches // axes["dp"] // axes.get("ep", 1)
    batch = Batch(max(sequences, 1), config.seq // axes.get("cp", 1), options.microbatches, config.remat != "none")
    inner = ", ".join(f"{name} {size}" for name, size in axes.items() if name != "dp" and size > 1)
    here = live_plan.at_hand(
        trainer.make_step(training, plain=True),
        (training.abstract_state(), training.abstract_batch(rows)),
        _AXES,
        memory=chosen["memory"] and round(_GB * chosen["memory"]),
        batch=batch,
        name=f"{options.preset} with {inner}" if inner else options.preset,
        target=_target(devices, chosen),
        groups=keys_of(chosen["groups"], config),
    )
    task = Task(
        here.job, here.mesh, here.hardware, here.link, here.setting, here.times, here.source,
        here.overlap, here.limit, here.choices, (*here.notes, *notes_of(chosen["groups"])), here.axes, here.groups,
    )  # fmt: skip
    return task, here


def compared(task: Task, planned: Planned, here: AtHand, chosen: Mapping[str, Any]) -> tuple[Task, Planned]:
    """The result after a comparison of the closest candidates by their programs, with lines about that and about what
    another mesh would gain. The ticks of a pipeline wait for all collectives, so formulas suffice there.
    """
    lines: tuple[str, ...] = ()
    if chosen["compare"] and chosen["pp"] == 1 and chosen["objective"] == OBJECTIVES[0]:
        options = _options(chosen)
        devices = _devices(options, chosen["hardware"])
        training, rows = trainer.make_training(options, trainer.configuration(options), devices)
        example = training.abstract_state(), training.abstract_batch(rows)
        costs = None if here.target is None or here.target.model is None else here.target.model.profile
        step = trainer.make_step(training, plain=False, options=options.step.but(profile=costs))  # those of the plan
        planned, lines = live_plan.compared(planned, here, step, example)
    return dataclasses.replace(task, notes=(*task.notes, *lines, *live_plan.better_elsewhere(planned, here))), planned


def _options(chosen: Mapping[str, Any]) -> Options:
    if not chosen["preset"]:
        raise DhelixError("which step? give --live --preset NAME, and the other flags of `dhelix train`")
    if chosen["states"] or chosen["states_group"]:
        raise DhelixError("--live plans how states are sharded; leave out --states and --states_group")
    given = dict(chosen) | {"microbatches": chosen["microbatches"] or Options().microbatches}
    attached = len(_attached())
    given["mesh"] = chosen["mesh"] or f"dp={attached if attached > 1 else profile_step.GPUS}"
    return step_flags.options(given, plain=True)


def _attached() -> Sequence[Any]:
    """The GPUs at hand. Without GPUs, JAX does not look for any."""
    deviceless.prepare_environment()
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        jax.config.update("jax_platforms", "cpu")
    return [device for device in jax.devices() if device.platform in ("gpu", "cuda")]


def _devices(options: Options, gpu: str) -> Sequence[Any]:
    """The GPUs at hand if they are enough, or else GPUs that this machine need not have."""
    attached = _attached()
    if len(attached) >= profile_step.gpus_of_options(options):
        return attached
    return profile_step.deviceless_gpus(options, profile_step.target_of(gpu))


def _target(devices: Sequence[Any], chosen: Mapping[str, Any]) -> Target:
    at_hand = deviceless.are_attached(devices)
    gpu = gpu_name(devices[0].device_kind) if at_hand else chosen["hardware"]
    link = launch_settings.link_of(os.environ) if at_hand and chosen["link"] == LINKS[0] else chosen["link"]
    nodes = chosen["gpus_per_node"] or 0
    profile = storage.load(chosen["profile"]) if chosen["profile"] else storage.find(gpu, link)
    hardware = describe(gpu, link, nodes)
    if profile is None:
        return Target(gpu, link, hardware)
    return Target(profile.hardware, profile.link, hardware, CostModel(profile, chosen["setting"], gpus_per_node=nodes))
