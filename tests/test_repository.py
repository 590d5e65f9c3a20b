"""Rules for the whole repository: layers, the compatibility module, packages, BUILD files."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    "plans",
)  # fmt: skip


def _folders(top: Path = ROOT) -> Iterator[Path]:
    yield top
    for child in sorted(p for p in top.iterdir() if p.is_dir() and not p.is_symlink()):
        hidden = child.name.startswith((".", "_", "bazel-")) or child.name.endswith(".egg-info")
        if not hidden and child.name not in NOT_OURS:
            yield from _folders(child)


CODE_FOLDERS = [f for f in _folders() if any(f.glob("*.py"))]
SOURCES = [s for f in CODE_FOLDERS for s in sorted(f.glob("*.py"))]


def _imports(source: Path) -> Iterator[str]:
    """Dotted names of a file's imports. `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def _label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("source", SOURCES, ids=_label)
def test_imports_point_one_way(source: Path) -> None:
    layer = source.relative_to(ROOT).parts[0]
    for name in _imports(source):
        first, _, rest = name.partition(".")
        assert first not in {*LAYERS, "tests", ""}, f"{name}: write dhelix.{name.lstrip('.')}"
        if first != "dhelix" or layer not in LAYERS:
            continue
        other = rest.partition(".")[0]
        if layer == "models":
            allowed = {"models"}
        elif layer == "launch":
            allowed = LAYERS
        else:
            allowed = set(ORDER[: ORDER.index(layer) + 1])
        assert other in allowed, f"{name}: {layer} may import {sorted(allowed)}"


@pytest.mark.parametrize(
    "source",
    [s for s in SOURCES if len(s.relative_to(ROOT).parts) > 2 and s.is_relative_to(ROOT / "passes")],
    ids=_label,
)
def test_folders_of_passes_import_one_way(source: Path) -> None:
    folder = source.relative_to(ROOT).parts[1]
    allowed = {"pipeline_fold"} if folder == "pipeline_fold" else set(PASSES[: PASSES.index(folder) + 1])
    for name in _imports(source):
        parts = name.split(".")
        if parts[:2] == ["dhelix", "passes"] and (ROOT / "passes" / parts[2]).is_dir():
            assert parts[2] in allowed, f"{name}: passes/{folder} may import {sorted(allowed)}"


@pytest.mark.parametrize("source", SOURCES, ids=_label)
def test_only_the_compatibility_module_touches_internals(source: Path) -> None:
    if _label(source) == "passes/jax_compat.py":
        return
    internals = [n for n in _imports(source) if n.startswith(("jax._", "jaxlib._", "jaxlib.xla_client"))]
    assert not internals, f"{internals} belong in passes/jax_compat.py"


@pytest.mark.parametrize("folder", CODE_FOLDERS, ids=_label)
def test_every_folder_with_code_has_a_build_file(folder: Path) -> None:
    assert (folder / "BUILD").is_file(), f"{_label(folder)} needs a BUILD file"


@pytest.mark.parametrize("build", sorted(f / "BUILD" for f in CODE_FOLDERS), ids=_label)
def test_labels_of_build_files_lead_to_folders(build: Path) -> None:
    folders = re.findall(r'"//([^":]*)', build.read_text())
    missing = [f for f in folders if f != "visibility" and not (ROOT / f / "BUILD").is_file()]
    assert not missing


ROOMS = [f for f in CODE_FOLDERS if f.relative_to(ROOT).parts[:1] and f.relative_to(ROOT).parts[0] in LAYERS]


@pytest.mark.parametrize("folder", ROOMS, ids=_label)
def test_a_folder_has_few_entries_and_says_what_happens_in_it(folder: Path) -> None:
    beside = {"__init__.py", "BUILD", "__pycache__"}
    assert len([entry for entry in folder.iterdir() if entry.name not in beside]) <= 13
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))


@pytest.mark.parametrize("source", [s for s in SOURCES if s.parent in ROOMS], ids=_label)
def test_modules_and_functions_are_short(source: Path) -> None:
    text = source.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = {n for part in body for n in range(part.lineno, (part.end_lineno or part.lineno) + 1)}
            assert len(lines) <= 60, f"{node.name} has {len(lines)} lines"


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
