"""The pass protocol and the manager that runs passes at their stage."""

from __future__ import annotations

import enum
from typing import Any, Protocol

from dhelix.passes.hlo import HloModule


class Stage(enum.Enum):
    """When a pass runs; members stand in the order in which a program goes through them."""

    LOWERED = "lowered"
    PRE_SCHEDULER = "pre-scheduler"
    POST_SCHEDULER = "post-scheduler"


class PassContext:
    """What a pass may know and say while it runs."""

    def __init__(self, strict: bool = False):
        self.strict = strict
        self.notes: list[dict[str, Any]] = []

    def note(self, message: str, instruction: object = None, **facts: Any) -> None:
        """Records what was done or left alone; `facts` are JSON-able values."""
        name = None if instruction is None else str(getattr(instruction, "name", instruction))
        self.notes.append({"message": message, "instruction": name, "facts": facts})


class Pass(Protocol):
    """A pass is a frozen dataclass of options."""

    @property
    def name(self) -> str:
        """Kebab-case name, a class attribute."""
        ...

    @property
    def stage(self) -> Stage: ...

    def run(self, module: HloModule, context: PassContext) -> bool:
        """Edits `module` in place and says whether it changed; raises PassRefusal to leave it alone."""
        ...
