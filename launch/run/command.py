"""`dhelix run`: runs a training program that nobody decorated.

    dhelix run train.py --steps 100

This process becomes the program (`exec`), so the program's exit code, signals and traceback are its own. What lives in
it is `launch/run/site/sitecustomize.py`, which Python imports at its start, and `runtime/undecorated/`. Both find what
to do in the environment, so children and launchers inherit it.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from absl import flags

from dhelix.errors import DhelixError
from dhelix.launch.train import step_flags
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.undecorated.policy import VARIABLE, Policy, of_file

_SITE = Path(__file__).parent / "site"


def run(values: flags.FlagValues, arguments: list[str]) -> int:
    """Becomes the program; returns only with --env. Raises DhelixError if the command line is wrong."""
    chosen = values.flag_values_dict()
    if chosen["verbose"]:
        raise DhelixError("--verbose shows passes, which the report sums up; leave it out, or decorate the step")
    policy = policy_of(chosen)
    if chosen["env"]:
        if arguments:
            raise DhelixError(f"--env runs nothing: leave out {arguments[0]}, and start it with the printed variables")
        for name, value in environment(policy, os.environ).items():
            print(f"export {name}={shlex.quote(value)}")
        return 0
    if not arguments:
        raise DhelixError("give a program: a script, or -m and a module; see `dhelix run --help`")
    if arguments[0] == "-m" and len(arguments) == 1:
        raise DhelixError("-m needs the name of a module")
    sys.stdout.flush()
    sys.stderr.flush()
    policy = replace(policy, process=os.getpid())  # the program keeps this number
    os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, **environment(policy, os.environ)})


def policy_of(chosen: Mapping[str, Any]) -> Policy:
    """The policy that the flags describe. Flags override the file of --options.

    Raises DhelixError if an option is invalid or a file cannot be read, so that this shows before the program starts.
    """
    file = {} if chosen["options"] is None else of_file(chosen["options"])
    policy = Policy(
        tuple(chosen["only"] or file.get("only", ())),
        tuple(chosen["skip"] or file.get("skip", ())),
        {**file.get("options", {}), **step_flags.given(chosen)},
        file.get("functions", {}),
        "" if chosen["report"] is None else str(Path(chosen["report"]).absolute()),
        chosen["quiet"],
    )
    return checked(policy)


def checked(policy: Policy) -> Policy:
    """`policy`. Raises DhelixError if its options do not fit together, or a plan that they name cannot be read."""
    for given in (policy.options, *({**policy.options, **own} for own in policy.functions.values())):
        options = StepOptions(**given)
        for plan in filter(None, (options.plan, options.tuning)):
            from dhelix.passes.plans import plan_files  # takes a second, which only plans pay for

            plan_files.load(str(plan))
    return policy


def environment(policy: Policy, before: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a Python process looks at its programs."""
    paths = [str(_SITE), *filter(None, before.get("PYTHONPATH", "").split(os.pathsep))]
    return {VARIABLE: policy.dumps(), "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
