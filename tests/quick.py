"""Of a test's cases, those that `make test` runs; `make test-slow` runs the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but[T](quick: Collection[T], cases: Iterable[T]) -> list[Any]:
    """`cases` for `pytest.mark.parametrize` with one argument, all but `quick` marked as slow."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def slow_after(count: int, cases: Iterable[Any], several: bool = False) -> list[Any]:
    """`cases` for `pytest.mark.parametrize`, all but the first `count` marked as slow.

    A case is a value, or a `pytest.param`. With `several` it is a tuple of values for several arguments.
    """
    listed = list(cases)
    return [*listed[:count], *(_slow(case, several) for case in listed[count:])]


def _slow(case: Any, several: bool) -> Any:
    if isinstance(case, type(pytest.param(0))):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    return pytest.param(*(case if several else (case,)), marks=pytest.mark.slow)
