"""Writes one HTML page with timelines and tables. It needs no network and no other file, so it can be sent to anyone.

`page.html`, `page.css` and `page.js` are the page. This module puts them together and adds the data as JSON:

    title, headlines, notes      text
    colours                      [key, colour, words] in the order of the legend
    timelines                    title, summary, end in ns, lanes and memory
      lanes                      name, bars and pieces. Times are whole nanoseconds
        bars                     columns start, length, name, label, key; the last three are numbers in `words`
        pieces                   for each key, the starts and lengths of the disjoint intervals that are coloured
      memory                     when the memory changes, and to how many bytes: columns at, bytes
    words                        texts of all bars, each once
    tables                       title, caption, columns and rows

Everything that comes from a program, such as names, is text for the page and never markup.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from dhelix.errors import DhelixError
from dhelix.launch.shown.timeline_plot import COLOURS, Bar, Picture, pieces

MOST_ROWS = 10_000
"""Rows of a table that a browser still shows without delay; callers give no longer tables."""
_HERE = Path(__file__).parent


def save(
    path: str | Path,
    title: str,
    headlines: Sequence[str],
    notes: Sequence[str],
    pictures: Sequence[Picture],
    tables: Sequence[Table],
) -> None:
    """Writes the page.

    Args:
      headlines: sentences above everything else.
      notes: what is uncertain.
      tables: as they are printed in a terminal.

    Raises:
      DhelixError: the file cannot be written.
    """
    words: dict[str, int] = {}
    data = {
        "title": title,
        "headlines": list(headlines),
        "notes": list(notes),
        "colours": [[key, colour, text] for key, (colour, text) in COLOURS.items()],
        "timelines": [_timeline(picture, words) for picture in pictures],
        "words": list(words),
        "tables": [_table(table) for table in tables],
    }
    # In a script element, only `<` could end the element or begin a comment.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    page = (_HERE / "page.html").read_text()
    for name, content in (("page.css", None), ("page.js", None), ("data", text)):
        page = page.replace(f"{{{{{name}}}}}", content if content is not None else (_HERE / name).read_text())
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise DhelixError(f"cannot write {path} ({error.strerror}); give a file in a folder that exists") from None


def _timeline(picture: Picture, words: dict[str, int]) -> dict[str, Any]:
    return {
        "title": picture.title,
        "summary": picture.summary,
        "end": _nanoseconds(picture.end),
        "lanes": [_lane(picture, lane, words) for lane in picture.lanes],
        "memory": {
            "at": [_nanoseconds(at) for at, _, _ in picture.memory],
            "bytes": [needed for _, needed, _ in picture.memory],
        },
    }


def _lane(picture: Picture, lane: str, words: dict[str, int]) -> dict[str, Any]:
    bars = sorted((bar for bar in picture.bars if bar.lane == lane), key=lambda bar: (bar.start, bar.end))
    coloured = pieces(picture, lane)
    return {
        "name": lane,
        "bars": {
            "start": [_nanoseconds(bar.start) for bar in bars],
            "length": [_nanoseconds(bar.end) - _nanoseconds(bar.start) for bar in bars],
            **{field: [_number(words, bar, field) for bar in bars] for field in ("name", "label", "key")},
        },
        "pieces": {
            key: {
                "start": [_nanoseconds(start) for start, _ in intervals],
                "length": [_nanoseconds(end) - _nanoseconds(start) for start, end in intervals],
            }
            for key, intervals in coloured.items()
            if intervals
        },
    }


def _nanoseconds(milliseconds: float) -> int:
    return round(1e6 * milliseconds)


def _number(words: dict[str, int], bar: Bar, field: str) -> int:
    return words.setdefault(getattr(bar, field), len(words))


def _table(table: Table) -> dict[str, Any]:
    """The cells of a table for a terminal, as text."""
    columns = [list(column.cells) for column in table.columns]
    return {
        "title": _text(table.title),
        "caption": _text(table.caption),
        "columns": [{"name": _text(c.header), "right": c.justify == "right"} for c in table.columns],
        "rows": [[_text(cell) for cell in row] for row in zip(*columns, strict=True)],
    }


def _text(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell or "")
