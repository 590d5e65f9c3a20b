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

_LISTED = 8  # paths in an error


def matches(name: str, path: str) -> bool:
    """Whether a name matches a path."""
    wanted, parts = name.split("/"), path.split("/")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(fnmatch.fnmatchcase, parts[n:], wanted)) for n in starts)


def group_numbers(names: Sequence[str], paths: Sequence[Any]) -> list[int | None]:
    """The number of the first name that matches each path; None if none does.

    Args:
      names: names as in `matches`.
      paths: paths of arrays, as `jax.tree_util.tree_leaves_with_path` returns them.

    Raises:
      ShardingError: a name matches no path, or only paths that an earlier name matches.
    """
    texts = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    found = [next((n for n, name in enumerate(names) if matches(name, text)), None) for text in texts]
    for n, name in enumerate(names):
        if n in found:
            continue
        if taken := [other for text, other in zip(texts, found, strict=True) if matches(name, text)]:
            raise ShardingError(
                f"group {name!r} is left without parameters: the group {names[taken[0] or 0]!r} before it matches the "
                "same paths, and the first match counts; put the narrower name first"
            )
        listed = sorted(texts, key=len)[:_LISTED]
        more = f" and {len(texts) - len(listed)} more" if len(texts) > len(listed) else ""
        raise ShardingError(
            f"group {name!r} matches no path of the state: {', '.join(listed)}{more}; a name is parts of a path joined "
            "by slashes, such as 'embedding', 'layers/*norm'"
        )
    return found
