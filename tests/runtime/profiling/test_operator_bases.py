"""The operator bases compile for H200s that need not exist, each to the kernels that its name says."""

from __future__ import annotations

import dataclasses
import math

import jax
import pytest
from jax.sharding import Mesh

from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import find_collective, is_start
from dhelix.passes.evaluation.replay.operators import find_operators
from dhelix.passes.evaluation.roofline_costs import instruction_cost
from dhelix.passes.hlo import Instruction
from dhelix.profiles.hardware import H200
from dhelix.profiles.keys import OperatorKey
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.profiling.operator_bases import (
    LLAMA_8B,
    LLAMA_25B,
    PHI_MOE,
    SIZES,
    CompiledBases,
    bases,
    compile_bases,
    main_operator,
)
from dhelix.tests.quick import slow_after

ALL = tuple(base for sizes in SIZES.values() for base in bases(sizes))
SMALL = dataclasses.replace(LLAMA_8B, name="small", hidden=256, ffn=512, heads=8, kv_heads=4, head_dim=64, seq=128)


@pytest.fixture(scope="module")
def compiled() -> CompiledBases:
    """Compiled for two nodes of two GPUs, so that communication inside nodes and across them differs."""
    mesh = deviceless.mesh({"node": 2, "tp": 2})
    return compile_bases(ALL, mesh, "tp", "node", deviceless.COMPILER_OPTIONS)


def operator(compiled: CompiledBases, name: str) -> Instruction:
    base = next(b for b in ALL if str(b) == name)
    return main_operator(base, compiled.modules[name])


@pytest.mark.deviceless
def test_every_base_compiles_and_is_found(compiled: CompiledBases) -> None:
    assert not compiled.failures
    assert list(compiled.modules) == [str(base) for base in ALL]
    for base in ALL:
        module = compiled.modules[str(base)]
        assert module.name == "jit_" + str(base).replace("-", "_").replace(" ", "_")
        assert module.is_scheduled
        assert main_operator(base, module) in module.schedule[module.entry]


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("llama-8b gemm", "__cublas$lt$matmul"),
        ("llama-8b attention", "__cudnn$fmhaSoftmax"),
        ("llama-8b attention-backward", "__cudnn$fmhaSoftmaxBackward"),
        ("phi-moe grouped-gemm", "__cublas$lt$matmul"),
    ],
)
def test_libraries_do_products_and_attention(compiled: CompiledBases, name: str, target: str) -> None:
    assert operator(compiled, name).proto.custom_call_target == target


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("name", "flops"),
    slow_after(
        1,
        [
            ("llama-8b gemm", 2 * 8192 * 4096 * 3584),
            ("llama-25b gemm", 2 * 8192 * 8192 * 7168),
            ("llama-8b attention", 2 * 2 * 8 * 8192 * 8192 * 128 / 2),
            ("llama-25b attention-backward", 2 * 5 * 16 * 8192 * 8192 * 128 / 2),
            ("phi-moe grouped-gemm", 2 * 16384 * 4096 * 6400),
            # masked: every row is multiplied with every expert of the GPU
            ("phi-moe ragged-dot", 4 * 2 * 16384 * 4096 * 6400),
        ],
        several=True,
    ),
)
def test_operations(compiled: CompiledBases, name: str, flops: float) -> None:
    assert instruction_cost(operator(compiled, name), H200).flops == flops


@pytest.mark.deviceless
def test_what_is_no_library_call_is_one_fusion(compiled: CompiledBases) -> None:
    names = ["norm", "swiglu", "rotary", "residual-add"]
    for name in [f"llama-25b {n}" for n in names] + ["phi-moe permute", "phi-moe unpermute"]:
        module = compiled.modules[name]
        kernels = [i for i in module.schedule[module.entry] if i.opcode not in ("parameter", "bitcast", "constant")]
        assert kernels == [operator(compiled, name)] and kernels[0].opcode == "fusion", name


