"""Writes `docs/results/`, the table of results in README.md and the data of `dhelix flags`, from `benchmarks/results/`.

    python -m dhelix.benchmarks.pages.write            # writes all pages
    python -m dhelix.benchmarks.pages.write --check    # fails if a page differs from what would be written

README.md holds its table between the lines `<!-- results -->` and `<!-- end of results -->`. A page depends on the
result files and on the code of the tables alone, so writing twice gives the same bytes. Every result file belongs to
one section of `contents.toml`, or is listed there as raw.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhelix.benchmarks.pages import launch_effects, renderers
from dhelix.benchmarks.pages.markdown import table
from dhelix.benchmarks.strands import results as strand_results
from dhelix.errors import DhelixError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs" / "results"
README = ROOT / "README.md"
EFFECTS = ROOT / "profiles" / "data" / "launching" / "effects.json"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
LINKS = {"nvlink": "NVLink", "no-p2p": "no peer-to-peer", "two-nodes": "two nodes, TCP"}
CONTENTS = Path(__file__).with_name("contents.toml")


@dataclass(frozen=True)
class Section:
    """One set of result files, see `contents.toml`. `image` is a file of docs/images."""

    title: str
    text: str
    files: list[str]
    render: str
    command: str
    image: str = ""


@dataclass(frozen=True)
class Page:
    """A file of `docs/results/`."""

    name: str
    title: str
    text: str
    sections: tuple[Section, ...]

    @classmethod
    def of(cls, section: list[dict[str, Any]], **values: str) -> Page:
        return cls(**values, sections=tuple(Section(**values) for values in section))


@dataclass(frozen=True)
class Row:
    """A row of the README's table: a program of dhelix compared with XLA's best of the same run and link."""

    workload: str
    file: str
    program: str
    setting: str

    def cells(self) -> tuple[str, ...]:
        """The text of each cell. Raises DhelixError if the file lacks the program."""
        run = strand_results.read(RESULTS / f"{self.file}.json")
        for group in strand_results.groups([run]):
            for ours in group.results:
                if (ours.variant, ours.setting) == (self.program, self.setting) and group.xla is not None:
                    return self._cells(group, group.xla, ours)
        raise DhelixError(f"{self.file}.json has no measured {self.program} under {self.setting}")

    def _cells(
        self, group: strand_results.Group, xla: strand_results.Result, ours: strand_results.Result
    ) -> tuple[str, ...]:
        steps = sorted({len(xla.steps_ms), len(ours.steps_ms)})
        return (
            group.run.on["gpus"].partition(",")[0].replace("NVIDIA ", "").replace(" 80GB HBM3", ""),
            LINKS[group.link],
            self.workload,
            f"{xla.median_ms:.0f} ms",
            f"{ours.median_ms:.0f} ms",
            f"**{xla.median_ms / ours.median_ms:.2f} x**",
            f"{group.mfu(ours) or 0.0:.0%}",
            f"{100 * (ours.peak_gib / xla.peak_gib - 1):+.1f} %",
            " or ".join(map(str, steps)),
            group.run.on["date"],
        )


def readme() -> str:
    """The text of README.md, with the table that the result files give."""
    rows = [Row(**row).cells() for row in tomllib.loads(CONTENTS.read_text())["readme"]]
    heads = (
        "GPUs", "link", "workload", "XLA's best", "dhelix", "speed-up", "MFU", "peak memory", "timed steps", "date",
    )  # fmt: skip
    before, begin, rest = README.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise DhelixError(f"README.md needs the lines {BEGIN} and {END} around its table")
    return f"{before}{BEGIN}\n\n{table(heads, rows)}\n\n{END}{after}"


def pages() -> dict[str, str]:
    """The text of each page by file name, the index first.

    Raises:
      DhelixError: no section shows a result file, or two sections do.
    """
    contents = tomllib.loads(CONTENTS.read_text())
    made = [Page.of(**page) for page in contents["page"]]
    shown: dict[Path, str] = {}
    for page in made:
        for section in page.sections:
            for path in files(section):
                if path in shown:
                    raise DhelixError(f"{path.name} is shown by {shown[path]!r} and by {section.title!r}")
                shown[path] = section.title
    raw = {RESULTS / f"{name}.json" for name in contents["raw"]}
    if left := sorted(path.name for path in RESULTS.glob("*.json") if path not in shown and path not in raw):
        raise DhelixError(f"no section of benchmarks/pages/contents.toml shows {', '.join(left)}")
    return {"index.md": _index(made), **{f"{page.name}.md": _page(page) for page in made}}


def files(section: Section) -> list[Path]:
    """Result files of a section in its order. Raises DhelixError for a pattern that matches none."""
    found: list[Path] = []
    for pattern in section.files:
        matched = sorted(RESULTS.glob(f"{pattern}.json"))
        if not matched:
            raise DhelixError(f"no file of benchmarks/results matches {pattern}.json")
        found += [path for path in matched if path not in found]
    return found


def _index(pages: Sequence[Page]) -> str:
    lines = ["# Results", ""]
    lines += ["Generated by `python -m dhelix.benchmarks.pages.write` from `benchmarks/results/`.", ""]
    lines += [f"- [{page.title}]({page.name}.md): {page.text.split('. ')[0].rstrip('.')}." for page in pages]
    lines += ["", "What was tried and did not help is in the [research log](../research_log.md)."]
    return "\n".join(lines) + "\n"


def _page(page: Page) -> str:
    parts = [f"# {page.title}", page.text, *map(_section, page.sections)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _section(section: Section) -> str:
    found = files(section)
    names = ", ".join(f"`{path.stem}`" for path in found)
    source = f"Measured by `{section.command}`. Files: {names}."
    picture = [f"![{section.title}](../images/{section.image})"] if section.image else []
    rendered = getattr(renderers, section.render)(found).strip()
    return "\n\n".join((f"## {section.title}", section.text, source, *picture, rendered))


def write(folder: Path) -> list[Path]:
    """Writes the pages; returns those that changed."""
    folder.mkdir(parents=True, exist_ok=True)
    changed = []
    for name, text in pages().items():
        path = folder / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            changed.append(path)
    for path, text in _others().items():
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            changed.append(path)
    return changed


def _others() -> dict[Path, str]:
    """Files outside of the pages that follow from the result files."""
    return {README: readme(), EFFECTS: launch_effects.text(RESULTS)}


def differing(folder: Path) -> list[str]:
    """Pages that are not what would be written, and files of the folder that are no page."""
    made = pages()
    wrong = [
        name for name, text in made.items() if not (folder / name).is_file() or (folder / name).read_text() != text
    ]
    wrong += [path.name for path, text in _others().items() if not path.is_file() or path.read_text() != text]
    return wrong + sorted(path.name for path in folder.glob("*.md") if path.name not in made)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a page is out of date")
    options = parser.parse_args(arguments)
    try:
        if not options.check:
            print("\n".join(f"wrote {path}" for path in write(DOCS)) or "docs/results is up to date")
            return 0
        if wrong := differing(DOCS):
            print(f"out of date: {', '.join(wrong)}; run python -m dhelix.benchmarks.pages.write")
            return 1
    except DhelixError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
