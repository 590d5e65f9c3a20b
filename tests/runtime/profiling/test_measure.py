"""Measuring operators and pairs: the meaning of a trace's executions, and what happens if a program does not run.

GPUs, executables and traces are stand-ins; the arrays are real, on CPU devices.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError, PassRefusal
from dhelix.passes.evaluation.operator_keys import key_of
from dhelix.passes.evaluation.replay.library_calls import LibraryCalls
from dhelix.passes.evaluation.replay.operators import Buffer, Operator, find_operators
from dhelix.passes.evaluation.replay.program import Item, Program, instance_name, parse_name, placeholder_name
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import HloModule
from dhelix.runtime.compiler import deviceless, lowering, registration
from dhelix.runtime.profiling import measure
from dhelix.runtime.profiling.measure import GpuMeasurer, Outcome, Sample, samples_of
from dhelix.runtime.profiling.traces import trace
from dhelix.runtime.profiling.traces.executions import Execution
from dhelix.tests.runtime.profiling import small_step
from dhelix.tests.runtime.profiling.recorded_traces import execution, kernel, profile

OPERATORS = small_step.operators(rows=4, width=64)
GATHER, GEMM, DOUBLED, SMALL, MOVED, SCATTER = (OPERATORS[name] for name in small_step.NAMES)


# Meaning of executions


def ran(item: int, side: str, start: float, end: float, repeat: int = 0) -> Execution:
    """An execution of an instance; times are in microseconds."""
    return execution(instance_name(item, side, repeat), start, end)


def microseconds(*times: float) -> Any:
    return pytest.approx([t * 1e-6 for t in times])


def values(sample: Sample) -> list[float]:
    return [sample.seconds, sample.first, sample.second]


def only_sample(item: Item, *gpus: Sequence[Execution]) -> list[float]:
    ((sample,),) = samples_of(gpus, [item]).values()
    return values(sample)


def test_an_operator_alone_takes_from_its_start_to_its_end() -> None:
    assert only_sample(Item(GEMM), [ran(0, "first", 10, 30)]) == microseconds(20, 20, 0)


def test_a_pair_takes_from_the_first_start_to_the_last_end() -> None:
    item = Item(GATHER, GEMM)
    assert only_sample(item, [ran(0, "first", 10, 30), ran(0, "second", 12, 50)]) == microseconds(40, 20, 40)
    assert only_sample(item, [ran(0, "second", 9, 20), ran(0, "first", 10, 30)]) == microseconds(21, 21, 11)


def test_kernels_with_a_pause_between_them_are_one_side() -> None:
    found = [ran(0, "first", 0, 4), ran(0, "second", 1, 30), ran(0, "first", 31, 35)]
    assert only_sample(Item(GEMM, GEMM), found) == microseconds(35, 35, 30)


def test_of_a_collective_the_gpu_counts_that_came_last() -> None:
    gpus = [[ran(0, "first", start, 50)] for start in (10, 35, 20, 0)]
    assert only_sample(Item(GATHER), *gpus) == microseconds(15, 15, 0)
    beside = [[ran(0, "first", 0, 30), ran(0, "second", 1, wait)] for wait in (70, 60, 90)]
    assert only_sample(Item(GEMM, GATHER), *beside) == microseconds(60, 30, 60)


def test_of_computation_the_middle_gpu_counts() -> None:
    gpus = [[ran(0, "first", 0, end)] for end in (30, 10, 20)]
    assert only_sample(Item(GEMM), *gpus) == microseconds(20, 20, 0)
    assert only_sample(Item(GEMM), *gpus, [ran(0, "first", 0, 90)]) == microseconds(20, 20, 0)


def test_each_repeat_is_a_sample_and_each_item_has_its_own() -> None:
    found = [ran(item, "first", 100 * repeat, 100 * repeat + 10 + item, repeat) for repeat in (1, 0) for item in (1, 0)]
    samples = samples_of([found], [Item(GEMM), Item(MOVED)])
    assert [[s.seconds for s in samples[number]] for number in (0, 1)] == [microseconds(10, 10), microseconds(11, 11)]


@pytest.mark.parametrize(("named", "expected"), [("first", (40, 20, 40)), ("second", (40, 40, 20))])
def test_what_has_no_name_is_the_side_that_is_missing(named: str, expected: tuple[float, ...]) -> None:
    found = [ran(0, named, 10, 30), ran(0, "mark", 12, 50)]
    assert only_sample(Item(GATHER, GEMM), found) == microseconds(*expected)


def test_what_has_no_name_is_an_operator_alone_if_nothing_else_is() -> None:
    assert only_sample(Item(GATHER), [ran(0, "mark", 10, 30)]) == microseconds(20, 20, 0)
    assert only_sample(Item(GATHER), [ran(0, "first", 10, 30), ran(0, "mark", 5, 50)]) == microseconds(20, 20, 0)


def test_two_sides_without_a_name_cannot_be_told_apart() -> None:
    assert samples_of([[ran(0, "mark", 10, 30)]], [Item(GEMM, DOUBLED)]) == {}


def test_copies_do_not_count() -> None:
    found = [ran(0, "copy", 0, 10), ran(0, "first", 10, 12), execution("replay_result", 50, 60), execution("", 0, 99)]
    assert only_sample(Item(GEMM), found) == microseconds(2, 2, 0)


def test_a_pair_with_one_side_is_no_sample() -> None:
    found = [ran(0, "first", 0, 10), ran(1, "first", 20, 30)]
    assert list(samples_of([found], [Item(GEMM, MOVED), Item(GEMM)])) == [1]
    assert samples_of([[]], [Item(GEMM)]) == {}


# Contents of buffers


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("gpus",))


@pytest.mark.parametrize("element_type", ["bf16", "f16", "f32", "f8e4m3fn", "f8e5m2"])
def test_floating_point_buffers_are_small_numbers_of_both_signs(element_type: str, mesh: Mesh) -> None:
    array = measure.filled(Buffer(element_type, 4096, 0), 3, mesh)
    assert array.shape == (8 * 4096,) and len(array.sharding.device_set) == 8
    found = np.asarray(array).astype(np.float32)
    assert abs(found.mean()) < 0.01 and 0.05 < found.std() < 0.1
    assert found.min() >= -0.125 and found.max() <= 0.125


@pytest.mark.parametrize(("element_type", "most"), [("s32", 8191), ("u32", 8191), ("s16", 8191), ("s8", 127)])
def test_integers_are_not_negative_and_various(element_type: str, most: int, mesh: Mesh) -> None:
    found = np.asarray(measure.filled(Buffer(element_type, 4096, 0), 0, mesh)[:4096])
    assert found.min() >= 0 and most // 2 < found.max() <= most
    assert len(set(found.tolist())) > most // 4


def test_flags_are_half_true_and_an_empty_buffer_is_no_error(mesh: Mesh) -> None:
    flags = measure.filled(Buffer("pred", 4096, 0), 0, mesh)
    assert flags.dtype == jnp.bool_ and 0.4 < float(flags.mean()) < 0.6
    assert measure.filled(Buffer("bf16", 0, 0), 0, mesh).dtype == jnp.bfloat16


def test_two_buffers_differ_and_the_same_one_does_not(mesh: Mesh) -> None:
    buffer = Buffer("f32", 64, 256)
    one, again, other = (np.asarray(measure.filled(buffer, seed, mesh)) for seed in (1, 1, 2))
    assert (one == again).all() and not (one == other).any()


def test_a_type_that_numpy_does_not_have_is_said(mesh: Mesh) -> None:
    with pytest.raises(DhelixError, match="no array of s4 can be made"):
        measure.filled(Buffer("s4", 8, 4), 0, mesh)


# Measuring


@dataclass(frozen=True)
class Gpu:
    """The attributes of a device that a measurer reads."""

    id: int
    platform: str = "gpu"
    process_index: int = 0

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 8 << 30}


class Machine:
    """Compiles, runs and traces in place of GPUs. An instance of item n takes n + 1 microseconds.

    Attributes:
      programs: the programs that ran, in order; only the second, traced execution of each counts.
      arguments: the arguments of each program.
      refuses: returns the error with which a program fails, or None.
    """

    def __init__(self) -> None:
        self.programs: list[Program] = []
        self.arguments: list[tuple[jax.Array, ...]] = []
        self.refuses: Callable[[Program], Exception | None] = lambda program: None
        self.unseen: Callable[[Item], bool] = lambda item: False

    def compile(self, program: Program, mesh: Mesh, options: object) -> Callable[..., jax.Array]:
        def executable(*arguments: jax.Array) -> jax.Array:
            error = self.refuses(program)
            if error is not None:
                raise error
            if not self.programs or self.programs[-1] is not program:
                self.programs.append(program)
                self.arguments.append(arguments)
            return jnp.zeros(1)

        return executable

    def trace(self, path: object) -> trace.Profile:
        program = self.programs[-1]
        names = [
            (number, f"{instance_name(number, side, repeat)}.1")
            for repeat in range(program.repeats)
            for number, item in enumerate(program.items)
            for side in ("first", "second")[: len(item.operators)]
            if not self.unseen(item)
        ]
        module = f"jit_{placeholder_name(program)}"
        kernels = [kernel(1, 100 * n, 100 * n + number + 1, name, module) for n, (number, name) in enumerate(names)]
        return profile({0: [kernel(1, 90000, 90001, "replay_result", module), *kernels]})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(measure, "compile_program", machine.compile)
    monkeypatch.setattr(trace, "load", machine.trace)
    monkeypatch.setattr(jax.profiler, "trace", lambda *a, **k: contextlib.nullcontext())
    return machine


def measurer(gpus: int = 4, memory_bytes: int | None = None, marks: bool = False) -> GpuMeasurer:
    measurer = GpuMeasurer([Gpu(n) for n in range(gpus)], memory_bytes=memory_bytes, marks=marks)
    measurer.mesh = Mesh(np.array(jax.devices()[:gpus]), ("gpus",))
    return measurer


def alone(outcomes: Sequence[Outcome]) -> list[Any]:
    """Microseconds of each sample, or the reason why there is none."""
    return [o if isinstance(o, str) else [pytest.approx(s.seconds * 1e6, rel=1e-3) for s in o] for o in outcomes]


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(DhelixError, match="measuring needs GPUs, but jax.devices.. has none"):
        GpuMeasurer()


def test_every_item_has_an_outcome_in_order(machine: Machine) -> None:
    items = [Item(GEMM), Item(GATHER, MOVED), Item(DOUBLED)]
    outcomes = measurer().measure(items, repeats=2)
    assert alone(outcomes) == [[1, 1], [102, 102], [3, 3]]
    assert [p.items for p in machine.programs] == [tuple(items)]
    assert measurer().measure([], repeats=2) == []


def test_what_needs_more_gpus_than_there_are_is_said_and_the_rest_goes_on(machine: Machine) -> None:
    outcomes = measurer(gpus=2).measure([Item(GATHER), Item(GEMM), Item(GEMM, SCATTER)], repeats=1)
    assert alone(outcomes) == ["needs 4 GPUs; there are 2", [1], "needs 4 GPUs; there are 2"]
    assert measurer(gpus=1).measure([Item(GATHER)], repeats=1) == ["needs 4 GPUs; there are 1"]


def test_an_item_without_kernels_is_said(machine: Machine) -> None:
    machine.unseen = lambda item: item.first is MOVED
    assert alone(measurer().measure([Item(MOVED), Item(GEMM)], 1)) == ["the profiler saw no kernel of it", [2]]


def test_two_sides_in_one_cuda_graph_cannot_be_told_apart(machine: Machine) -> None:
    machine.unseen = lambda item: item.second is MOVED
    outcomes = measurer(marks=True).measure([Item(GEMM, MOVED), Item(GATHER, MOVED)], 1)
    assert outcomes == ["kernels of one CUDA graph cannot be told apart", "the profiler saw no kernel of it"]


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError, IndexError])
def test_a_failing_item_is_found_and_the_others_are_measured(machine: Machine, error: type[Exception]) -> None:
    def refuses(program: Program) -> Exception | None:
        broken = any(item.first is DOUBLED for item in program.items)
        return error("INTERNAL: no\n  such kernel") if broken else None

    machine.refuses = refuses
    items = [Item(o) for o in (GEMM, MOVED, DOUBLED, SMALL, GATHER)]
    outcomes = measurer().measure(items, 1)
    assert [isinstance(o, str) for o in outcomes] == [False, False, True, False, False]
    assert outcomes[2] == "INTERNAL: no such kernel"
    machine.refuses = lambda program: DhelixError("it cannot be built")
    assert measurer().measure(items, 1) == ["it cannot be built"] * 5


def test_what_runs_out_of_memory_together_runs_apart(machine: Machine) -> None:
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")
    machine.refuses = lambda program: error if len(program.items) > 2 or Item(GEMM) in program.items else None
    outcomes = measurer().measure([Item(o) for o in (GEMM, MOVED, DOUBLED, SMALL)], 1)
    assert outcomes[0] == "out of memory"
    assert not any(isinstance(o, str) for o in outcomes[1:])
    assert [len(p.items) for p in machine.programs] == [1, 2]


def test_what_failed_keeps_no_memory_while_its_halves_run(machine: Machine) -> None:
    gc.freeze()  # objects of earlier tests, which would make each collection slow
    held: list[weakref.ref[jax.Array]] = []
    alive: list[int] = []

    def compile(program: Program, mesh: Mesh, options: object) -> Callable[..., jax.Array]:
        def run(*arguments: jax.Array) -> jax.Array:
            gc.collect()
            alive.append(sum(ref() is not None for ref in held))
            held.extend(weakref.ref(a) for a in arguments)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "compile_program", compile)
        outcomes = measurer().measure([Item(o) for o in (GEMM, MOVED, DOUBLED, SMALL)], 1)
    assert outcomes == ["out of memory"] * 4
    assert len(alive) == 7 and set(alive) == {0}


def test_a_gpu_that_breaks_down_is_no_failure_of_the_items(machine: Machine) -> None:
    machine.refuses = lambda program: jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal")
    with pytest.raises(
        DhelixError, match="a GPU failed while 2 operators and pairs ran; run the command again .*ILLEGAL"
    ):
        measurer().measure([Item(GEMM), Item(MOVED)], 1)


def test_an_error_that_says_nothing_has_a_reason_all_the_same() -> None:
    assert measure.reason(DhelixError("")) == "DhelixError"
    assert len(measure.reason(DhelixError("long " * 1000))) <= 300


def test_programs_stay_within_the_memory_they_are_given(machine: Machine) -> None:
    items = [Item(o) for o in (GEMM, MOVED, DOUBLED, SMALL, GATHER)]
    most = max(Program((item,), 1).argument_bytes for item in items)
    outcomes = measurer(memory_bytes=most).measure(items, 1)
    assert not any(isinstance(o, str) for o in outcomes)
    assert len(machine.programs) > 1
    assert all(p.argument_bytes <= most for p in machine.programs)


def test_arguments_fit_the_program_and_are_used_again(machine: Machine) -> None:
    of_gpus = measurer()
    for items in ([Item(GEMM)], [Item(MOVED), Item(SMALL)], [Item(GEMM, GEMM)]):
        of_gpus.measure(items, 1)
        program, arguments = machine.programs[-1], machine.arguments[-1]
        assert [a.size for a in arguments] == [4 * b.elements for b in program.buffers]
        assert len({id(a) for a in arguments}) == len(arguments)
    first, _, last = ({id(a) for a in arguments} for arguments in machine.arguments)
    assert first < last


def test_arguments_of_other_programs_give_way_when_memory_is_short(machine: Machine) -> None:
    wide = Program((Item(GEMM),), 1).argument_bytes
    of_gpus = measurer(memory_bytes=wide)
    of_gpus.measure([Item(GEMM)], 1)
    kept = [weakref.ref(a) for a in machine.arguments.pop()]
    of_gpus.measure([Item(SMALL)], 1)  # small enough to fit in addition
    assert sum(ref() is not None for ref in kept) == len(kept)
    of_gpus.measure([Item(small_step.operators(rows=36, width=96)["moved"])], 1)
    gc.collect()
    assert not any(ref() is not None for ref in kept)


# Compiling


@pytest.fixture(scope="module")
def paper_mesh() -> Mesh:
    """A mesh of GPUs that need not exist."""
    return deviceless.mesh({"gpus": 4})


@pytest.fixture(scope="module")
def attention(paper_mesh: Mesh) -> tuple[Operator, ...]:
    """Operators of a step with padded attention, forward and backward, and a collective."""

    def loss(x: jax.Array) -> jax.Array:
        lengths = jnp.full((1,), 100, jnp.int32)
        options = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths, "implementation": "cudnn"}
        return jnp.sum(jax.nn.dot_product_attention(x, x, x, **options).astype(jnp.float32))

    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.grad(loss)(x), lax.all_gather(x, "gpus", tiled=True)

    mapped = jax.shard_map(step, mesh=paper_mesh, in_specs=P("gpus"), out_specs=P("gpus"), check_vma=False)
    x = jax.ShapeDtypeStruct((4, 256, 8, 64), jnp.bfloat16, sharding=NamedSharding(paper_mesh, P("gpus")))
    module = lowering.compiled_module(deviceless.compile(jax.jit(mapped).lower(x)))
    found, _ = find_operators(module, key_of)
    return found


@pytest.fixture
def hooks() -> Sequence[object]:
    """Temporary hooks that get the modules of a compilation."""
    return registration._temporary


def instances(compiled: jax.stages.Compiled) -> set[tuple[int, str]]:
    """Items and sides of the instances in the compiled program."""
    module = lowering.compiled_module(compiled)
    found = (parse_name(i.name) for i in module.schedule[module.entry])
    return {parsed[:2] for parsed in found if parsed is not None}


@pytest.mark.deviceless
def test_attention_and_collectives_compile_alone_and_in_pairs(
    attention: tuple[Operator, ...], paper_mesh: Mesh, hooks: Sequence[object]
) -> None:
    kinds = [o.key.kind for o in attention]
    assert {"attention", "attention-backward", "all-gather"} <= set(kinds)
    items = [Item(o) for o in attention]
    items += [Item(a, b) for a in attention for b in attention if a.is_collective or b.is_collective]
    before = dict(os.environ)
    compiled = measure.compile_program(Program(tuple(items), 2, marks=True), paper_mesh, deviceless.COMPILER_OPTIONS)
    sides = {(n, side) for n, item in enumerate(items) for side in ("first", "second")[: len(item.operators)]}
    assert {(n, side) for n, side in instances(compiled) if side in ("first", "second")} == sides
    assert not hooks and dict(os.environ) == before


@pytest.mark.deviceless
@pytest.mark.parametrize("error", [PassRefusal("I would rather not"), DhelixError("no way"), ValueError("no value")])
def test_nothing_stays_behind_after_an_error(
    attention: tuple[Operator, ...],
    paper_mesh: Mesh,
    hooks: Sequence[object],
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def run(self: LibraryCalls, module: HloModule, context: PassContext) -> bool:
        seen.append(len(hooks))
        raise error

    program = Program((Item(attention[0]),), 1)
    before = dict(os.environ)
    with monkeypatch.context() as patch:
        patch.setattr(LibraryCalls, "run", run)
        with pytest.raises(DhelixError, match=str(error)):
            measure.compile_program(program, paper_mesh, deviceless.COMPILER_OPTIONS)
    assert seen == [1] and not hooks and dict(os.environ) == before
    assert instances(measure.compile_program(program, paper_mesh, deviceless.COMPILER_OPTIONS)) >= {(0, "first")}


@pytest.mark.deviceless
def test_programs_of_the_same_name_are_left_alone_afterwards(attention: tuple[Operator, ...], paper_mesh: Mesh) -> None:
    program = Program((Item(attention[0]),), 1)
    measure.compile_program(program, paper_mesh, deviceless.COMPILER_OPTIONS)

    def innocent(x: jax.Array) -> jax.Array:
        return x * 2

    innocent.__name__ = placeholder_name(program)
    x = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(paper_mesh, P("gpus")))
    assert instances(deviceless.compile(jax.jit(innocent).lower(x))) == set()
