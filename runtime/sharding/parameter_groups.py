"""Which group of a plan an array belongs to, by its path in the tree of states.

    matches("embedding", "0/embedding/table")            # True
    matches("layers/*norm", "0/layers/attention_norm")   # True

A name is one part of a path, or several that are joined by slashes. Each part may have `*`, `?` and `[...]` as in
`fnmatch`. The name matches a path that has such parts next to each other, anywhere.

Optimizer states follow their parameter. Optax keeps them in named tuples (`mu`, `nu`), each of which holds a tree like
that of the parameters. So somewhere in the state is a tree of parameters that has all paths of the moments' tree.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dhelix.passes.sharding.factors import ShardingError

_LISTED = 12  # paths in an error


@dataclass(frozen=True)
class LeafPath:
    """The path of a leaf.

    Attributes:
      text: the path, its parts joined by slashes.
      inside: the path within the innermost named tuple, without the field of the tuple; None outside of named tuples.
    """

    text: str
    inside: str | None = None

    @property
    def tree(self) -> str:
        """The path of the field of the named tuple."""
        return self.text.removesuffix(self.inside or "")


def paths_of(tree: Any) -> list[LeafPath]:
    """The path of each leaf of a tree, in order."""
    found = []
    for parts, start in _walk(tree):
        found.append(LeafPath("/".join(parts), None if start is None else "/".join(parts[start:])))
    return found


def _walk(tree: Any) -> Iterator[tuple[tuple[str, ...], int | None]]:
    """The parts of the path of each leaf, and where the path within a named tuple begins."""
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_named_tuple):
        text = jax.tree_util.keystr(path, simple=True, separator="/")
        parts = tuple(text.split("/")) if path else ()
        if not _is_named_tuple(node):
            yield parts, None
            continue
        for field, value in zip(node._fields, node, strict=True):
            for after, start in _walk(value):
                yield (*parts, field, *after), len(parts) + 1 + (start or 0)


def _is_named_tuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def matches(name: str, path: str) -> bool:
    """Whether a name matches a path."""
    wanted, parts = name.split("/"), path.split("/")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(fnmatch.fnmatchcase, parts[n:], wanted)) for n in starts)


def group_numbers(names: Sequence[str], paths: Sequence[LeafPath]) -> list[int | None]:
    """The number of the group of each path, which is the first name that matches the parameter; None if none does.

    Args:
      names: names as in `matches`.
      paths: paths as `paths_of` returns them.

    Raises:
      ShardingError: a name matches no path, or only paths that an earlier name matches.
    """
    matched = [next((n for n, name in enumerate(names) if matches(name, path.text)), None) for path in paths]
    parameters = {"/" + path.text: n for path, n in zip(paths, matched, strict=True) if path.inside is None}
    trees: dict[str, list[str]] = {}
    for path in paths:
        if path.inside:
            trees.setdefault(path.tree, []).append("/" + path.inside)
    roots = {tree: _roots(ends, parameters) for tree, ends in trees.items()}
    found = []
    for path, own in zip(paths, matched, strict=True):
        owners = {parameters[f"{root}/{path.inside}"] for root in roots[path.tree]} if path.inside else set()
        found.append(owners.pop() if len(owners) == 1 else own)
    for n, name in enumerate(names):
        if n not in found:
            raise _matches_nothing(name, names, paths, matched)
    return found


def _roots(ends: Sequence[str], parameters: Collection[str]) -> list[str]:
    """The paths of trees of parameters in which all the paths `ends` occur."""
    roots = [path.removesuffix(ends[0]) for path in parameters if path.endswith(ends[0])]
    return [root for root in roots if all(root + end in parameters for end in ends)]


def _matches_nothing(
    name: str, names: Sequence[str], paths: Sequence[LeafPath], matched: Sequence[int | None]
) -> ShardingError:
    taken = [n for path, n in zip(paths, matched, strict=True) if n is not None and matches(name, path.text)]
    if taken and names[taken[0]] != name:
        return ShardingError(
            f"group {name!r} is left without parameters: the group {names[taken[0]]!r} before it matches the same "
            "paths, and the first match counts; put the narrower name first"
        )
    shown = [path.text for path in paths if path.inside is None] or [path.text for path in paths]
    more = f" and {len(shown) - _LISTED} more" if len(shown) > _LISTED else ""
    return ShardingError(
        f"group {name!r} matches no path of a parameter: {', '.join(shown[:_LISTED])}{more}; a name is parts of a path "
        "joined by slashes, such as 'embedding', 'layers/*norm'"
    )
