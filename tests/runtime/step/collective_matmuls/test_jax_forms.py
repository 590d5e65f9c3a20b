"""Collective matmuls put into programs that do not ask for them: equal results on CPU devices, and GPU programs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import find_collective, is_done, is_exclusive, is_start, start_of
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.framework.report import StageReport
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.profiles.collective_matmul.sites import Form
from dhelix.runtime.compiler import deviceless, registration
from dhelix.runtime.compiler.lowering import compiled_module, hlo_bytes, with_hlo
from dhelix.runtime.processes.launch_settings import NO_GRAPHS
from dhelix.runtime.step.collective_matmuls.jax_forms import collective_matmul_passes
from dhelix.runtime.step.strand_interleave import strand_interleave

LAYERS, HIDDEN, HEADS, HEAD, FFN = 2, 16, 8, 4, 32
WEIGHTS = {
    "q": (LAYERS, HIDDEN, HEADS, HEAD), "k": (LAYERS, HIDDEN, HEADS, HEAD), "o": (LAYERS, HEADS, HEAD, HIDDEN),
    "gate": (LAYERS, HIDDEN, FFN), "up": (LAYERS, HIDDEN, FFN), "down": (LAYERS, FFN, HIDDEN),
}  # fmt: skip
Arrays = dict[str, jax.Array]


def cpu_mesh() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("dp", "tp"))


def spec(name: str, axis: str) -> PartitionSpec:
    return PartitionSpec(None, axis) if name in ("o", "down") else PartitionSpec(None, None, axis)


def layer(x: jax.Array, w: Arrays, axis: str) -> jax.Array:
    """A transformer layer without attention and norms, sequence-parallel along `axis`."""

    def gather(x: jax.Array) -> jax.Array:
        return lax.all_gather(x, axis, axis=1, tiled=True)

    def scatter(x: jax.Array) -> jax.Array:
        return lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True)

    h = gather(x)
    heads = jnp.tanh(jnp.einsum("bsh,hnd->bsnd", h, w["q"])) * jnp.einsum("bsh,hnd->bsnd", h, w["k"])
    x = x + scatter(jnp.einsum("bsnd,ndh->bsh", heads, w["o"]))
    h = gather(x)
    return x + scatter((jnp.tanh(h @ w["gate"]) * (h @ w["up"])) @ w["down"])


def step(mesh: Mesh, axis: str) -> Callable[[Arrays, jax.Array], Any]:
    """A step: loss and gradients of a scan over layers."""
    other = "dp" if axis == "tp" else "tp"

    def body(weights: Arrays, x: jax.Array) -> Any:
        def loss(weights: Arrays) -> jax.Array:
            y, _ = lax.scan(lambda x, w: (layer(x, w, axis), None), x, weights)
            return jnp.sum(jnp.sin(y))

        value, gradients = jax.value_and_grad(loss)(weights)
        return lax.psum(value, ("dp", "tp")), jax.tree.map(lambda g: lax.psum(g, other), gradients)

    specs = {name: spec(name, axis) for name in WEIGHTS}
    return jax.shard_map(
        body, mesh=mesh, in_specs=(specs, PartitionSpec(other, axis)), out_specs=(PartitionSpec(), specs),
        check_vma=False,
    )  # fmt: skip


def arguments(batch: int = 4, seq: int = 16) -> tuple[Arrays, jax.Array]:
    draw = np.random.default_rng(0)
    weights = {name: jnp.asarray(draw.standard_normal(shape) / 8, jnp.float32) for name, shape in WEIGHTS.items()}
    return weights, jnp.asarray(draw.standard_normal((batch, seq, HIDDEN)), jnp.float32)


def transformed(
    lowered: jax.stages.Lowered, form: str | Form, devices: Sequence[Any]
) -> tuple[jax.stages.Lowered, StageReport]:
    passes = collective_matmul_passes(devices, form, Stage.LOWERED)
    new, report = PassManager(passes, strict=True).run(Stage.LOWERED, hlo_bytes(lowered))
    assert new is not None
    return with_hlo(lowered, new), report


def made(report: StageReport) -> dict[str, int]:
    """Replaced sites, and how often each was replaced."""
    notes = [note for entry in report.passes for note in entry.notes if note.message == "a collective matmul"]
    return {note.facts["site"]: note.facts["count"] for note in notes}


@functools.cache
def plain(axis: str) -> tuple[jax.stages.Lowered, Any]:
    given = arguments()
    lowered = jax.jit(step(cpu_mesh(), axis)).lower(*given)
    return lowered, lowered.compile()(*given)


@pytest.mark.parametrize(
    ("form", "axis"),
    [
        (Form("ring"), "dp"),
        pytest.param(Form("bidirectional_ring"), "tp", marks=pytest.mark.slow),
        (Form("hybrid", chunks=2), "tp"),
    ],
    ids=lambda value: getattr(value, "key", value),
)
def test_loss_and_gradients_are_those_of_the_plain_step(form: Form, axis: str) -> None:
    """Replaces in forward and backward loops. Over dp, the groups are devices {0, 4}, {1, 5}, ..."""
    lowered, expected = plain(axis)
    changed, report = transformed(lowered, form, jax.devices("cpu")[:8])
    assert sum(made(report).values()) == 8, "two gathers and two scatters, forward and backward"
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(changed.compile()(*arguments())), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(a))))


def test_rows_that_do_not_divide_into_chunks_keep_their_form() -> None:
    given = arguments(seq=12)  # 3 rows per device
    lowered = jax.jit(step(cpu_mesh(), "tp")).lower(*given)
    passes = collective_matmul_passes(jax.devices("cpu")[:8], Form("hybrid", chunks=2), Stage.LOWERED)
    new, report = PassManager(passes).run(Stage.LOWERED, hlo_bytes(lowered))
    assert new is None
    reasons = [note.message for note in report.passes[0].notes]
    assert sum("needs a number of chunks of at least 2 that divides 3 rows" in reason for reason in reasons) == 2, (
        reasons
    )


@st.composite
def products(draw: st.DrawFn) -> tuple[str, dict[str, int], int, str]:
    """An einsum of x and w, sizes by letter, the gathered dimension of x, and the scattered dimension of the result."""
    x = "".join(draw(st.permutations("abc")))
    k = x[-1]
    w = "".join(draw(st.permutations(k + "d")))
    out = "".join(draw(st.permutations([c for c in x + "d" if c != k])))
    sizes = {letter: draw(st.sampled_from([1, 2, 3])) for letter in "abcd"}
    gathered = draw(st.integers(0, 1))
    if draw(st.booleans()):
        return f"{x},{w}->{out}", sizes, gathered, x[gathered]
    return f"{w},{x}->{out}", sizes, gathered, x[gathered]


@hypothesis.given(products(), st.sampled_from(["gather", "scatter", "reduce"]), st.booleans())
@hypothesis.settings(max_examples=12)
def test_any_order_of_dimensions(product: tuple[str, dict[str, int], int, str], kind: str, others: bool) -> None:
    """Dimensions may be in any order. If the program is replaced, its results stay the same."""
    formula, sizes, gathered, letter = product
    operands, out = formula.split("->")
    first, second = operands.split(",")
    x_name = first if len(first) == 3 else second
    mesh = cpu_mesh()

    def body(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        value = lax.all_gather(x, "tp", axis=gathered, tiled=True) if kind == "gather" else x
        result = jnp.einsum(formula, *((value, w) if first == x_name else (w, value)))
        extra = [jnp.tanh(value)] if others else []
        if kind == "scatter":
            result = lax.psum_scatter(result, "tp", scatter_dimension=out.index(letter), tiled=True)
        return [lax.psum(result, "tp") if kind == "reduce" else result, *extra]

    w_name = second if first == x_name else first
    shapes = [[sizes[c] for c in name] for name in (x_name, w_name)]
    if kind != "gather":
        shapes[0][gathered] *= 4
    draw = np.random.default_rng(0)
    given = [jnp.asarray(draw.integers(-3, 4, (8 * s[0], *s[1:])), jnp.float32) for s in shapes]
    every = PartitionSpec(("dp", "tp"))
    program = jax.shard_map(body, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
    lowered = jax.jit(program).lower(*given)
    passes = collective_matmul_passes(jax.devices("cpu")[:8], "ring", Stage.LOWERED)
    new, _ = PassManager(passes).run(Stage.LOWERED, hlo_bytes(lowered))
    hypothesis.event("replaced" if new else "left alone")
    if new is not None:
        for a, b in zip(lowered.compile()(*given), with_hlo(lowered, new).compile()(*given), strict=True):
            np.testing.assert_array_equal(a, b)


def test_products_in_float32_that_are_narrowed_are_rounded_once() -> None:
    """bfloat16 with preferred_element_type=float32, as mixed precision is often written, next to gathers and sums."""
    float32, narrow = {"preferred_element_type": jnp.float32}, jnp.bfloat16

    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> list[jax.Array]:
        gathered = lax.all_gather(x, "tp", axis=0, tiled=True)
        y = jnp.dot(gathered, w, **float32).astype(narrow)
        wide = jnp.tanh(jnp.dot(gathered, v, **float32))  # left alone
        z = jnp.dot(y, v, **float32).astype(narrow)
        return [y, wide, lax.psum_scatter(z, "tp", scatter_dimension=0, tiled=True)]

    draw = np.random.default_rng(0)
    given = [jnp.asarray(draw.integers(-3, 4, shape), narrow) for shape in ((64, 32), (256, 32), (256, 32))]
    every = PartitionSpec(("dp", "tp"))
    program = jax.shard_map(body, mesh=cpu_mesh(), in_specs=every, out_specs=every, check_vma=False)
    lowered = jax.jit(program).lower(*given)
    changed, report = transformed(lowered, "ring", jax.devices("cpu")[:8])
    assert made(report) == {
        "all_gather_matmul bfloat16 32x32x32 over 4": 1,
        "matmul_reduce_scatter bfloat16 32x32x32 over 4": 1,
    }
    y, wide, z = zip(lowered.compile()(*given), changed.compile()(*given), strict=True)
    np.testing.assert_array_equal(*y)
    np.testing.assert_array_equal(*wide)
    np.testing.assert_allclose(
        *(np.asarray(a, np.float32) for a in z), rtol=2**-6, atol=2**-6 * float(jnp.abs(z[0]).max())
    )


def test_what_turns_it_off() -> None:
    devices = jax.devices("cpu")[:8]
    assert collective_matmul_passes(devices, "off") == ()
    assert collective_matmul_passes(devices[:1]) == ()
    assert [p.name for p in collective_matmul_passes(devices)] == [
        "collective-canonicalization", "collective-matmul", "exclusive-kernels",
    ]  # fmt: skip
    assert [p.stage for p in collective_matmul_passes(devices, stage=Stage.LOWERED)] == [
        Stage.LOWERED, Stage.POST_SCHEDULER,
    ]  # fmt: skip
    with pytest.raises(DhelixError, match='collective_matmul=.*: use "auto", "off" or a form .*must be one of'):
        collective_matmul_passes(devices, "circle")


def test_without_measured_times_nothing_is_replaced() -> None:
    lowered = jax.jit(step(cpu_mesh(), "tp")).lower(*arguments())
    passes = collective_matmul_passes(jax.devices("cpu")[:8], "auto", Stage.LOWERED)
    new, report = PassManager(passes, strict=True).run(Stage.LOWERED, hlo_bytes(lowered))
    assert new is None
    assert any("no collective matmul is known to be faster" in note.message for note in report.passes[0].notes)


def test_a_program_for_other_devices_is_left_alone() -> None:
    lowered = jax.jit(step(cpu_mesh(), "tp")).lower(*arguments())
    passes = collective_matmul_passes(jax.devices("cpu")[:4], "ring", Stage.LOWERED)
    new, report = PassManager(passes, strict=True).run(Stage.LOWERED, hlo_bytes(lowered))
    assert new is None
    assert any("over 8 devices in a program for 4" in note.message for note in report.passes[0].notes)


def test_passes_have_a_fingerprint() -> None:
    """The fingerprint becomes part of the module's name, so options and sources of the forms need a text form."""
    devices = jax.devices("cpu")[:8]
    found = {PassManager(collective_matmul_passes(devices, form)).fingerprint() for form in ("auto", "ring", "hybrid")}
    assert len(found) == 3


