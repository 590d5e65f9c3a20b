"""The program `dhelix`: one command line, with one folder per subcommand. Each folder provides two modules:

    flags.py      USAGE: str, which `dhelix <command> --help` prints above the flags
                  define_flags(values: flags.FlagValues) -> None, which defines flags on `values`, not on absl's FLAGS
                  split(values, arguments) -> (own arguments, a program with its arguments), if it runs one
                  check(values, arguments) -> None, if a wrong path can be told at once; raises DhelixError
    command.py    run(values: flags.FlagValues, arguments: list[str]) -> int | None, with the positional `arguments`

Both modules are imported only when their command is called. `flags.py` is imported first, so `--help` and the error
about a mistyped flag or path need no JAX. To add a command, make the folder and add a line to COMMANDS.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NoReturn

from absl import app, flags, logging

from dhelix.errors import DhelixError
from dhelix.launch.defaults import INTERRUPTED


@dataclass(frozen=True)
class Command:
    """A subcommand. If `needs_device` is False, JAX does not look for accelerators, unless `device_flag` is given.

    The processes that such a command starts do not look for them, either.
    """

    summary: str
    needs_device: bool = True
    device_flag: str = ""
    folder: str = ""  # if it has another name than the command


COMMANDS = {
    "run": Command("run a training program that nobody decorated, with its steps as interleaved strands"),
    "launch": Command("start a program as a job of several processes, or as one of a scheduler's", folder="hosts"),
    "train": Command("train a language model, plain or with interleaved strands"),
    "profile": Command("measure what one train step's operators and collectives cost"),
    "plan": Command("plan without a GPU which operators of the two strands run together", needs_device=False),
    "fold": Command("show the layout and schedule of a pipeline, and what they cost", needs_device=False),
    "shard": Command("choose over how many GPUs model states are sharded", False, "--live"),
    "simulate": Command("simulate a step on a cluster that need not exist: time, memory, what limits it", False),
    "tune": Command("tune how NCCL runs each collective of a train step, on this machine's GPUs"),
    "flags": Command(
        "environment variables and flags for a job, and what is wrong with those it has",
        False,
        folder="hosts.variables",
    ),
    "inspect": Command(
        "show what hides each collective of a compiled step, and what stays exposed", needs_device=False
    ),
}

_TRAIN = ("flax", "grain", "optax", "orbax", "safetensors", "tensorboardX", "tokenizers")
_EXTRAS = dict.fromkeys(_TRAIN, "train") | {"ortools": "plan"}
"""For each package that only some commands need, the extra of dhelix that installs the package."""

_PYTHON_WORDS = (
    (r"invalid literal for int\(\) with base \d+: (.*)", r"\1 is not a whole number"),
    (r"could not convert string to float: (.*)", r"\1 is not a number"),
    (r"\('Non-boolean argument to boolean flag', (.*)\)", r"\1 is neither true nor false"),
)
_LIST = "COMMA SEPARATED LIST OF STRINGS"
_OVERVIEW = """\
dhelix hides the communication of distributed training behind its computation.

usage: dhelix COMMAND [arguments] [flags]

commands:
{commands}

`dhelix COMMAND --help` explains a command; `dhelix --version` shows the versions."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `dhelix` and exits the process.

    The exit status is 0 after success, 2 after a wrong command line, and 130 after an interruption. It is 1 if the work
    failed; then one line on stderr says why.

    Args:
      arguments: command-line arguments; default: `sys.argv[1:]`.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if len(arguments) == 2 and arguments[0] == "help":
        arguments = [arguments[1], "--help"]
    if arguments == ["--version"]:
        print(", ".join(f"{name} {_version(name)}" for name in ("dhelix", "jax", "jaxlib")))
        sys.exit(0)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        sys.exit(0 if arguments else 2)
    name, *rest = arguments
    if name not in COMMANDS:
        _fail(f"there is no command {name!r}; the commands are {', '.join(COMMANDS)}", status=2)
    if not COMMANDS[name].needs_device and COMMANDS[name].device_flag not in rest:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before importing jax: do not search for accelerators
    folder = COMMANDS[name].folder or name
    defined = importlib.import_module(f"dhelix.launch.{folder}.flags")
    values, positional = _parse(name, defined, rest)
    if hasattr(defined, "check"):  # before the imports of the command, which take seconds
        try:
            defined.check(values, positional)
        except DhelixError as error:
            _fail(_one_line(error), name)
    try:
        module = importlib.import_module(f"dhelix.launch.{folder}.command")
    except ModuleNotFoundError as error:
        _lacks(error, name)
    app.run(lambda _: _run(name, module, values, positional), argv=["dhelix"], flags_parser=_no_global_flags)


