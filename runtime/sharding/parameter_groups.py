"""Which group of a plan an array belongs to, by its path in the tree of states.

    matches("embedding", "0/embedding/table")            # True, and for its moment "1/0/mu/embedding/table", too
    matches("layers/*norm", "0/layers/attention_norm")   # True

A name is one part of a path, or several that are joined by slashes. Each part may have `*`, `?` and `[...]` as in
`fnmatch`. The name matches a path that has such parts next to each other, anywhere. Optax keeps the path of a parameter
within the path of its moments, so a name that matches a parameter matches its optimizer states.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import jax

from dhelix.passes.sharding.factors import ShardingError

_LISTED = 12  # paths in an error


def matches(name: str, path: str) -> bool:
    """Whether a name matches a path."""
    wanted, parts = name.split("/"), path.split("/")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(fnmatch.fnmatchcase, parts[n:], wanted)) for n in starts)


def paths_of(tree: Any) -> list[str]:
    """The path of each leaf of a tree, its parts joined by slashes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def group_numbers(names: Sequence[str], paths: Sequence[str]) -> list[int | None]:
    """The number of the first name that matches each path; None if none does.

    Args:
      names: names as in `matches`.
      paths: paths of arrays, as `paths_of` returns them.

    Raises:
      ShardingError: a name matches no path, or only paths that an earlier name matches.
    """
    found = [next((n for n, name in enumerate(names) if matches(name, path)), None) for path in paths]
    for n, name in enumerate(names):
        if n in found:
            continue
        if taken := [other for path, other in zip(paths, found, strict=True) if matches(name, path)]:
            raise ShardingError(
                f"group {name!r} is left without parameters: the group {names[taken[0] or 0]!r} before it matches the "
                "same paths, and the first match counts; put the narrower name first"
            )
        shown = _without_moments(paths)
        more = f" and {len(shown) - _LISTED} more" if len(shown) > _LISTED else ""
        raise ShardingError(
            f"group {name!r} matches no path of the state: {', '.join(shown[:_LISTED])}{more}; a name is parts of a "
            "path joined by slashes, such as 'embedding', 'layers/*norm'"
        )
    return found


def _without_moments(paths: Sequence[str]) -> list[str]:
    """The paths, shortest first, but for those that end like one before them: 1/0/mu/embedding after 0/embedding."""
    shown: list[str] = []
    for path in sorted(paths, key=lambda path: path.count("/")):
        ends = ["/" + before.partition("/")[2] for before in shown if "/" in before]
        if not any(path.endswith(end) for end in ends):
            shown.append(path)
    return shown
