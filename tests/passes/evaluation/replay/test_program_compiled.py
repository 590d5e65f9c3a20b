"""The measuring program inside the compiler: operators of a small Llama step for 4 GPUs, without any GPU.

XLA's dumps show the thunks, which XLA launches, and their streams. Only a GPU can show that two sides overlap, and that
the trace names them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.benchmarks.programs.structure import Case, lower
from dhelix.passes.analysis.collectives import find_collective
from dhelix.passes.evaluation.replay.operators import Operator, find_operators, leaves, memory_space
from dhelix.passes.evaluation.replay.program import Item, OperatorReplay, Program, parse_name, placeholder_name
from dhelix.passes.framework.manager import PassManager
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.profiles.keys import Key, OperatorKey
from dhelix.runtime.compiler import deviceless, lowering, registration

pytestmark = pytest.mark.deviceless

SMALL = {"vocab": 2048, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1536, "seq": 1024}
DTYPES = {"pred": jnp.bool_, "s32": jnp.int32, "u32": jnp.uint32, "bf16": jnp.bfloat16, "f32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled module, and its thunks by the name of their instruction."""

    module: HloModule
    thunks: Mapping[str, str]
    streams: Mapping[str, str]
    """Streams of asynchronous starts. Everything else runs on the stream of its caller, in the end the main stream."""
    temporaries: int

    @property
    def order(self) -> list[str]:
        return [i.name for i in self.module.schedule[self.module.entry] if parse_name(i.name) is not None]

    def stream(self, instance: str) -> str:
        return self.streams.get(f"{instance}-start", "main")


def compile(lowered: jax.stages.Lowered, folder: Path, **options: object) -> Compiled:
    compiled = deviceless.compile(lowered, xla_dump_to=str(folder), **options)
    metadata = next(folder.glob("*.thunk_metadata.txt")).read_text()
    described = re.findall(r'profile_annotation: "([^"]+)"\s+thunk_id: (\d+)\s+}\s+thunk_kind: "(\w+)"', metadata)
    names = {int(number): name for name, number, _ in described}
    sequence = next(folder.glob("*.thunk_sequence.txt")).read_text()
    streams = re.findall(r"^ *(\d+): kAsyncStart .*stream=(\S+),", sequence, re.MULTILINE)
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return Compiled(
        lowering.compiled_module(compiled),
        {name: kind for name, _, kind in described},
        {names[int(number)]: stream for number, stream in streams},
        analysis.temp_size_in_bytes,
    )