# GPU programs


def on_gpus(
    function: Callable[..., Any], mesh: Mesh, form: str | Form, *arguments: jax.ShapeDtypeStruct
) -> tuple[HloModule, list[StageReport]]:
    """The scheduled GPU program after the compiler has run the passes, and the reports."""

    def collective_matmul_step(*arguments: jax.Array) -> Any:
        return function(*arguments)

    manager = PassManager(collective_matmul_passes(list(mesh.devices.flat), form, options=NO_GRAPHS), strict=True)
    reports: list[StageReport] = []

    def run(stage: Stage, module: bytes) -> bytes | None:
        new, report = manager.run(stage, module)
        reports.append(report)
        return new

    with registration.temporary_hook(run, collective_matmul_step.__name__):
        return compiled_module(deviceless.compile(jax.jit(collective_matmul_step).lower(*arguments))), reports


def in_flight(sequence: Sequence[Instruction]) -> list[tuple[int, int]]:
    """Schedule positions of start and done of each asynchronous collective."""
    ends = {start_of(i): n for n, i in enumerate(sequence) if is_done(i)}
    starts = ((n, i) for n, i in enumerate(sequence) if is_start(i) and find_collective(i) is not None)
    return [(n, ends[i]) for n, i in starts]


def gpu_arguments(mesh: Mesh, *shapes: tuple[tuple[int, ...], PartitionSpec]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, p)) for s, p in shapes]


