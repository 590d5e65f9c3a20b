"""Errors of dhelix. Each message is one line that says what is wrong and what to do about it."""

from __future__ import annotations


class DhelixError(ValueError):
    """Base of every error that a user of dhelix is meant to read."""


class UnknownPassError(DhelixError):
    """A pass was asked for by a name that no pass of the list has."""


class HostsDisagreeError(DhelixError):
    """Hosts would run different programs and deadlock in their collectives."""


class PassRefusal(DhelixError):
    """A pass met something it does not understand; the module stays as it was.

    Attributes:
      reason: one line, the same for every module it applies to (it is the key for "say it once").
      instruction: name of the HLO instruction that caused it, or None.
      place: that instruction itself, where it is at hand.
      facts: values for the report, such as a limit that would do.
    """

    def __init__(self, reason: str, instruction: object = None, **facts: int):
        """`instruction` is an instruction of the module view or its name."""
        self.reason = reason
        self.facts = facts
        self.place = instruction
        self.instruction = None if instruction is None else str(getattr(instruction, "name", instruction))
        super().__init__(reason if self.instruction is None else f"{reason} (at {self.instruction})")
