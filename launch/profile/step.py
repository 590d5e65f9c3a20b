"""The compiled step that `dhelix profile` is about: of a dump, or of a preset of `dhelix train`.

    step = of_dump("xla_dump")
    step = of_preset(trainer.Options("llama-8b", layers=4, mesh="tp=4"))      # compiled here, without a GPU
    lowered, arguments = build({"preset": "llama-8b", "layers": 4})           # arguments() to run it with

Without a GPU the compiler takes what its autotuner chose on such a card, as far as that is known; other kernels, and
with them keys, may not be the card's. What measures therefore compiles the preset itself (`profile_worker`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.launch.inspect import dumps, targets
from dhelix.launch.train import trainer
from dhelix.models import Training
from dhelix.passes.analysis.collectives import find_collective
from dhelix.passes.hlo import HloModule
from dhelix.profiles import hardware
from dhelix.profiles.profile import Profile
from dhelix.runtime.compiler import deviceless, tuned
from dhelix.runtime.compiler.lowering import compiled_module

TARGET = "h200"
"""What presets are compiled for where nothing else is said, one of `deviceless.targets()`."""
_GPUS, _GPUS_PER_HOST = 4, 8  # of a preset without a mesh; of a host that is compiled for


@dataclass(frozen=True)
class CompiledStep:
    """What is profiled.

    Attributes:
      name: for people.
      module: scheduled.
      gpus: how many it runs on.
      hardware: the GPU whose times count: that it was compiled for, unless another was asked for.
      notes: what there is to say about reading it, and about whose times count.
    """

    name: str
    module: HloModule
    gpus: int
    hardware: str
    notes: tuple[str, ...] = ()


def of_dump(path: str | Path, gpu: str | None = None) -> CompiledStep:
    """The step in a file or a folder of `--xla_dump_to`.

    Args:
      gpu: whose times count; None: that of the dump.

    Raises DhelixError: nothing to read there, not scheduled, not compiled for GPUs, or for one that nothing describes.
    """
    file = dumps.find_module(path)
    if "cpu_after" in file.name:
        raise DhelixError(f"{file} was compiled for CPU, and profiles are of GPUs; compile the step for GPUs")
    dump = dumps.read(file)
    described, notes = targets.choose(file, dump.module, hardware.describe(gpu) if gpu else None)
    if gpu is None and described.name not in hardware.ALL:
        raise DhelixError(f"{file} was compiled for {described.name}, {targets.ASK}")
    return CompiledStep(str(file), dump.module, gpus_of(dump.module), described.name, (*dump.notes, *notes))


def of_preset(options: trainer.Options, target: str = TARGET) -> CompiledStep:
    """The step that `dhelix train` runs with these options, compiled for GPUs that need not exist.

    Raises DhelixError: options that do not fit each other, or nothing to compile with (extra `compile`).
    """
    training, batch = deviceless_training(options, target)
    module = compiled_module(tuned.compile(_lower(options, training, batch)))
    return CompiledStep(name_of(options, training), module, training.mesh.size, target.upper())


def target_of(gpu: str) -> str:
    """The description of a GPU that presets are compiled for. Raises DhelixError where there is none."""
    if gpu.lower() not in deviceless.targets():
        known = ", ".join(target.upper() for target in deviceless.targets())
        raise DhelixError(
            f"a preset is compiled for {known} here, and there is no description of {gpu} to compile for; give a dump"
            " of a step that was compiled on such GPUs (XLA_FLAGS=--xla_dump_to=DIR)"
        )
    return gpu.lower()


def deviceless_training(options: trainer.Options, target: str = TARGET) -> tuple[Training, int]:
    """The plain train step on GPUs that need not exist, and how many sequences it takes."""
    gpus = gpus_of_options(options)
    per_host = min(gpus, _GPUS_PER_HOST)
    devices = deviceless.topology(target, f"1x{-(-gpus // per_host)}x{per_host}").devices
    return trainer.make_training(options, trainer.configuration(options), devices)


def build(
    options: Mapping[str, Any], costs: Profile | None = None
) -> tuple[jax.stages.Lowered, Callable[[], tuple[Any, ...]]]:
    """The step of `trainer.Options(**options)` for this process's devices, and what makes a state and a batch for it.

    Args:
      costs: by which strands are interleaved; None: those that are found.

    Raises DhelixError: options that do not fit each other or the devices.
    """
    given = trainer.Options(**options)
    config = trainer.configuration(given)
    training, batch = trainer.make_training(given, config, jax.devices())
    shape = (batch, config.seq + 1)

    def tokens() -> dict[str, jax.Array]:
        return {"tokens": jax.random.randint(jax.random.key(1), shape, 0, config.vocab)}

    def arguments() -> tuple[Any, ...]:
        return training.init(jax.random.key(0)), jax.jit(tokens, out_shardings=training.batch_sharding)()

    return _lower(given, training, batch, costs), arguments


def gpus_of_mesh(mesh: str) -> int:
    """Devices that the axes of `--mesh` need, `dp=2,tp=4`; 0 if it names none, or names them wrongly."""
    sizes = [size for _, _, size in (part.partition("=") for part in mesh.split(","))]
    return math.prod(map(int, sizes)) if all(map(str.isdecimal, sizes)) else 0


def gpus_of_options(options: trainer.Options) -> int:
    """How many GPUs a preset is compiled for without any."""
    return gpus_of_mesh(options.mesh) * options.pp or max(_GPUS, options.pp)


def gpus_of(module: HloModule) -> int:
    """How many GPUs the collectives of a module speak of; 1 if there are none."""
    found = (find_collective(i) for c in module.computations for i in c.instructions)
    return 1 + max((d for collective in found if collective for group in collective.groups for d in group), default=0)


def _lower(
    options: trainer.Options, training: Training, batch: int, costs: Profile | None = None
) -> jax.stages.Lowered:
    chosen = options.step if costs is None else options.step.but(profile=costs)
    step = trainer.make_step(training, options.plain, chosen)
    return step.lower(training.abstract_state(), training.abstract_batch(batch))


def name_of(options: trainer.Options, training: Training) -> str:
    """The step in words."""
    axes = " x ".join(f"{name} {size}" for name, size in training.mesh.shape.items())
    how = "" if options.plain else ", interleaved"
    size = f"{training.config.layers} layers, sequence {training.config.seq}, {options.microbatches} micro-batches"
    size += f", vocabulary {options.vocab:,}" if options.vocab else ""
    return f"{options.preset}: {size}{how}, {axes}"