@pytest.mark.deviceless
@pytest.mark.parametrize("name", ["phi-moe permute", "phi-moe unpermute"])
def test_rows_move_by_indices_that_the_kernel_computes(compiled: CompiledBases, name: str) -> None:
    fusion = operator(compiled, name)
    assert "iota" in {i.opcode for i in fusion.called[0].instructions}
    assert not [o for o in fusion.operands if o.shape.element_type in (4, 5)], "no operand of int32 or int64"


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("name", "kind", "size", "groups"),
    [
        ("llama-8b all-gather", "all-gather", 2 * 2 * 2048 * 4096, ((0, 1), (2, 3))),
        ("llama-25b reduce-scatter", "reduce-scatter", 2 * 8192 * 8192, ((0, 1), (2, 3))),
        ("llama-8b send-recv", "collective-permute", 2 * 2 * 8192 * 2 * 128, ((0, 2), (2, 0), (1, 3), (3, 1))),
        ("phi-moe all-to-all", "all-to-all", 2 * 16384 * 4096, ((0, 2), (1, 3))),
    ],
)
def test_collectives_are_async_pairs_over_their_axis(
    compiled: CompiledBases, name: str, kind: str, size: int, groups: tuple[tuple[int, ...], ...]
) -> None:
    start = operator(compiled, name)
    collective = find_collective(start)
    assert is_start(start) and collective is not None
    assert (collective.kind, collective.size, collective.groups) == (kind, size, groups)


@pytest.mark.deviceless
def test_every_base_can_be_replayed(compiled: CompiledBases) -> None:
    for base in ALL:
        module = compiled.modules[str(base)]
        found, refused = find_operators(module, lambda i: OperatorKey("other", i.name, ()))
        assert not refused
        assert main_operator(base, module) in [operator.instruction for operator in found]


def test_layers_have_the_paper_sizes() -> None:
    assert (LLAMA_25B.hidden, LLAMA_25B.ffn) == (8192, 28672)
    assert (PHI_MOE.hidden, PHI_MOE.ffn, PHI_MOE.experts, PHI_MOE.top_k) == (4096, 6400, 16, 2)
    rows = next(b for b in bases(PHI_MOE) if b.name == "grouped-gemm").arguments[0].shape
    assert math.prod(rows[:2]) == PHI_MOE.seq * PHI_MOE.top_k


def cpu_mesh() -> Mesh:
    return jax.make_mesh((4,), ("tp",), devices=jax.devices()[:4])


def test_a_base_that_does_not_compile_is_said_and_the_others_go_on() -> None:
    attention, gemm = (next(b for b in bases(SMALL) if b.name == name) for name in ("attention", "gemm"))
    found = compile_bases([attention, gemm], cpu_mesh(), "tp")
    assert list(found.modules) == ["small gemm"]
    assert list(found.failures) == ["small attention"]
    assert "\n" not in found.failures["small attention"]


def test_a_base_that_became_something_else_is_said() -> None:
    swiglu = next(b for b in bases(SMALL) if b.name == "swiglu")
    module = compile_bases([swiglu], cpu_mesh(), "tp").modules["small swiglu"]
    other = dataclasses.replace(swiglu, contains=("sort",))
    with pytest.raises(DhelixError, match="small swiglu compiled without sort"):
        main_operator(other, module)


@pytest.mark.parametrize("axis", ["nodes", "dp"])
def test_an_axis_over_which_nothing_communicates_is_refused(axis: str) -> None:
    mesh = jax.make_mesh((1, 4), ("dp", "tp"), devices=jax.devices()[:4])
    with pytest.raises(DhelixError, match=f"needs an axis '{axis}' of at least 2 GPUs"):
        compile_bases(bases(SMALL), mesh, "tp", axis)


def test_names_are_unique() -> None:
    assert len(set(map(str, ALL))) == len(ALL)
