"""Reads an instruction's `backend_config`, in which XLA notes its decisions."""

import json
from functools import lru_cache
from typing import Any

from dhelix.passes.hlo import Instruction


def backend_config(instruction: Instruction) -> dict[str, Any]:
    """The `backend_config` if it is a JSON object, else {}. The result is cached, so the caller must not change it."""
    return _parse(instruction.proto.backend_config)


@lru_cache(maxsize=4096)
def _parse(config: bytes) -> dict[str, Any]:
    try:
        found = json.loads(config) if config[:1] == b"{" else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
