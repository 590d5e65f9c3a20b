"""The errors of dhelix. Each message is one line that says what is wrong and how to fix it."""

from __future__ import annotations


class DhelixError(ValueError):
    """Base class of all errors whose message is meant for the user."""


class UnknownPassError(DhelixError):
    """The user named a pass that is not in the list of passes."""


class HostsDisagreeError(DhelixError):
    """The hosts of a job would run different programs and deadlock in their collectives."""


class PassRefusal(DhelixError):
    """A pass found something that it does not support, so the module stays unchanged.

    Attributes:
      reason: one line, identical for every module it applies to, because each reason is logged only once.
      instruction: name of the HLO instruction that caused the refusal, or None.
      place: the `instruction` argument as it was given: the instruction itself, its name, or None.
      facts: values for the report, such as a memory limit that would suffice.
    """

    def __init__(self, reason: str, instruction: object = None, **facts: int):
        """`instruction`: an instruction of the HLO module, or its name."""
        self.reason = reason
        self.facts = facts
        self.place = instruction
        self.instruction = None if instruction is None else str(getattr(instruction, "name", instruction))
        super().__init__(reason if self.instruction is None else f"{reason} (at {self.instruction})")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, with the error's type unless it is ours. Compiler errors can be very long."""
    text = next(filter(None, map(str.strip, str(error).splitlines())), "no reason given")
    return text if isinstance(error, DhelixError) else f"{type(error).__name__}: {text}"
