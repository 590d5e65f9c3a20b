"""The flag `--json` of commands that print JSON, or write it to a file: `--json`, `--json FILE`, `--json=FILE`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from absl import flags

from dhelix.errors import DhelixError
from dhelix.runtime.processes.stdout import to_stderr


def define_json(values: flags.FlagValues) -> None:
    """Defines the flag `--json` on `values`. It is a switch, but may also name a file."""
    words = "print everything as JSON; --json=FILE writes it to that file"
    flag = flags.Flag(flags.ArgumentParser(), flags.ArgumentSerializer(), "json", None, words)
    flag.boolean = True  # so absl accepts the flag without a value
    flags.DEFINE_flag(flag, values)


def target(value: str | None, arguments: list[str], command: str) -> str | None:
    """Where JSON is written: nowhere (None), to stdout ("-"), or to a file.

    In `--json FILE`, absl takes FILE for a positional argument, so it is looked for in `arguments`.

    Raises:
      DhelixError: there is a positional argument that is not such a file.
    """
    if value == "true" and len(arguments) == 1:
        return arguments[0]
    if arguments:
        raise DhelixError(f"{arguments[0]!r} is not a flag; see `dhelix {command} --help`")
    return {"true": "-", "false": None}.get(value or "false", value)


def write(path: str, text: str) -> None:
    """Writes a text file. Raises DhelixError if it cannot be written."""
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise DhelixError(f"cannot write {path} ({error.strerror}); give a file in a folder that exists") from None


@contextlib.contextmanager
def alone(wanted: bool) -> Iterator[Callable[[str], None]]:
    """Keeps stdout for JSON, if `wanted`. Within the context, all else that is printed to stdout goes to stderr.

    Yields:
      A function that prints a text on stdout.
    """
    with to_stderr() if wanted else contextlib.nullcontext() as kept:

        def write(text: str) -> None:
            if kept is None:
                print(text)
                return
            with os.fdopen(os.dup(kept), "w") as stdout:
                print(text, file=stdout)

        yield write
