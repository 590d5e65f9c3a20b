"""What XLA has noted of an instruction: its `backend_config`."""

import json
from functools import lru_cache
from typing import Any

from dhelix.passes.hlo import Instruction


def backend_config(instruction: Instruction) -> dict[str, Any]:
    """A `backend_config` that is a JSON object; anything else reads as empty. Not to be changed."""
    return _parse(instruction.proto.backend_config)


@lru_cache(maxsize=4096)
def _parse(config: bytes) -> dict[str, Any]:
    try:
        found = json.loads(config) if config[:1] == b"{" else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
