"""Runs operators and pairs of operators on the GPUs, and returns how long they took.

    measurer = GpuMeasurer()
    outcomes = measurer.measure([Item(gemm), Item(all_gather, gemm)], repeats=8)
    outcomes[0]            # (Sample(seconds=..., first=..., second=...), ...) or a sentence why there are none

An item is one operator, which runs alone, or a pair of operators, which run at once. A measuring program runs several
items. JAX lowers the program as a placeholder with flat arrays as arguments. While XLA compiles it, two passes
replace its body (`replay.library_calls` before scheduling, `replay.program` after scheduling). The compiler hook is
removed after the compilation. The times come from one profiler trace of one execution. The GPU rests between the
warm-up execution and the traced execution, because a rested GPU runs at full clock for a short time.

On several GPUs, a collective seems to take longer on the GPUs that arrive early and wait. Its true time is the time on
the GPU that arrives last, which is the shortest time. So for an item with a collective, the sample of the GPU with the
shortest time counts. Several processes exchange their times. If one process fails, all processes fail.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dhelix.errors import DhelixError
from dhelix.passes.evaluation.replay.library_calls import LibraryCalls
from dhelix.passes.evaluation.replay.operators import Buffer
from dhelix.passes.evaluation.replay.program import (
    Item,
    OperatorReplay,
    Program,
    instance_name,
    parse_name,
    placeholder_name,
    split,
)
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.runtime.compiler import registration
from dhelix.runtime.processes import agreement
from dhelix.runtime.profiling.traces import executions
from dhelix.runtime.profiling.traces.executions import Execution

_AXIS = "gpus"
_SIDES = ("first", "second")
_REST_SECONDS = 0.1
_MEMORY_SHARE = 0.5  # fraction of JAX's memory for arguments; results and cuDNN's workspaces need the rest
_BROKEN = (
    "ILLEGAL_ADDRESS",
    "illegal memory access",
    "LAUNCH_FAILED",
    "unspecified launch failure",
    "MISALIGNED_ADDRESS",
)
# Errors of a compilation: JaxRuntimeError for an XLA status, or a C++ exception as jaxlib passes it on.
COMPILER_ERRORS = (RuntimeError, IndexError, ValueError)
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "OUT_OF_MEMORY")


@dataclass(frozen=True, slots=True)
class Sample:
    """The times of one execution of an item, in seconds after the start of the item's first kernel.

    Attributes:
      seconds: time at which the item ends.
      first: time at which the first operator ends.
      second: time at which the second operator ends; 0 if the item has one operator only.
    """

    seconds: float
    first: float
    second: float = 0.0


type Outcome = tuple[Sample, ...] | str
"""The result for one item: at least one sample, or the reason why there is no sample."""


class Measurer(Protocol):
    """The interface of measurers. A measurer runs items on GPUs, or looks up earlier measurements of them."""

    def measure(self, items: Sequence[Item], repeats: int) -> list[Outcome]:
        """Returns one outcome for each item, in their order."""
        ...


class GpuMeasurer:
    """Measures on the GPUs of all processes together. Every process must call `measure` with the same items."""

    def __init__(
        self,
        devices: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        memory_bytes: int | None = None,
        marks: bool = False,
    ) -> None:
        """Creates a measurer.

        Args:
          devices: GPUs to measure on, in the order of the step's devices; default: all GPUs.
          options: XLA options of the executables.
          memory_bytes: memory on each GPU for the arguments of one program. The default is half of the memory that JAX
            may allocate.
          marks: whether work runs in CUDA graphs or on copy engines, so that the trace does not name its instructions;
            see `Program.marks`.

        Raises:
          DhelixError: there is no GPU.
        """
        self.devices = list(jax.devices() if devices is None else devices)
        if any(device.platform != "gpu" for device in self.devices):
            raise DhelixError(
                "measuring needs GPUs, but jax.devices() has none; check that JAX's CUDA plugin is installed"
            )
        self.mesh = Mesh(np.array(self.devices), (_AXIS,))
        self.options = dict(options or {})
        room = memory_bytes or _allocatable(self.devices)
        self.memory_bytes = min(map(int, agreement.gathered("compare memory", str(room))))
        self.marks = marks
        self._arrays: dict[Buffer, list[jax.Array]] = {}

    def measure(self, items: Sequence[Item], repeats: int) -> list[Outcome]:
        """Returns one outcome for each item, in their order. If a program fails, bisection finds the items that fail.

        Raises:
          DhelixError: a GPU broke down. After that, no program runs in this process, so no item can be measured.
        """
        fitting = [item for item in items if item.gpus <= len(self.devices)]
        outcomes: dict[Item, Outcome] = {}
        for group in split(fitting, self.memory_bytes):
            outcomes.update(zip(group, self._measure(group, repeats), strict=True))
        return [outcomes.get(i) or f"needs {i.gpus} GPUs; there are {len(self.devices)}" for i in items]

    def _measure(self, items: tuple[Item, ...], repeats: int) -> list[Outcome]:
        try:
            return list(self._run(Program(items, repeats, self.marks)))
        except (DhelixError, *COMPILER_ERRORS) as error:
            why = reason(error)
        if any(words in why for words in _BROKEN):
            raise DhelixError(f"a GPU failed while {len(items)} operators and pairs ran; run the command again ({why})")
        # Buffers are freed only after the except clause, because the error's traceback keeps the arguments alive.
        self._arrays.clear()
        if len(items) == 1:
            return [why]
        half = len(items) // 2
        return self._measure(items[:half], repeats) + self._measure(items[half:], repeats)

    def _run(self, program: Program) -> Iterator[Outcome]:
        errors = (DhelixError, *COMPILER_ERRORS)
        compiled = agreement.together(
            "compile operators", lambda: compile_program(program, self.mesh, self.options), errors
        )
        arguments = agreement.together("allocate operators' arguments", lambda: self._arguments(program), errors)
        jax.block_until_ready(compiled(*arguments))  # warm-up: creates NCCL's communicators and cuBLAS's handles
        time.sleep(_REST_SECONDS)
        name = f"jit_{placeholder_name(program)}"
        found = executions.record_everywhere(lambda: jax.block_until_ready(compiled(*arguments)), name, _instance)
        named = [list(executions.between_marks(of_gpu, _is_mark)) for of_gpu in found]
        samples = samples_of(named, program.items)
        for number in range(len(program.items)):
            yield samples.get(number) or _unseen(program.items[number], program.marks)

    def _arguments(self, program: Program) -> list[jax.Array]:
        """The program's buffers, filled with numbers.

        The program uses buffers of earlier programs again. If memory is short, buffers that it does not need are freed.
        """
        wanted: dict[Buffer, int] = defaultdict(int)
        for buffer in program.buffers:
            wanted[buffer] += 1
        then = {buffer: len(arrays) for buffer, arrays in self._arrays.items()}
        then |= {buffer: max(count, then.get(buffer, 0)) for buffer, count in wanted.items()}
        if sum(buffer.bytes * count for buffer, count in then.items()) > 1.5 * self.memory_bytes:
            self._arrays = {b: a[: wanted[b]] for b, a in self._arrays.items() if b in wanted}
        for buffer, count in wanted.items():
            have = self._arrays.setdefault(buffer, [])
            have.extend(filled(buffer, len(have) + n, self.mesh) for n in range(count - len(have)))
        return [array for buffer in sorted(wanted) for array in self._arrays[buffer][: wanted[buffer]]]


def compile_program(program: Program, mesh: Mesh, options: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
    """Compiles the measuring program for the devices of `mesh`.

    Raises:
      DhelixError: a pass cannot build the program.
    """
    spec, sharding = PartitionSpec(_AXIS), NamedSharding(mesh, PartitionSpec(_AXIS))

    def placeholder(*buffers: jax.Array) -> jax.Array:
        run = jax.shard_map(
            lambda *_: jnp.zeros((1,), jnp.float32), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return run(*buffers)

    placeholder.__name__ = placeholder_name(program)
    arguments = [jax.ShapeDtypeStruct((mesh.size * b.elements,), _dtype(b), sharding=sharding) for b in program.buffers]
    lowered = jax.jit(placeholder, keep_unused=True).lower(*arguments)
    manager = PassManager([LibraryCalls(program), OperatorReplay(program)], strict=True)
    errors: list[Exception] = []

    def transform(stage: Stage, module: bytes) -> bytes | None:
        try:
            return manager.run(stage, module)[0]
        except DhelixError as error:
            errors.append(error)
            raise

    try:
        with registration.temporary_hook(transform, placeholder.__name__):
            return lowered.compile(dict(options or {}))
    except jax.errors.JaxRuntimeError:
        if errors:
            raise errors[0] from None
        raise


def filled(buffer: Buffer, seed: int, mesh: Mesh) -> jax.Array:
    """A buffer on each device, filled with floating-point numbers between -1/8 and 1/8 or with integers below 8192.

    The buffer is not zero, because zeros take less power, so products would run faster than on real data. It has many
    different integers, because a scatter with few different indices would write most rows to the same places.
    """
    dtype = _dtype(buffer)

    def fill(seed: jax.Array) -> jax.Array:
        bits = lax.iota(jnp.uint32, max(buffer.elements, 1)) + seed
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
        if jnp.issubdtype(dtype, jnp.floating):
            return ((bits >> 8).astype(jnp.float32) * 2.0**-26 - 0.125).astype(dtype)
        if dtype == jnp.bool_:
            return (bits >> 31).astype(dtype)
        return (bits >> (19 if dtype.itemsize > 1 else 25)).astype(dtype)

    run = jax.shard_map(fill, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(_AXIS), check_vma=False)
    return jax.jit(run)(np.uint32((seed * 0x9E3779B9) % 2**32))


def samples_of(gpus: Sequence[Sequence[Execution]], items: Sequence[Item]) -> dict[int, tuple[Sample, ...]]:
    """Returns the samples of a trace, by the item's number.

    Args:
      gpus: executions on each GPU. Their names were made by `instance_name`.
      items: the measured items.
    """
    seen: dict[tuple[int, int], list[Sample]] = defaultdict(list)
    for found in gpus:
        spans: dict[tuple[int, int], dict[str, tuple[float, float]]] = defaultdict(dict)
        for execution in found:
            parsed = parse_name(execution.name)
            if parsed is None or parsed[1] == "copy":
                continue
            number, side, repeat = parsed
            start, end = spans[number, repeat].get(side, (execution.start, execution.end))
            spans[number, repeat][side] = (min(start, execution.start), max(end, execution.end))
        for instance, sides in spans.items():
            nameless = sides.pop("mark", None)  # kernels without a name, from a CUDA graph or a copy engine
            missing = [side for side in _SIDES[: len(items[instance[0]].operators)] if side not in sides]
            if nameless and missing:
                sides[missing.pop(0)] = nameless
            if not missing:
                seen[instance].append(_sample(sides))
    samples: dict[int, list[Sample]] = defaultdict(list)
    for (number, _), of_gpus in sorted(seen.items()):
        collective = any(operator.is_collective for operator in items[number].operators)
        samples[number].append(min(of_gpus, key=lambda s: s.seconds) if collective else _median(of_gpus))
    return {number: tuple(of_item) for number, of_item in samples.items()}


def _sample(sides: Mapping[str, tuple[float, float]]) -> Sample:
    start = min(span[0] for span in sides.values())
    ends = {side: span[1] - start for side, span in sides.items()}
    return Sample(max(ends.values()), ends["first"], ends.get("second", 0.0))


def _median(samples: Sequence[Sample]) -> Sample:
    return sorted(samples, key=lambda s: s.seconds)[(len(samples) - 1) // 2]


def _unseen(item: Item, marks: bool) -> str:
    if marks and item.second is not None and not any(o.is_collective for o in item.operators):
        return "kernels of one CUDA graph cannot be told apart"
    return "the profiler saw no kernel of it"


def _is_mark(name: str) -> bool:
    parsed = parse_name(name)
    return parsed is not None and parsed[1] in ("mark", "copy")


def _instance(name: str) -> str | None:
    parsed = parse_name(name)
    return None if parsed is None else instance_name(*parsed)


def _dtype(buffer: Buffer) -> Any:
    names = {"pred": "bool", "s8": "int8", "s16": "int16", "s32": "int32", "s64": "int64", "u8": "uint8",
             "u16": "uint16", "u32": "uint32", "u64": "uint64", "f16": "float16", "f32": "float32",
             "f64": "float64", "bf16": "bfloat16", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}  # fmt: skip
    if buffer.element_type not in names:
        raise DhelixError(f"no array of {buffer.element_type} can be made for an operator that reads one")
    return jnp.dtype(names[buffer.element_type])


def reason(error: Exception) -> str:
    """The message of an error as one line, shortened; never empty."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "out of memory" if any(words in text for words in _OUT_OF_MEMORY) else text[:300]


def _allocatable(devices: Sequence[Any]) -> int:
    own = next(device for device in devices if device.process_index == jax.process_index())
    limit = (own.memory_stats() or {}).get("bytes_limit", 8 << 30)
    return int(_MEMORY_SHARE * limit)
