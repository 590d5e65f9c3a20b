"""Code that runs in the user's process: decorator, compiler hook, agreement between hosts, profiling, pipelines."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Keeps `dhelix.runtime.deviceless` working, the name of `dhelix.deviceless` in version 0.1."""
    if name != "deviceless":
        raise AttributeError(f"module 'dhelix.runtime' has no attribute {name!r}")
    return importlib.import_module("dhelix.runtime.compiler.deviceless")
