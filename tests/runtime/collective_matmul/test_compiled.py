"""What XLA makes of the forms for four H200s: collectives overlap with matmuls, and there are only known copies."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from dhelix.runtime.compiler import deviceless
from dhelix.tests.runtime.collective_matmul.programs import COLLECTIVE, specs

pytestmark = pytest.mark.deviceless
ROWS, HIDDEN, WIDE = 8192, 4096, 14336
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.-]+) = .*? ([\w-]+)\(%?")
_COLLECTIVES = ("collective-permute", "all-gather", "all-reduce", "reduce-scatter", "async")


def schedule(kind: str, form: str, gradients: bool = False, weights: int = 1) -> str:
    """The kernels of the compiled program in schedule order, as letters of `_letter`."""
    on = deviceless.mesh({"tp": 4})
    contraction, columns = (HIDDEN, WIDE) if kind == "all_gather_matmul" else (WIDE, HIDDEN)
    spec_x, spec_w, spec_y = specs(kind)

    def array(rows: int, columns: int, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16, sharding=NamedSharding(on, spec))

    def forward(x: jax.Array, w: Any) -> Any:
        return COLLECTIVE[kind](x, w, "tp", form)

    def backward(x: jax.Array, w: Any, cotangent: Any) -> Any:
        return jax.vjp(forward, x, w)[1](cotangent)

    x, w, y = array(ROWS, contraction, spec_x), array(contraction, columns, spec_w), array(ROWS, columns, spec_y)
    if weights > 1:
        w, y, spec_w, spec_y = (w,) * weights, (y,) * weights, (spec_w,) * weights, (spec_y,) * weights
    ins, outs = ((spec_x, spec_w, spec_y), (spec_x, spec_w)) if gradients else ((spec_x, spec_w), spec_y)
    mapped = jax.shard_map(backward if gradients else forward, mesh=on, in_specs=ins, out_specs=outs)
    text = deviceless.compile(jax.jit(mapped).lower(x, w, *[y] * gradients)).as_text()
    assert text is not None
    instructions = map(_INSTRUCTION.match, text[text.index("\nENTRY") :].splitlines())
    return "".join(_letter(*match.groups()) for match in instructions if match)


def _letter(name: str, opcode: str) -> str:
    """Start "(" and end ")" of a collective, a synchronous collective "C", a matmul "G", another kernel ".", or ""."""
    if opcode.removesuffix("-start").removesuffix("-done") in _COLLECTIVES:
        return "(" if opcode.endswith("-start") else ")" if opcode.endswith("-done") else "C"
    if "gemm_fusion" in name or opcode == "custom-call" and "custom-call" in name:
        return "G"
    return "." if opcode in ("fusion", "copy", "copy-start", "concatenate", "transpose") else ""


def summary(kernels: str) -> tuple[str, int]:
    """Collectives and matmuls in order, and the number of other kernels."""
    return kernels.replace(".", ""), kernels.count(".")


@pytest.mark.parametrize(
    ("kind", "form", "expected", "others"),
    [
        # One kernel per matmul moves the result to its place. For two rings, two more split x into halves.
        ("all_gather_matmul", "ring", "(G)(G)(G)G", 4),
        ("all_gather_matmul", "bidirectional_ring", "(GG)(GG)(GG)GG", 8 + 2),
        # Likewise, and four kernels split x into chunks.
        ("all_gather_matmul", "hybrid:4", "()(G)(G)(G)G", 4 + 4),
        # Rows of x are taken before each step's matmuls, sums added after them, and the halves of two rings joined.
        ("matmul_reduce_scatter", "ring", "G(G)(G)(G)", 4 + 3),
        ("matmul_reduce_scatter", "bidirectional_ring", "GG(GG)(GG)(GG)", 4 + 4 + 1),
        # Rows of x are taken, and results are joined.
        ("matmul_reduce_scatter", "hybrid:4", "G(G)(G)(G)C", 4 + 1),
        ("matmul_all_reduce", "ring", "G(G)(G)(G)C", 4 + 3),
        ("matmul_all_reduce", "hybrid:4", "G(G)(G)(G)C", 4 + 1),
    ],
)
def test_collectives_run_beside_matmuls(kind: str, form: str, expected: str, others: int) -> None:
    assert summary(schedule(kind, form)) == (expected, others)


@pytest.mark.parametrize(
    ("kind", "form", "expected", "others"),
    [
        # x is gathered next to the matmul for dx, and dx is scattered next to the matmul for dw.
        ("all_gather_matmul", "auto", "(G)(G)", 0),
        # x is gathered next to the first chunk.
        ("all_gather_matmul", "ring", "(G)(G)(G)(G)G", 4 + 3),
        ("all_gather_matmul", "hybrid:2", "(G)(G)(G)", 2 + 1),
        ("matmul_reduce_scatter", "auto", "CGG", 0),
        # Chunks of the gathered cotangent, and results, are moved to their places.
        ("matmul_reduce_scatter", "ring", "(G)(G)(G)GG", 4 + 4),
    ],
)
def test_collectives_of_derivatives_run_beside_matmuls(kind: str, form: str, expected: str, others: int) -> None:
    assert summary(schedule(kind, form, gradients=True)) == (expected, others)


def test_weights_are_put_side_by_side_once() -> None:
    """The kernel that moves products to their places also separates them."""
    assert summary(schedule("all_gather_matmul", "ring", weights=2)) == ("(G)(G)(G)G", 1 + 1)
