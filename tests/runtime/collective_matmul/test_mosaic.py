"""Batch dimensions and derivatives around kernels that take two-dimensional operands."""

from typing import Any

import jax
import pytest

from dhelix.profiles.collective_matmul.sites import KINDS, Tiles
from dhelix.runtime.collective_matmul import form_choice, mosaic
from dhelix.tests.runtime.collective_matmul.programs import (
    COLLECTIVE,
    assert_close,
    fast_jit,
    mesh,
    normal,
    plain,
    specs,
    with_gradients,
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the kernels by plain expressions of two-dimensional arrays. Records the names of those that ran."""
    ran: list[str] = []

    def kernel(module: str, name: str) -> Any:
        def run(x: jax.Array, w: jax.Array, axis_name: str, tiles: Tiles | None) -> Any:
            assert x.ndim == w.ndim == 2 and tiles is None
            ran.append(name)
            out = plain(module, x, w, axis_name)
            gathered = jax.lax.all_gather(x, axis_name, tiled=True)
            return (out, gathered) if module == "all_gather_matmul" else out

        return run if name.endswith("_kernel") else lambda site, tiles: None

    monkeypatch.setattr(mosaic, "_kernel", kernel)
    monkeypatch.setattr(form_choice, "_no_kernels_here", lambda form, graphs: None)
    return ran


@pytest.mark.parametrize("batch", [(), (1,), (2, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_compute_what_the_plain_expression_does(kind: str, batch: tuple[int, ...], kernels: list[str]) -> None:
    on, none = mesh(tp=4), (None,) * len(batch)
    operands = normal(0, *batch, 8, 12), normal(1, 12, 4), normal(2, *batch, 8, 4)
    run = with_gradients(lambda x, w: COLLECTIVE[kind](x, w, "tp", "mosaic"), kind, on, none)
    assert_close(run(*operands), with_gradients(lambda x, w: plain(kind, x, w, "tp"), kind, on, none)(*operands), 1e-6)
    backward = {"all_gather_matmul": "matmul_reduce_scatter", "matmul_reduce_scatter": "all_gather_matmul"}
    assert kernels == [f"{k}_kernel" for k in (kind, backward.get(kind)) if k]


def test_one_batch_element_costs_no_transpose(kernels: list[str]) -> None:
    for kind in KINDS:
        spec_x, spec_w, spec_y = specs(kind, (None,))
        mapped = jax.shard_map(
            lambda x, w, kind=kind: COLLECTIVE[kind](x, w, "tp", "mosaic"),
            mesh=mesh(tp=4),
            in_specs=(spec_x, spec_w),
            out_specs=spec_y,
        )
        text = fast_jit(mapped).lower(normal(0, 1, 8, 12), normal(1, 12, 4)).compile().as_text()
        assert text is not None and " transpose(" not in text and " copy(" not in text
