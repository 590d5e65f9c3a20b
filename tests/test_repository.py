"""Rules for the whole repository: layers, the compatibility module, packages, BUILD files."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import dhelix

ROOT = Path(__file__).parent.parent
NOT_OURS = {"third_party", "build", "dist", "demo-output"}
NOT_INSTALLED = {("tests",), ("benchmarks",), ("examples",)}

# A layer may import itself and earlier layers. `models` may import only itself, and only `launch` may import it.
ORDER = ("errors", "profiles", "passes", "runtime", "launch")
LAYERS = {*ORDER, "models"}
# The same rule holds for the folders of `passes`. `pipeline_fold` may import only itself.
PASSES = (
    "hlo", "analysis", "framework", "strands", "evaluation", "ordering", "communication", "sharding", "tuning",
    "plans", "simulation",
)  # fmt: skip


def _folders(top: Path = ROOT) -> Iterator[Path]:
    yield top
    for child in sorted(p for p in top.iterdir() if p.is_dir() and not p.is_symlink()):
        hidden = child.name.startswith((".", "_", "bazel-")) or child.name.endswith(".egg-info")
        if not hidden and child.name not in NOT_OURS:
            yield from _folders(child)


CODE_FOLDERS = [f for f in _folders() if any(f.glob("*.py"))]
SOURCES = [s for f in CODE_FOLDERS for s in sorted(f.glob("*.py"))]


@functools.cache
def _nodes(source: Path) -> list[ast.AST]:
    """All nodes of a file. The first one is the module."""
    return list(ast.walk(ast.parse(source.read_text())))


@functools.cache
def _imports(source: Path) -> list[str]:
    """Dotted names of a file's imports. `from a import b` gives `a.b`."""
    names = []
    for node in _nodes(source):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    return names


def _label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _in_layers(source: Path) -> bool:
    return source.relative_to(ROOT).parts[0] in LAYERS


def _may_import(layer: str) -> set[str]:
    if layer == "models":
        return {"models"}
    return LAYERS if layer == "launch" else set(ORDER[: ORDER.index(layer) + 1])


def test_imports_point_one_way() -> None:
    wrong = []
    for source in SOURCES:
        layer = source.relative_to(ROOT).parts[0]
        for name in _imports(source):
            first, _, rest = name.partition(".")
            if first in {*LAYERS, "tests", ""}:
                wrong.append(f"{_label(source)}: {name}: write dhelix.{name.lstrip('.')}")
            elif first == "dhelix" and layer in LAYERS and rest.partition(".")[0] not in _may_import(layer):
                wrong.append(f"{_label(source)}: {name}: {layer} may import {sorted(_may_import(layer))}")
    assert not wrong


def test_folders_of_passes_import_one_way() -> None:
    wrong = []
    for source in [s for s in SOURCES if s.is_relative_to(ROOT / "passes") and len(s.relative_to(ROOT).parts) > 2]:
        folder = source.relative_to(ROOT).parts[1]
        allowed = {"pipeline_fold"} if folder == "pipeline_fold" else set(PASSES[: PASSES.index(folder) + 1])
        for parts in [name.split(".") for name in _imports(source)]:
            inside = parts[:2] == ["dhelix", "passes"] and (ROOT / "passes" / parts[2]).is_dir()
            if inside and parts[2] not in allowed:
                wrong.append(f"{_label(source)}: {'.'.join(parts)}: passes/{folder} may import {sorted(allowed)}")
    assert not wrong


def test_only_the_compatibility_module_touches_internals() -> None:
    internals = ("jax._", "jaxlib._", "jaxlib.xla_client")
    found = {_label(s): [n for n in _imports(s) if n.startswith(internals)] for s in SOURCES}
    assert {label for label, names in found.items() if names} == {"passes/jax_compat.py"}


def test_every_folder_with_code_has_a_build_file() -> None:
    assert not [_label(folder) for folder in CODE_FOLDERS if not (folder / "BUILD").is_file()]


def test_labels_of_build_files_lead_to_folders() -> None:
    missing = []
    for folder in CODE_FOLDERS:
        labels = re.findall(r'"//([^":]*)', (folder / "BUILD").read_text())
        missing += [
            f"{_label(folder)}: {label}"
            for label in labels
            if label != "visibility" and not (ROOT / label / "BUILD").is_file()
        ]
    assert not missing


ROOMS = [f for f in CODE_FOLDERS if f != ROOT and _in_layers(f)]


def test_a_folder_has_few_entries_and_says_what_happens_in_it() -> None:
    beside = {"__init__.py", "BUILD", "__pycache__"}
    entries = {_label(f): len([entry for entry in f.iterdir() if entry.name not in beside]) for f in ROOMS}
    assert not {label: count for label, count in entries.items() if count > 13}
    assert not [_label(f) for f in ROOMS if not _docstring(f / "__init__.py")]


def _docstring(source: Path) -> str | None:
    module = _nodes(source)[0]
    return ast.get_docstring(module) if isinstance(module, ast.Module) else None


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body. Its docstring and lines without code do not count."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return len({n for part in body for n in range(part.lineno, (part.end_lineno or part.lineno) + 1)})


def test_modules_and_functions_are_short() -> None:
    long = []
    for source in [s for s in SOURCES if s.parent in ROOMS]:
        if (lines := len(source.read_text().splitlines())) > 400:
            long.append(f"{_label(source)}: {lines} lines")
        for node in _nodes(source):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _lines(node) > 60:
                long.append(f"{_label(source)}: {node.name} has {_lines(node)} lines")
    assert not long


def test_every_package_is_installed() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    configured = {ROOT.joinpath(*package.split(".")[1:]) for package in packages}
    with_code = {f for f in CODE_FOLDERS if f.relative_to(ROOT).parts[:1] not in NOT_INSTALLED}
    assert not with_code - configured, "missing in pyproject.toml, [tool.setuptools] packages"
    assert all(folder.is_dir() for folder in configured), "pyproject.toml lists a folder that is not there"


def test_dhelix_is_this_checkout_and_has_no_twin() -> None:
    assert dhelix.__file__ is not None and Path(dhelix.__file__).resolve().parent == ROOT.resolve()
    assert not LAYERS & sys.modules.keys()


def test_requirement_files_name_versions_and_no_address() -> None:
    for file in sorted((ROOT / "requirements").glob("*.txt")):
        lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
        assert lines == [line for line in lines if "://" not in line and not line.startswith("-")], file.name
        if file.name != "newest.txt":
            assert all("==" in line for line in lines), file.name


def test_links_of_pages_outside_of_the_site_lead_somewhere() -> None:
    """`make docs` checks the links of the pages in docs/."""
    broken = []
    for page in [p for folder in _folders() for p in folder.glob("*.md") if ROOT / "docs" not in p.parents]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken
