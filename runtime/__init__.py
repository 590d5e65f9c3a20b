"""What runs in the user's process: the decorator, the compiler hook, agreement between hosts, profiling, pipelines."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """`dhelix.runtime.deviceless`, the name that `dhelix.deviceless` had in version 0.1."""
    if name != "deviceless":
        raise AttributeError(f"module 'dhelix.runtime' has no attribute {name!r}")
    return importlib.import_module("dhelix.runtime.compiler.deviceless")
