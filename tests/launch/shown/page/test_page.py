"""The page of timelines and tables, in a real browser: drawn, zoomed, moved, searched and sorted, without errors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from dhelix.launch.shown.page import write
from dhelix.launch.shown.timeline_plot import Bar, Picture
from dhelix.tests.launch.shown.page.browser import CHROMIUM, DRIVER, Browser, browser

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromium-driver")

EVIL = "<img src=x onerror=window.evil=1></script><script>window.evil=1</script>"
HEADLINE = "predicted: 10 ms"


def pictures(bars: int) -> list[Picture]:
    """A step of `bars` operators of 1 ms, every third beside an all-gather that lasts 0.5 ms longer."""
    found = []
    for n in range(bars):
        key, label = (("alpha", "GEMM"), ("beta", "attention"))[n % 2]
        found.append(Bar(1.0 * n, n + 0.8, "compute", key, label, f"fusion.{n}"))
        if n % 3 == 0:
            found.append(Bar(1.0 * n, n + 0.9, "communication", "alpha", "all-gather", f"all-gather-start.{n}", "AG"))
    return [Picture("plain", HEADLINE, tuple(found)), Picture(EVIL, "strands", tuple(found))]


def table(rows: int) -> Table:
    made = Table(title="Collectives, most exposed first", caption="and 3 more (--top)")
    made.add_column("collective")
    made.add_column("size", justify="right")
    for n in range(rows):
        made.add_row(f"all-gather-start.{3 * n}", ("2.0 MiB", "900.0 KiB", "1.5 GiB")[n % 3])
    made.add_row(EVIL, "1 B")
    return made


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def page(window: Browser, tmp_path: Path) -> Browser:
    write.save(tmp_path / "page.html", f"jit_step {EVIL}", [HEADLINE], ["a note", EVIL], pictures(10), [table(3)])
    window.open(tmp_path / "page.html")
    return window


def view(page: Browser) -> tuple[float, float]:
    start, end = page.run("return [view.from, view.to]")
    return start, end


def canvas(page: Browser) -> dict[str, Any]:
    """Where the first timeline is in the window."""
    return page.run("return document.querySelector('canvas').getBoundingClientRect()")


def time_at(page: Browser, x: float) -> float:
    """The time in ns at a place of the first timeline."""
    return page.run("return toTime(document.querySelector('canvas'), arguments[0])", x)


def place_of(page: Browser, time: float) -> int:
    """Where a time in ns is in the window, in pixels from the left."""
    where = canvas(page)
    width = page.run("return width(document.querySelector('canvas'))")
    start, end = view(page)
    return round(where["x"] + where["width"] - width + (time - start) / (end - start) * width)


def colours(page: Browser) -> set[str]:
    """The colours of the pixels of the first timeline."""
    script = """
      const canvas = document.querySelector('canvas');
      const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      const found = new Set();
      for (let n = 0; n < pixels.length; n += 4)
        found.add('#' + [0, 1, 2].map((k) => pixels[n + k].toString(16).padStart(2, '0')).join(''));
      return [...found];"""
    return set(page.run(script))


def test_it_is_drawn_without_errors(page: Browser) -> None:
    assert page.errors() == []
    assert {"#e08a3c", "#3f7cac", "#79b791", "#cf2e43"} <= colours(page)  # both strands, hidden and exposed
    assert HEADLINE in page.run("return document.getElementById('headlines').textContent")
    assert page.run("return document.querySelectorAll('canvas').length") == 2
    assert page.run("return document.getElementById('legend').textContent").startswith("strand αstrand β")


def test_names_are_text(page: Browser) -> None:
    assert page.run("return window.evil") is None
    assert page.run("return document.title") == f"jit_step {EVIL}"
    assert page.run("return document.querySelectorAll('img').length") == 0
    assert EVIL in page.run("return document.querySelectorAll('figcaption')[1].textContent")


def test_zoom_and_move(page: Browser) -> None:
    where = canvas(page)
    x, y = round(where["x"] + where["width"] * 3 / 4), round(where["y"] + 20)
    under = time_at(page, x - where["x"])
    page.wheel(x, y, -600)
    start, end = view(page)
    assert end - start < 9.8e6 / 2
    assert time_at(page, x - where["x"]) == pytest.approx(under)
    page.pointer(
        {"type": "pointerMove", "x": x, "y": y},
        {"type": "pointerDown", "button": 0},
        {"type": "pointerMove", "x": x + 200, "y": y},
        {"type": "pointerUp", "button": 0},
    )
    moved, _ = view(page)
    assert moved < start
    page.run("document.getElementById('all').click()")
    assert view(page) == (0, 9.9e6)
    page.run("document.querySelector('canvas').focus()")
    page.run("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: '+', bubbles: true}))")
    assert view(page) == (pytest.approx(9.9e6 / 4), pytest.approx(9.9e6 * 3 / 4))
    assert page.errors() == []


def test_search(page: Browser) -> None:
    page.type("search", "all-gather-start.3")
    assert page.run("return document.getElementById('found').textContent") == "2 found"  # one in each timeline
    assert page.run("return document.querySelector('tr.hit').cells[0].textContent") == "all-gather-start.3"
    page.type("search", "\ue007")  # Enter
    assert page.run("return document.getElementById('found').textContent") == "2 found, this is number 1"
    start, end = view(page)
    assert start < 3.45e6 < end
    page.run("find('nothing like this')")
    assert page.run("return document.getElementById('found').textContent") == "0 found"
    page.run("next()")
    assert page.errors() == []


def test_what_is_under_the_mouse(page: Browser) -> None:
    where, x = canvas(page), place_of(page, 3.4e6)
    page.pointer({"type": "pointerMove", "x": x, "y": round(where["y"] + 70)})
    lines = page.run("return document.getElementById('tip').textContent").split("\n")
    assert lines == ["all-gather", "all-gather-start.3", "900 µs, from 3 ms", "hidden 800 µs, exposed 100 µs"]
    page.pointer({"type": "pointerMove", "x": x, "y": round(where["y"] + 20)})
    lines = page.run("return document.getElementById('tip').textContent").split("\n")
    assert lines == ["attention", "fusion.3", "800 µs, from 3 ms", "strand β"]


def test_tables_sort_and_show_instructions(page: Browser) -> None:
    cells = "return [...document.querySelectorAll('tbody tr')].map((row) => row.cells[1].textContent)"
    page.run("document.querySelectorAll('th button')[1].click()")
    assert page.run(cells) == ["1.5 GiB", "2.0 MiB", "900.0 KiB", "1 B"]
    page.run("document.querySelectorAll('th button')[1].click()")
    assert page.run(cells) == ["1 B", "900.0 KiB", "2.0 MiB", "1.5 GiB"]
    page.run("[...document.querySelectorAll('tr.known')].find((r) => r.textContent.includes('start.3')).click()")
    start, end = view(page)
    assert start < 3.45e6 < end < 9.9e6


@pytest.mark.slow
def test_a_step_of_100_000_instructions(window: Browser, tmp_path: Path) -> None:
    write.save(tmp_path / "page.html", "large", [], [], pictures(100_000), [table(2000)])
    window.open(tmp_path / "page.html")
    where = canvas(window)
    for _ in range(5):
        window.wheel(round(where["x"] + 700), round(where["y"] + 20), -900)
    start, end = view(window)
    assert end - start < 1e11 / 100
    window.run("find('fusion.99999')")
    assert window.run("return document.getElementById('found').textContent") == "2 found"
    window.run("next()")
    start, end = view(window)
    assert start < 99_999.4e6 < end
    assert window.errors() == []