def replay(program: Program, mesh: Mesh, folder: Path, **options: object) -> Compiled:
    spec = P(mesh.axis_names)

    def placeholder(*buffers: jax.Array) -> jax.Array:
        run = jax.shard_map(lambda *_: jnp.zeros(1), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return run(*buffers)

    placeholder.__name__ = placeholder_name(program)
    sharding = NamedSharding(mesh, spec)
    arguments = [
        jax.ShapeDtypeStruct((mesh.size * b.elements,), DTYPES[b.element_type], sharding=sharding)
        for b in program.buffers
    ]
    manager = PassManager([OperatorReplay(program)], strict=True)
    with registration.temporary_hook(lambda stage, module: manager.run(stage, module)[0], placeholder.__name__):
        return compile(jax.jit(placeholder, keep_unused=True).lower(*arguments), folder, **options)


def every_instruction(instruction: Instruction) -> Key | None:
    return OperatorKey("other", instruction.name, ())


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    lowered = lower(Case("small", layers=2, microbatches=2, overrides=SMALL))
    return compile(lowered, tmp_path_factory.mktemp("step"))


@pytest.fixture(scope="module")
def operators(step: Compiled) -> tuple[Operator, ...]:
    found, refused = find_operators(step.module, every_instruction)
    assert refused == ()
    return found


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return deviceless.mesh({"gpus": 4})


def some(operators: tuple[Operator, ...]) -> tuple[list[Operator], list[Operator]]:
    """One compute operator for each kind of thunk, and one collective of each kind."""
    compute: dict[tuple[str, str, bool], Operator] = {}
    collectives: dict[tuple[str, str], Operator] = {}
    for operator in operators:
        core, found = operator.core, find_collective(operator.core)
        if found is not None:
            collectives.setdefault((found.kind, core.opcode), operator)
        else:
            in_place = bool(core.proto.output_operand_aliasing) or "update" in core.name
            compute.setdefault((core.opcode, core.proto.fusion_kind, in_place), operator)
    return list(compute.values()), list(collectives.values())


def test_every_operator_is_launched_as_in_the_step(
    step: Compiled, operators: tuple[Operator, ...], mesh: Mesh, tmp_path: Path
) -> None:
    program = Program(tuple(Item(o) for o in operators), 1)
    compiled = replay(program, mesh, tmp_path)
    for number, operator in enumerate(operators):
        name = next(n for n in compiled.thunks if n.split(".")[0] == f"replay_{number}_first_0")
        expected = step.thunks.get(operator.core.name) or step.thunks[operator.instruction.name]
        assert compiled.thunks[name] == expected, operator.instruction


def test_pairs_of_all_kinds_keep_order_and_streams(operators: tuple[Operator, ...], mesh: Mesh, tmp_path: Path) -> None:
    compute, collectives = some(operators)
    assert len(compute) >= 4
    assert {find_collective(o.core).kind for o in collectives} >= {"all-gather", "reduce-scatter"}  # type: ignore
    both = [*compute, *collectives]
    items = tuple(Item(a, b) for a in both for b in both)
    compiled = replay(Program(items, 1), mesh, tmp_path)
    order = [name for name in compiled.order if "copy" not in name]
    for number, item in enumerate(items):
        assert item.second is not None
        first, second = f"replay_{number}_first_0", f"replay_{number}_second_0"
        assert compiled.stream(first) != compiled.stream(second), (item.first, item.second)
        launched = second if not item.second.is_collective else f"{second}-start"
        ends = [f"{first}-done", *([f"{second}-done"] if item.second.is_collective else [])]
        expected = [f"{first}-start", launched, *ends]
        assert order[: len(expected)] == expected
        order = order[len(expected) :]
        assert ("communication" in compiled.stream(first)) <= item.first.is_collective
    assert order == []


def test_marks_are_launched_before_what_they_mark(operators: tuple[Operator, ...], mesh: Mesh, tmp_path: Path) -> None:
    """Marks are kernels of their own on the main stream, directly before the marked item. Nothing else changes."""
    compute, collectives = some(operators)
    items = tuple(Item(*pair) for a in compute[:3] for b in collectives for pair in ((a, b), (b, a)))
    marked, plain = (replay(Program(items, 2, marks), mesh, tmp_path / str(marks)) for marks in (True, False))
    marks = [name for name in marked.order if "mark" in name]
    assert [name for name in marked.order if name not in marks] == plain.order
    for name in marks:
        assert "AllReduce" in marked.thunks[name] and marked.stream(name) == "main"
    sides = [parsed for name in marked.order if (parsed := parse_name(name)) and parsed[1] != "copy"]
    found = [(item, repeat) for item, side, repeat in sides if side == "mark"]
    assert found == [(item, repeat) for repeat in (0, 1) for item in range(len(items))]
    for mark, launched in zip(sides[:-1], sides[1:], strict=True):
        assert mark[1] != "mark" or launched == (mark[0], "first", mark[2])


def test_memory_does_not_grow_with_repeats(operators: tuple[Operator, ...], mesh: Mesh, tmp_path: Path) -> None:
    compute, collectives = some(operators)
    items = tuple(Item(a, b) for a in compute for b in collectives)
    needed = [replay(Program(items, n), mesh, tmp_path / str(n)).temporaries for n in (1, 3)]
    assert needed[1] <= 1.02 * needed[0]


def test_collectives_on_memory_of_their_own(tmp_path: Path) -> None:
    mesh = deviceless.mesh({"a": 2, "b": 2})

    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = x @ w
        return jax.lax.psum(product, "a") @ w, jax.lax.all_gather(x, "b", tiled=True)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(("a", "b")), P()), out_specs=P(("a", "b")), check_vma=False)
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P(("a", "b"))))
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    options = {"xla_gpu_enable_nccl_user_buffers": True}
    step = compile(jax.jit(mapped).lower(x, w), tmp_path / "step", **options)
    operators, refused = find_operators(step.module, every_instruction)
    assert refused == ()
    registered = [o for o in operators if any(memory_space(a) for v in o.inputs for a in leaves(v.shape))]
    assert any(o.is_collective for o in registered)
    items = tuple(Item(a, b) for a in registered for b in operators)
    compiled = replay(Program(items, 1), mesh, tmp_path / "replay", **options)
    copies = [i for i in compiled.module.schedule[compiled.module.entry] if "copy_0" in i.name]
    assert copies
    assert all(memory_space(i.shape) == 1 for i in copies)