def block(mesh: Mesh) -> Callable[..., Any]:
    """One gather for two weights, whose gathered value is also a result, and a scatter."""
    column, row = PartitionSpec(None, "tp"), PartitionSpec("tp")

    def body(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = lax.all_gather(x, "tp", axis=0, tiled=True)
        y = jnp.tanh(h @ gate) * (h @ up)
        return lax.psum_scatter(y @ down, "tp", scatter_dimension=0, tiled=True), h

    return jax.shard_map(
        body, mesh=mesh, in_specs=(row, column, column, row), out_specs=(row, PartitionSpec()), check_vma=False
    )


def block_arguments(mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    column, row = PartitionSpec(None, "tp"), PartitionSpec("tp")
    return gpu_arguments(mesh, ((8192, 8192), row), ((8192, 4096), column), ((8192, 4096), column), ((4096, 8192), row))


@pytest.mark.deviceless
@pytest.mark.parametrize(("form", "permutes", "others"), [(Form("ring"), 6, 0), (Form("hybrid", chunks=4), 0, 8)])
def test_on_gpus_collectives_run_beside_products(form: Form, permutes: int, others: int) -> None:
    """Three steps of each ring, or four chunks of each collective, which are too large for XLA to combine."""
    mesh = deviceless.mesh({"dp": 2, "tp": 4})
    module, reports = on_gpus(block(mesh), mesh, form, *block_arguments(mesh))
    assert made(reports[0]) == {
        "all_gather_matmul bfloat16 8192x8192x2048 over 4": 1,
        "matmul_reduce_scatter bfloat16 8192x1024x8192 over 4": 1,
    }
    text = module.to_text()
    assert len(re.findall(r" collective-permute-start\(", text)) == permutes
    assert len(re.findall(r" (?:all-gather|reduce-scatter)(?:-start)?\(", text)) == others
    sequence = module.schedule[module.entry]
    beside = [[i.proto.custom_call_target for i in sequence[start + 1 : done]] for start, done in in_flight(sequence)]
    assert any("cublas" in target for targets in beside for target in targets)


@pytest.mark.deviceless
@pytest.mark.parametrize("axes", [{"tp": 2}, pytest.param({"dp": 2, "tp": 4}, marks=pytest.mark.slow)], ids=str)
def test_on_gpus_a_kernel_is_spliced_in(axes: dict[str, int]) -> None:
    """The custom call holds the kernel and the program's mesh, and no NCCL collective is in flight next to it."""
    mesh = deviceless.mesh(axes)
    column, row = PartitionSpec(None, "tp"), PartitionSpec("tp")

    def body(x: jax.Array, w: jax.Array, z: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        product = lax.all_gather(x, "tp", axis=0, tiled=True) @ w
        return product, lax.all_gather(z, "tp", axis=0, tiled=True), v @ v

    program = jax.shard_map(
        body, mesh=mesh, in_specs=(row, column, row, PartitionSpec()),
        out_specs=(column, PartitionSpec(), PartitionSpec()), check_vma=False,
    )  # fmt: skip
    given = gpu_arguments(
        mesh, ((4096, 4096), row), ((4096, 4096), column), ((4096, 4096), row), ((4096, 4096), PartitionSpec())
    )
    module, reports = on_gpus(program, mesh, "mosaic", *given)
    assert list(made(reports[0]).values()) == [1]
    sequence = module.schedule[module.entry]
    (kernel,) = [i for i in sequence if is_exclusive(i)]
    ids = ",".join(map(str, range(mesh.size)))
    assert f'xla_replica_ids = "{ids}"'.encode() in kernel.proto.backend_config
    assert not any(start < sequence.index(kernel) < done for start, done in in_flight(sequence))
    guard = reports[1].passes[0]
    assert guard.outcome == "changed" and guard.notes[-1].facts["count"] == 1


@pytest.mark.deviceless
@pytest.mark.parametrize(("asked", "kernels"), [({}, 1), ({"collective_matmul": "off"}, 0)], ids=str)
def test_intra_batch_partitions_products(asked: Any, kernels: int) -> None:
    """The kernel is the fastest measured form at this site, and runs only in a program without CUDA graphs."""
    mesh = deviceless.mesh({"tp": 2})
    column, row = PartitionSpec(None, "tp"), PartitionSpec("tp")
    program = jax.shard_map(
        lambda x, w: lax.all_gather(x, "tp", axis=0, tiled=True) @ w,
        mesh=mesh, in_specs=(row, column), out_specs=column, check_vma=False,
    )  # fmt: skip
    options = dict(deviceless.COMPILER_OPTIONS)
    step = strand_interleave(program, schedule="intra_batch", compiler_options=options, **asked)
    report = step.report(*gpu_arguments(mesh, ((8192, 4096), row), ((4096, 6144), column)))
    notes = [note for entry in report for note in entry.notes if note.message == "a collective matmul"]
    assert sum(note.facts["form"].startswith("mosaic") for note in notes) == kernels
