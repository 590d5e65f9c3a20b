"""Begins to look at the programs of a process: at once, or as soon as the process imports jax.

`when_jax_is_imported` also serves what else of dhelix lives in a process that it did not write (`runtime/launched`).

A process that never imports jax, such as one that loads data, pays nothing. If something is wrong, the user's program
runs as without dhelix, and one line says what. This module does not import jax.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from dhelix.errors import DhelixError

_NEEDED = ("dhelix.passes.jax_compat", "dhelix.runtime.undecorated.catch")
"""Modules that the catcher needs, and that import jax."""


def now() -> None:
    """Begins at once, with the policy of the environment."""
    from dhelix.runtime.undecorated import catch, policy

    try:
        catch.install(policy.loads(os.environ.get(policy.VARIABLE, "")))
    except DhelixError as error:
        print(f"dhelix run: {error}", file=sys.stderr)


def when_jax_is_imported(then: Callable[[], None] = now) -> None:
    """Calls `then` right after this process has imported jax.

    If dhelix itself imports jax, its modules are not whole yet. Then the call comes at the next import after they are.
    """
    if "jax" in sys.modules:
        _when_whole(then)
    else:
        sys.meta_path.insert(0, _Finder(lambda: _when_whole(then)))


def _when_whole(then: Callable[[], None]) -> None:
    if _half_imported():
        sys.meta_path.insert(0, _Later(then))
    else:
        then()


def _half_imported() -> bool:
    specs = (getattr(sys.modules.get(name), "__spec__", None) for name in _NEEDED)
    return any(getattr(spec, "_initializing", False) for spec in specs)


class _Later(importlib.abc.MetaPathFinder):
    """Finds nothing, and calls a function at the first import after the needed modules are whole."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if self in sys.meta_path and not _half_imported():
            sys.meta_path.remove(self)
            self._then()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds jax as the other finders do, and calls a function once it is imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("jax")
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = original
            original(module)
            self._then()

        loader.exec_module = exec_module
        return spec
