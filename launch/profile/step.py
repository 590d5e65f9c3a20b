"""The compiled step that `dhelix profile` measures. It comes from a dump, or from a preset of `dhelix train`.

    step = of_dump("xla_dump")
    step = of_preset(trainer.Options("llama-8b", layers=4, mesh="tp=4"))      # compiled here, without a GPU
    lowered, arguments = build({"preset": "llama-8b", "layers": 4})           # arguments() to run it with

Without a GPU, the compiler uses recorded autotuner results of the GPU that it compiles for. If a result is missing,
kernels and their keys may differ from those on the GPU. Therefore the process that measures compiles the preset again
(`dhelix.launch.profile.worker`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.launch.inspect import targets
from dhelix.launch.inspect.reading import dumps
from dhelix.launch.train import trainer
from dhelix.launch.train.meshes.pipelined import PipelinedTraining
from dhelix.models import Training
from dhelix.passes.analysis.collectives import find_collective
from dhelix.passes.hlo import HloModule
from dhelix.profiles import hardware
from dhelix.profiles.profile import Profile
from dhelix.runtime.compiler import deviceless, tuned
from dhelix.runtime.compiler.lowering import compiled_module

TARGET = "h200"
"""GPU that presets are compiled for by default, one of `deviceless.targets()`."""
GPUS = 4
"""Number of GPUs if --mesh is not given."""
_GPUS_PER_HOST = 8  # the largest number


@dataclass(frozen=True)
class CompiledStep:
    """The step to profile.

    Attributes:
      name: the step in words, for messages and tables.
      module: the scheduled module.
      gpus: number of GPUs that the module runs on.
      hardware: name of the GPU whose times are used: the requested GPU, or else the GPU of the compilation.
      notes: remarks for the user on how the step was read, and on the GPU whose times are used.
    """

    name: str
    module: HloModule
    gpus: int
    hardware: str
    notes: tuple[str, ...] = ()


def of_dump(path: str | Path, gpu: str | None = None) -> CompiledStep:
    """The step in `path`, a file or a folder that `--xla_dump_to` wrote.

    Args:
      gpu: name of the GPU whose times are used; None: the GPU of the dump.

    Raises:
      DhelixError: there is no module, it has no schedule, or dhelix does not know the GPU of the compilation.
    """
    file = dumps.find_module(path)
    if "cpu_after" in file.name:
        raise DhelixError(f"{file} was compiled for CPU, but profiles are for GPUs; compile the step for GPUs")
    dump = dumps.read(file)
    with dumps.blaming(file):
        described, notes = targets.choose(file, dump.module, hardware.describe(gpu) if gpu else None)
        gpus = gpus_of(dump.module)
    if gpu is None and described.name not in hardware.ALL:
        raise DhelixError(f"{file} was compiled for {described.name}, {targets.ASK}")
    return CompiledStep(str(file), dump.module, gpus, described.name, (*dump.notes, *notes))


def of_preset(options: trainer.Options, target: str = TARGET) -> CompiledStep:
    """The step that `dhelix train` runs with these options, compiled for GPUs that this machine need not have.

    Raises:
      DhelixError: the options contradict each other, or the GPU compiler (extra `compile`) is not installed.
    """
    training, batch = deviceless_training(options, target)
    module = compiled_module(tuned.compile(_lower(options, training, batch)))
    return CompiledStep(name_of(options, training), module, training.mesh.size, target.upper())


def target_of(gpu: str) -> str:
    """The name in `deviceless.targets()` for the GPU `gpu`. Raises DhelixError if there is none."""
    if gpu.lower() not in deviceless.targets():
        known = ", ".join(target.upper() for target in deviceless.targets())
        raise DhelixError(
            f"presets can be compiled for {known} here, but not for {gpu}; give a dump of a step that was compiled on "
            "such GPUs (XLA_FLAGS=--xla_dump_to=DIR)"
        )
    return gpu.lower()


def deviceless_training(options: trainer.Options, target: str = TARGET) -> tuple[Training, int]:
    """The plain train step for GPUs that this machine need not have, and its batch size in sequences."""
    return trainer.make_training(options, trainer.configuration(options), deviceless_gpus(options, target))


def deviceless_gpus(options: trainer.Options, target: str = TARGET) -> Sequence[Any]:
    """As many GPUs as the step needs, which this machine need not have."""
    gpus = gpus_of_options(options)
    per_host = min(gpus, _GPUS_PER_HOST)
    return deviceless.topology(target, f"1x{-(-gpus // per_host)}x{per_host}").devices


def build(
    options: Mapping[str, Any], costs: Profile | None = None
) -> tuple[jax.stages.Lowered, Callable[[], tuple[Any, ...]]]:
    """Lowers the step of `trainer.Options(**options)` for this process's devices.

    Args:
      costs: profile with which strands are interleaved; None: the profile that the step itself finds.

    Returns:
      The lowered step, and a function that makes a state and a batch for the step.

    Raises:
      DhelixError: the options contradict each other or need other devices.
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
    """Number of devices that a `--mesh` such as `dp=2,tp=4` needs; 0 if the text is empty or malformed."""
    sizes = [size for _, _, size in (part.partition("=") for part in mesh.split(","))]
    return math.prod(map(int, sizes)) if all(map(str.isdecimal, sizes)) else 0


def gpus_of_options(options: trainer.Options) -> int:
    """Number of GPUs that a preset is compiled for on a machine without GPUs."""
    return gpus_of_mesh(options.mesh) * options.pp or max(GPUS, options.pp)


def gpus_of(module: HloModule) -> int:
    """Number of GPUs that the groups of the module's collectives mention; 1 if there are no collectives."""
    found = (find_collective(i) for c in module.computations for i in c.instructions)
    return 1 + max((d for collective in found if collective for group in collective.groups for d in group), default=0)


def _lower(
    options: trainer.Options, training: Training, batch: int, costs: Profile | None = None
) -> jax.stages.Lowered:
    chosen = options.step if costs is None else options.step.but(profile=costs)
    step = trainer.make_step(training, options.plain, chosen)
    return step.lower(training.abstract_state(), training.abstract_batch(batch))


def name_of(options: trainer.Options, training: Training) -> str:
    """The step in words: preset, sizes, what differs from the defaults, mesh."""
    axes = " x ".join(f"{name} {size}" for name, size in training.mesh.shape.items())
    how = "" if options.plain else ", interleaved"
    size = f"{training.config.layers} layers, sequence {training.config.seq}, {options.microbatches} micro-batches"
    size += f", vocabulary {options.vocab:,}" if options.vocab else ""
    size += f", capacity factor {options.capacity:g}" if options.capacity is not None else ""
    size += ", unrolled layers" if options.unrolled else ""
    size += f", {options.sharding}" if options.sharding != "shard_map" else ""
    size += f", keys by {options.context}" if options.context not in (None, "ring") else ""
    size += f", schedule {training.fold.schedule}" if isinstance(training, PipelinedTraining) else ""
    return f"{options.preset}: {size}{how}, {axes}"
