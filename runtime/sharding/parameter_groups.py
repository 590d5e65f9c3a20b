"""Which group of a plan an array belongs to, by its path in the tree of states.

    matches("embedding", "0/embedding/table")            # True
    matches("layers/*norm", "0/layers/attention_norm")   # True

A name is one part of a path, or several that are joined by slashes. Each part may have `*`, `?` and `[...]` as in
`fnmatch`. The name matches a path that has such parts next to each other, anywhere.

Optimizer states follow their parameter. Optax keeps them in named tuples (`mu`, `nu`), each of which holds a tree like
that of the parameters. So somewhere in the state is a tree of parameters that has all paths of the moments' tree. It is
in fewer named tuples than they are: in none, or in one if the train state itself is a named tuple.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Sequence
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
      inside: the path within the innermost named tuple, without the field of the tuple; empty outside of named tuples.
      depth: how many named tuples hold the leaf.
    """

    text: str
    inside: str = ""
    depth: int = 0

    @property
    def tree(self) -> str:
        """The path of the field of the named tuple."""
        return self.text.removesuffix(self.inside)


def paths_of(tree: Any) -> list[LeafPath]:
    """The path of each leaf of a tree, in order."""
    found = []
    for parts, starts in _walk(tree):
        found.append(LeafPath("/".join(parts), "/".join(parts[starts[-1] :]) if starts else "", len(starts)))
    return found


def _walk(tree: Any) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """The parts of the path of each leaf, and where the path within each named tuple begins, the outermost first."""
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_named_tuple):
        text = jax.tree_util.keystr(path, simple=True, separator="/")
        parts = tuple(text.split("/")) if path else ()
        if not _is_named_tuple(node):
            yield parts, ()
            continue
        first = len(parts) + 1
        for field, value in zip(node._fields, node, strict=True):
            for after, starts in _walk(value):
                yield (*parts, field, *after), (first, *(first + start for start in starts))


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
      ShardingError: a name matches no parameter, or only those that an earlier name matches.
    """
    matched = [next((n for n, name in enumerate(names) if matches(name, path.text)), None) for path in paths]
    numbers = {"/" + path.text: n for path, n in zip(paths, matched, strict=True)}
    depths, roots = _trees_of_parameters(paths)
    found = []
    for path, own in zip(paths, matched, strict=True):
        owners = {numbers[f"{root}/{path.inside}"] for root in roots.get(path.tree, ())}
        found.append(owners.pop() if len(owners) == 1 else own)
    deepest = max(depths, default=math.inf)
    parameters = [path for path in paths if path.depth <= deepest]
    for n, name in enumerate(names):
        if not any(number == n and path.depth <= deepest for path, number in zip(paths, found, strict=True)):
            raise _matches_nothing(name, names, parameters)
    return found


def _trees_of_parameters(paths: Sequence[LeafPath]) -> tuple[set[int], dict[str, list[str]]]:
    """The trees of parameters that each tree of optimizer states is like, and in how many named tuples they are.

    They are in as few named tuples as any tree that has all paths of the states, and in fewer than the states.
    """
    levels: dict[int, list[str]] = {}
    trees: dict[tuple[str, int], list[str]] = {}
    for path in paths:
        levels.setdefault(path.depth, []).append("/" + path.text)
        if path.inside:
            trees.setdefault((path.tree, path.depth), []).append("/" + path.inside)
    depths, found = set[int](), dict[str, list[str]]()
    for (tree, depth), ends in trees.items():
        for level in sorted(level for level in levels if level < depth):
            if roots := _roots(ends, levels[level]):
                found[tree] = roots
                depths.add(level)
                break
    return depths, found


def _roots(ends: Sequence[str], parameters: Sequence[str]) -> list[str]:
    """The paths of trees of parameters in which all the paths `ends` occur."""
    known = set(parameters)
    roots = [path.removesuffix(ends[0]) for path in parameters if path.endswith(ends[0])]
    return [root for root in roots if all(root + end in known for end in ends)]


def _matches_nothing(name: str, names: Sequence[str], parameters: Sequence[LeafPath]) -> ShardingError:
    before = names[: names.index(name)]
    taken = [n for path in parameters if matches(name, path.text) for n in before if matches(n, path.text)]
    if taken:
        return ShardingError(
            f"group {name!r} is left without parameters: the group {taken[0]!r} before it matches the same "
            "paths, and the first match counts; put the narrower name first"
        )
    shown = [path.text for path in parameters]
    more = f" and {len(shown) - _LISTED} more" if len(shown) > _LISTED else ""
    return ShardingError(
        f"group {name!r} matches no path of a parameter: {', '.join(shown[:_LISTED])}{more}; a name is parts of a path "
        "joined by slashes, such as 'embedding', 'layers/*norm'"
    )
