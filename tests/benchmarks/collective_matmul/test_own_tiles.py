"""The cost of own tiles in a GEMM: compilation of the kernels, the table, and errors."""

import sys

import jax.numpy as jnp
import pytest

from dhelix.benchmarks.collective_matmul import own_tiles
from dhelix.benchmarks.collective_matmul import programs as collective_matmul_programs
from dhelix.benchmarks.collective_matmul.programs import Program
from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul.sites import Tiles
from dhelix.runtime.compiler import deviceless


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize(
    "shape, splits, tiles, names",
    [
        ("2048x512x4096", [], Tiles(128, 256, 64, 4, "M", 8, sms=32), ["1 of 2", "1 of 4"]),
        ("64x2048x8192", [2], Tiles(64, 128, 64, 7, "N", 8), ["2 splits"]),
    ],
)
def test_each_variant_compiles_for_one_gpu(shape: str, splits: list[int], tiles: Tiles, names: list[str]) -> None:
    made = own_tiles.variants(shape, [2, 4], splits, tiles)
    assert list(made) == ["cuBLAS", "no own tiles", *names]
    mesh = deviceless.mesh({collective_matmul_programs.AXIS: 1})
    for name, program in made.items():
        lowered = collective_matmul_programs.lowered(program, own_tiles.site_of(shape, 1), mesh, 3)
        text = deviceless.compile(lowered).as_text() or ""
        assert ("mosaic_gpu" in text) == (name != "cuBLAS")


@pytest.mark.parametrize("scale, right", [(1, True), (2, False)])
def test_programs_take_turns_and_a_wrong_kernel_is_found(scale: int, right: bool) -> None:
    def product(times: int) -> Program:
        return Program("a product", ("x", "w"), (64, 64), lambda x, w: times * jnp.dot(x, w))

    made = {"cuBLAS": product(1), "no own tiles": product(scale)}
    if not right:
        with pytest.raises(DhelixError, match="result is not cuBLAS's"):
            own_tiles.measure("64x64x64", made, 3)
    else:
        us = own_tiles.measure("64x64x64", made, 3)
        assert [len(times) for times in us.values()] == [3, 3] and min(map(min, us.values())) > 0


def test_a_table_has_medians() -> None:
    rows = own_tiles.table({"8x8x8": {"cuBLAS": [3.0, 1.0, 2.0], "1 of 2": [5.0]}}).splitlines()
    assert rows[0] == "| M x K x N | cuBLAS | 1 of 2 |" and rows[2] == "| 8x8x8 | 2 | 5 |"


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["--shapes", "8192x2048"], "'8192x2048' is no shape"),
        (["--shapes", "8192x2048x4100"], "not a multiple"),
        (["--devices", "16"], "more than 8"),
        ([], "there is no GPU"),
    ],
)
def test_mistakes_end_in_one_line(arguments: list[str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(sys, "argv", ["own_tiles.py", *arguments])
    with pytest.raises(SystemExit, match=why) as error:
        own_tiles.main()
    assert "\n" not in str(error.value)


def test_a_shape_is_three_numbers() -> None:
    with pytest.raises(DhelixError, match="write rows, contraction and columns"):
        own_tiles.site_of("8192x2048xN", 2)