def _parse(name: str, module: ModuleType, arguments: list[str]) -> tuple[flags.FlagValues, list[str]]:
    values = flags.FlagValues()
    flags.DEFINE_bool("help", False, "show this help", short_name="h", flag_values=values)
    more = "also show what each pass did, and more log lines on stderr"
    flags.DEFINE_bool("verbose", False, more, short_name="v", flag_values=values)
    module.define_flags(values)
    program: list[str] = []
    if hasattr(module, "split"):  # what follows is another program's, so it is not parsed
        arguments, program = module.split(values, arguments)
    try:
        positional = [*values(["dhelix", *map(_with_underscores, arguments)])[1:], *program]
    except flags.Error as error:
        _fail(f"{_plain_words(_one_line(error))}; see `dhelix {name} --help`", name, status=2)
    if values["help"].value:
        try:
            print(f"{module.USAGE.strip()}\n\nflags:\n{_flag_help(values)}", flush=True)
        except BrokenPipeError:
            _no_reader()
        sys.exit(0)
    return values, positional


def _run(name: str, module: ModuleType, values: flags.FlagValues, positional: list[str]) -> int | None:
    logging.set_verbosity(logging.DEBUG if values["verbose"].value else logging.WARNING)
    try:
        return module.run(values, positional)
    except DhelixError as error:
        _fail(_one_line(error), name)
    except ModuleNotFoundError as error:
        _lacks(error, name)
    except BrokenPipeError:
        _no_reader()
    except KeyboardInterrupt:
        _fail("interrupted", name, status=INTERRUPTED)


def _lacks(error: ModuleNotFoundError, name: str) -> None:
    """Names the extra that installs a missing package. Raises `error` if none does."""
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        raise error
    _fail(f"needs the package {package}: pip install 'dhelix[{_EXTRAS[package]}]'", name)


def _no_reader() -> NoReturn:
    """Exits silently, because nobody reads stdout any more, as after `| head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's last flush succeeds
    sys.exit(1)


def _no_global_flags(argv: Sequence[str]) -> list[str]:
    """Flag parser for absl's `app.run`. Global flags that libraries have defined keep their defaults."""
    flags.FLAGS.mark_as_parsed()
    return list(argv)


def _fail(message: str, name: str = "", status: int = 1) -> None:
    print(f"dhelix {name}".strip() + f": {message}", file=sys.stderr)
    sys.exit(status)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _with_underscores(argument: str) -> str:
    """An argument whose flag is spelled as absl spells it: `--gpus-per-node=8` becomes `--gpus_per_node=8`."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def _plain_words(message: str) -> str:
    """The message, with Python's conversion errors in plain words. absl passes these errors on unchanged."""
    for pattern, words in _PYTHON_WORDS:
        message = re.sub(pattern, words, message)
    return message


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"


def _overview() -> str:
    width = max(map(len, COMMANDS))
    return _OVERVIEW.format(commands="\n".join(f"  {n:{width}}  {c.summary}" for n, c in COMMANDS.items()))


def _flag_help(values: flags.FlagValues) -> str:
    lines = []
    for name in dict.fromkeys(values[key].name for key in values):
        flag = values[name]
        choices = getattr(flag.parser, "enum_values", None)
        kind = "|".join(choices) if choices else flag.flag_type().upper().replace(_LIST, "A,B")
        spelled = f"--[no]{name}" if flag.boolean else f"--{name}={kind}"
        spelled = f"-{flag.short_name}, {spelled}" if flag.short_name else spelled
        default = ",".join(flag.default) if isinstance(flag.default, list) else flag.default
        shown = "" if flag.boolean or default in (None, "") else f" (default: {default})"
        words = flag.help.removeprefix(f"<{kind}>: ")  # absl repeats the choices in the help text
        indent = " " * 6
        text = textwrap.fill(
            f"{words}{shown}", 100, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
        lines.append(f"  {spelled}\n{text}")
    return "\n".join(lines)
