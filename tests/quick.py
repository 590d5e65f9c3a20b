"""Of a test's cases, those that `make test` runs; `make test-slow` runs the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but[T](quick: Collection[T], cases: Iterable[T]) -> list[Any]:
    """`cases` for `pytest.mark.parametrize` with one argument, all but `quick` marked as slow."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
