"""Code that runs in the user's process: decorator, compiler hook, agreement between hosts, profiling, pipelines."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Returns `dhelix.deviceless` for its old name, `dhelix.runtime.deviceless`. Version 0.1 used the old name."""
    if name != "deviceless":
        raise AttributeError(f"module 'dhelix.runtime' has no attribute {name!r}")
    return importlib.import_module("dhelix.runtime.compiler.deviceless")
