"""Collective matmuls as data, and the choice of a form. A form is chosen only if measurements show that it pays."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul.sites import KINDS, MONOLITHIC, Form, Site, SiteTimes, Tiles, Times, choose
from dhelix.profiles.profile import Timing

RING, HYBRID = Form("ring"), Form("hybrid", chunks=4)
LARGE, SMALL = Tiles(128, 256, 64, 4, "N", 8, 132), Tiles(64, 128, 64, 6, "M", 4)
MOSAIC, MOSAIC_SMALL = Form("mosaic", tiles=LARGE), Form("mosaic", tiles=SMALL)


def site(rows: int = 8192, contraction: int = 4096, columns: int = 1536, **other: object) -> Site:
    values = {"kind": KINDS[0], "dtype": "bfloat16", "axis_size": 4, **other}
    return Site(rows=rows, contraction=contraction, columns=columns, **values)  # type: ignore[arg-type]


def measured(times_us: Mapping[Form, float], spread_us: float = 0.1) -> SiteTimes:
    timings = {form: Timing(us / 1e6, spread_us / 1e6, 9) for form, us in times_us.items()}
    return SiteTimes(Timing(80e-6), Timing(60e-6), timings)


def table(sites: Mapping[Site, Mapping[Form, float]], spread_us: float = 0.1) -> Times:
    return Times("H200", "nvlink", sites={s: measured(times, spread_us) for s, times in sites.items()})


forms = st.one_of(
    st.sampled_from([MONOLITHIC, RING, Form("bidirectional_ring"), Form("mosaic")]),
    st.integers(1, 64).map(lambda chunks: Form("hybrid", chunks)),
    st.builds(
        Tiles,
        *[st.integers(1, 512)] * 4,
        st.sampled_from("MN"),
        st.integers(1, 64),
        *[st.none() | st.integers(1, 132)] * 4,
    ).map(lambda tiles: Form("mosaic", tiles=tiles)),
)


@given(forms, st.sampled_from(KINDS), st.tuples(*[st.integers(0, 1 << 20)] * 3), st.integers(1, 64))
def test_keys_come_back(form: Form, kind: str, sizes: tuple[int, int, int], axis_size: int) -> None:
    assert Form.parse(form.key) == form
    there = Site(kind, *sizes, "float16", axis_size)
    assert Site.parse(there.key) == there


def test_keys_are_for_people() -> None:
    assert site().key == "all_gather_matmul bfloat16 8192x4096x1536 over 4"
    assert [f.key for f in (RING, HYBRID, MOSAIC)] == [
        "ring", "hybrid:4", "mosaic:128x256x64,steps=4,wide=N,group=8,sms=132",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: site(kind="gemm"), "kind of collective matmul is 'gemm': must be one of all_gather_matmul, "),
        (lambda: site(rows=-1), "rows of a collective matmul is '-1': must be a whole number of at least 0"),
        (lambda: site(columns=1.5), "columns of a collective matmul is '1.5'"),  # type: ignore[arg-type]
        (lambda: site(axis_size=True), "axis_size of a collective matmul is 'True'"),
        (lambda: site(dtype="bfloat16 8"), "give its name, such as"),
        (lambda: Form("rings"), "form of a collective matmul is 'rings': must be one of monolithic, ring, "),
        (lambda: Form("ring", chunks=2), 'form "ring" takes no chunks, but got 2: leave them out, or use "hybrid"'),
        (lambda: Form("hybrid", tiles=LARGE), 'form "hybrid" takes no tiles'),
        (lambda: Tiles(128, 128, 64, 4, "K", 8), "wide of Tiles is 'K': must be one of M, N"),  # type: ignore[arg-type]
        (lambda: Tiles(128, 0, 64, 4, "M", 8), "tile_n of Tiles is '0'"),
        (lambda: Site.parse("all_gather_matmul bfloat16 8192x4096 over 4"), "is not a collective matmul: write"),
        (lambda: Form.parse("mosaic:128"), "are not tiles: write"),
        (lambda: Form.parse("hybrid:0"), "chunks of a Form is '0'"),
        (lambda: Form.parse("hybrid:two"), "'two' is not a number of chunks: write `hybrid:4`"),
        (lambda: Form.parse("ring:2"), "are not tiles"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make: object, message: str) -> None:
    with pytest.raises(DhelixError) as raised:
        make()  # type: ignore[operator]
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_the_fastest_form_of_a_measured_site_is_chosen_with_its_tiles() -> None:
    times = table({site(): {MONOLITHIC: 140, RING: 150, HYBRID: 120, MOSAIC: 99, MOSAIC_SMALL: 101}})
    assert choose(site(), times) == MOSAIC
    assert choose(site(), times, possible=lambda form: form.name != "mosaic") == HYBRID
    assert choose(site(), times, possible=lambda form: False) == MONOLITHIC


@pytest.mark.parametrize(
    ("us", "spread_us", "expected"),
    [(98.1, 0.1, MONOLITHIC), (97.9, 0.1, RING), (97.9, 1.2, MONOLITHIC), (90.0, 4.0, RING), (90.0, 6.0, MONOLITHIC)],
)
def test_a_form_must_win_by_two_per_cent_and_by_the_noise(us: float, spread_us: float, expected: Form) -> None:
    assert choose(site(), table({site(): {MONOLITHIC: 100, RING: us}}, spread_us)) == expected


def test_what_was_not_measured_stays_monolithic() -> None:
    wins = {MONOLITHIC: 100.0, RING: 50.0}
    assert choose(site(), None) == MONOLITHIC
    assert choose(site(), Times("H200", "nvlink")) == MONOLITHIC
    assert choose(site(), table({site(): {RING: 50.0}})) == MONOLITHIC  # there is no monolithic time to compare with
    times = table({site(rows=r): wins for r in (4096, 8192)})
    for far in (site(2048), site(16384), site(6144, 4000), site(6144, columns=1600), site(0)):
        assert choose(far, times) == MONOLITHIC
    for other in (site(6144, kind=KINDS[1]), site(6144, axis_size=2), site(6144, dtype="float16")):
        assert choose(other, times) == MONOLITHIC
    assert choose(site(8192), table({site(1024): wins, site(65536): wins})) == MONOLITHIC  # the sites are too far apart


def test_between_measured_sites_a_form_must_win_at_all_of_them() -> None:
    times = table(
        {
            site(4096): {MONOLITHIC: 100, RING: 50, MOSAIC: 90},
            site(8192): {MONOLITHIC: 200, RING: 210, MOSAIC: 170},
            site(16384): {MONOLITHIC: 400, RING: 300, MOSAIC: 390},
        }
    )
    assert choose(site(4096), times) == RING
    assert choose(site(6144), times) == MOSAIC
    assert choose(site(12288), times) == MOSAIC
    assert choose(site(32768), times) == MONOLITHIC


def test_tiles_are_those_of_the_nearest_site() -> None:
    times = table(
        {
            site(4096): {MONOLITHIC: 100, MOSAIC: 80, MOSAIC_SMALL: 70},
            site(8192): {MONOLITHIC: 200, MOSAIC: 140, MOSAIC_SMALL: 150},
        }
    )
    assert choose(site(4608), times) == MOSAIC_SMALL
    assert choose(site(7168), times) == MOSAIC


def test_sites_may_lie_around_in_every_size() -> None:
    wins = {MONOLITHIC: 100.0, RING: 50.0}
    corners = {site(4096, 4096, 1536): wins, site(8192, 2048, 3072): wins}
    assert choose(site(6000, 3000, 2000), table(corners)) == RING
    assert choose(site(6000, 3000, 4000), table(corners)) == MONOLITHIC


def test_the_order_of_a_table_changes_nothing() -> None:
    tie = {RING: 50.0, HYBRID: 50.0, MONOLITHIC: 100.0}
    rows = (4096, 8192, 16384)
    for order in (rows, rows[::-1]):
        sites = {site(r): dict(sorted(tie.items(), key=lambda item: item[0].order)) for r in order}
        assert choose(site(8192), table(sites)) == RING
        assert choose(site(6144), table(sites)) == RING


def test_a_later_measurement_counts_more_and_earlier_forms_are_scaled_to_it() -> None:
    early = table({site(): {MONOLITHIC: 100, RING: 50, HYBRID: 80}, site(4096): {MONOLITHIC: 100, RING: 50}})
    late = table({site(): {MONOLITHIC: 110, RING: 120}})
    both = early.merged(late)
    assert {form: 1e6 * t.seconds for form, t in both.sites[site()].forms.items()} == pytest.approx(
        {MONOLITHIC: 110, RING: 120, HYBRID: 88}
    )
    assert [choose(s, both) for s in (site(), site(4096))] == [HYBRID, RING]
    alone = early.merged(table({site(): {RING: 40}}))
    assert set(alone.sites[site()].forms) == {RING} and choose(site(), alone) == MONOLITHIC
