"""The time of a collective matmul relative to its GEMM: measured, interpolated, or a guess that is marked as one."""

import pytest

from dhelix.profiles.collective_matmul.estimates import estimate, gemm_key
from dhelix.profiles.collective_matmul.sites import MONOLITHIC, Form, Site, SiteTimes, Tiles, Times
from dhelix.profiles.estimates.estimator import Estimate, Source
from dhelix.profiles.profile import Timing

KERNEL, OTHER = (Form("mosaic", tiles=Tiles(128, columns, 64, 4, "M", 8)) for columns in (256, 128))
GEMM = Estimate(1e-3, Source.MEASURED, 1e-5)


def site(columns: int, rows: int = 8192) -> Site:
    return Site("all_gather_matmul", rows, 4096, columns, "bfloat16", 2)


def table(**ratios: float) -> Times:
    """Times of sites by their columns. A GEMM takes 2 ms, and the kernel takes the given multiple of this time."""
    sites = {
        site(int(columns.removeprefix("n"))): SiteTimes(
            Timing(2e-3), Timing(1e-3), {MONOLITHIC: Timing(3e-3), KERNEL: Timing(ratio * 2e-3)}
        )
        for columns, ratio in ratios.items()
    }
    return Times("H200", "nvlink", sites=sites)


def test_a_measured_form_takes_so_many_times_its_gemm_as_where_it_was_measured() -> None:
    """Only the ratio counts, because the clock may have been different."""
    found = estimate(site(4096), KERNEL, table(n4096=1.1), GEMM)
    assert found is not None and found.source is Source.MEASURED
    assert (found.seconds, found.spread) == pytest.approx((1.1e-3, 1.1e-5))
    guessed = estimate(site(4096), KERNEL, table(n4096=1.1), Estimate(1e-3, Source.GUESS))
    assert guessed is not None and guessed.source is Source.GUESS, "no better than the GEMM"


def test_other_tiles_count_as_the_fastest_that_were_measured() -> None:
    found = estimate(site(4096), OTHER, table(n4096=1.1), GEMM)
    assert found is not None and found.source is Source.INTERPOLATED
    assert found.seconds == pytest.approx(1.1e-3)


def test_between_measured_sites_it_lies_between_them() -> None:
    found = estimate(site(4096), KERNEL, table(n2048=1.0, n8192=1.21), GEMM)
    assert found is not None and found.source is Source.INTERPOLATED
    assert found.seconds == pytest.approx(1.1e-3)


def test_outside_of_what_was_measured_it_is_a_guess() -> None:
    found = estimate(site(1024), KERNEL, table(n2048=1.2, n4096=1.1), GEMM)
    assert found is not None and found.source is Source.GUESS
    assert found.seconds == pytest.approx(1.2e-3)


@pytest.mark.parametrize(
    ("place", "form", "times"),
    [
        (site(4096), KERNEL, None),
        (site(4096), Form("ring"), table(n4096=1.1)),
        (site(1 << 20), KERNEL, table(n4096=1.1)),
        (site(0), KERNEL, table(n4096=1.1)),
    ],
    ids=["no times", "no such form", "too far", "nothing in it"],
)
def test_nothing_says_it(place: Site, form: Form, times: Times | None) -> None:
    assert estimate(place, form, times, GEMM) is None


def test_the_gemm_is_the_whole_one_on_a_device() -> None:
    assert str(gemm_key(site(3072))) == "gemm bf16,bf16->bf16:nn:cublaslt 8192x3072x4096"
    assert gemm_key(Site("matmul_all_reduce", 8, 8, 8, "float64", 2)) is None
