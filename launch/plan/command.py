"""`dhelix plan`: decides without a GPU which operators of the two strands run together, and under which launch setting.

    dhelix plan --preset llama-8b --layers 8 --mesh tp=4 --microbatches 16 --out plan.json --picture plan.png

The step is compiled for GPUs that this machine need not have, with recorded autotuner results of these GPUs. The
profile says how long operators and pairs of operators take. The command makes at least one plan for each launch
setting. It shows and writes the plan with the shortest predicted step. docs/guide/plan.md explains how to read, edit
and use a plan.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from absl import flags, logging
from rich.console import Console

from dhelix.errors import DhelixError
from dhelix.launch.defaults import DEFAULT_GPU, NO_EFFECT
from dhelix.launch.inspect.reading import dumps
from dhelix.launch.inspect.reading.dumps import Memory
from dhelix.launch.plan import bounds as plan_bounds
from dhelix.launch.plan import measured as plan_measured
from dhelix.launch.plan import picture as plan_picture
from dhelix.launch.plan import program as plan_step
from dhelix.launch.plan import tables as plan_tables
from dhelix.launch.plan.program import Program
from dhelix.launch.plan.search import Candidate, MemoryLimit, OverLimitError, played, search, with_room
from dhelix.launch.plan.tables import PlanView
from dhelix.launch.profile import step as profile_step
from dhelix.launch.shown.progress import Progress, say
from dhelix.launch.train import step_flags, trainer
from dhelix.passes.communication import exchange, row_partition
from dhelix.passes.communication.row_partition import RowPartition
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.evaluation.step_parts import step_parts
from dhelix.passes.framework.gain import Gain
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.exact import order as exact
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import CollectivesSection
from dhelix.profiles.estimates import alike
from dhelix.profiles.files import storage
from dhelix.profiles.hardware import describe
from dhelix.profiles.profile import SETTINGS, Profile, Provenance
from dhelix.runtime.compiler import deviceless, memory_need
from dhelix.runtime.step.options import StepOptions

_ORDERING = ("dp", "list")  # schedules that order two strands
_AGAIN = 2  # a plan that needs more memory than allowed is made again at most this many times


def run(values: flags.FlagValues, arguments: list[str]) -> int:
    """Makes a plan; with --trace, shows the measured times of a plan. Returns the exit status.

    Raises DhelixError if the command fails.
    """
    chosen = values.flag_values_dict()
    console = Console(stderr=chosen["json"], width=None if sys.stdout.isatty() else 144, highlight=False)
    if chosen["trace"]:
        _check_measured(chosen, arguments)
        plan_measured.run(arguments[0], chosen["trace"], chosen["out"], chosen["json"], console)
        _say_written(console, chosen["out"])
        return 0
    _check(chosen, arguments)
    deviceless.prepare_environment()
    jax.config.update("jax_platforms", "cpu")
    if not chosen["verbose"]:
        logging.set_verbosity(logging.ERROR)  # warnings would repeat the headline and the table
    with dumps.blaming(dumps.find_module(arguments[0])) if arguments else contextlib.nullcontext():
        view = _make(chosen, arguments, console)
    if chosen["out"]:
        plan_files.save(plan_step.with_states(view.best.plan, step_flags.options(chosen)), chosen["out"])
    if chosen["picture"]:
        plan_picture.save_png(plan_picture.picture(view.best, view.plain, view.gain), chosen["picture"])
    if not chosen["json"]:
        plan_tables.print_view(view, console, chosen["top"])
    _say_written(console, chosen["out"], chosen["picture"])
    if chosen["bound"]:  # bounds take longest, so the plan is shown and written before them
        view = replace(view, bounds=_bounds(view.best, console))
        for line in plan_bounds.in_words(view.bounds, view.best.seconds) if not chosen["json"] else ():
            say(console, line)
    if chosen["json"]:
        print(json.dumps(view.to_json(), indent=1))
    return 0


def _bounds(best: Candidate, console: Console) -> tuple[plan_bounds.BodyBound, ...]:
    total, found = len(best.plan.bodies), list[plan_bounds.BodyBound]()
    say(console, f"Bounding the orders of {total} bodies; each may take minutes.")
    with Progress(console, 0, total, "bound") as progress:
        for body in plan_bounds.bounds(best):
            found.append(body)
            progress.update(len(found), body.name)
    return tuple(found)


def _say_written(console: Console, *names: str | None) -> None:
    for name in filter(None, names):
        say(console, f"wrote {name}")


def _check_measured(chosen: dict[str, Any], arguments: list[str]) -> None:
    if len(arguments) != 1 or chosen["preset"]:
        raise DhelixError("--trace reads a trace of a plan that ran: use dhelix plan PLAN --trace DIR, without a step")
    if chosen["picture"]:
        raise DhelixError("--trace shows measured times and draws nothing; leave out --picture")


def _check(chosen: dict[str, Any], arguments: list[str]) -> None:
    if len(arguments) + bool(chosen["preset"]) != 1:
        raise DhelixError("give one step: --preset NAME, or a dump (a file or folder of --xla_dump_to)")
    if arguments and Path(arguments[0]).suffix == ".json":
        raise DhelixError(f"{arguments[0]} is a plan, not a dump: add --trace DIR, or give a step to plan")
    if arguments and chosen["skew"]:
        raise DhelixError(
            "a dump is already compiled, so its strands cannot be shifted; leave out --skew, or plan a --preset"
        )
    if not all(number.isdecimal() for number in chosen["skew"]):
        raise DhelixError(f"--skew {','.join(chosen['skew'])}: give numbers of layers, such as 0,2")
    if chosen["pp"] > 1 and any(map(int, chosen["skew"])):
        raise DhelixError("a pipeline pairs micro-batches by its own schedule; leave out --pp or --skew")
    if chosen["schedule"] not in (None, *_ORDERING):
        raise DhelixError(f"--schedule {chosen['schedule']} makes no plan; use one of {', '.join(_ORDERING)}")
    _order_options(chosen)
    if chosen["bound"]:
        exact.solver()
    if chosen["picture"] and Path(chosen["picture"]).suffix != ".png":
        raise DhelixError(
            f"--picture {chosen['picture']}: pictures of plans are PNG files; give a name that ends in .png"
        )
    unknown = [name for name in chosen["settings"] if name not in SETTINGS]
    if unknown:
        raise DhelixError(f"--settings {','.join(unknown)} is unknown; choose from {', '.join(SETTINGS)}")


def _make(chosen: dict[str, Any], arguments: list[str], console: Console) -> PlanView:
    options = None if arguments else step_flags.options(chosen)
    dump = plan_step.of_dump(arguments[0], chosen["hardware"]) if arguments else None
    gpu = dump.hardware if dump else chosen["hardware"] or DEFAULT_GPU
    if dump:
        for note in dump.notes:
            say(console, f"{dump.name}: {note}.")
    gpus = profile_step.gpus_of_options(options) if options else dump.gpus if dump else 0
    if options and gpus == 1:
        raise DhelixError(
            "a step on one GPU has no communication to hide: give more GPUs with --mesh, or a dump of a step on several"
        )
    models = _models(chosen, gpu, _gpus_per_node(chosen, gpus), console)
    if options is None:
        assert dump is not None  # _check requires one
        plain, programs = None, [(model, dump) for model in models]
    else:
        said = f"Compiling and planning {options.preset} without a GPU takes about a minute"
        say(console, f"{said}, and several with experts, pipelines or more than one launch setting.")
        skews = list(dict.fromkeys(map(int, chosen["skew"]))) or [0]
        compiled = functools.partial(plan_step.of_preset, target=profile_step.target_of(gpu))
        with _Work(console, 1 + len(skews)) as work:
            plain = work.do("the plain step is compiled", compiled, replace(options, plain=True))
            wholes = [
                work.do(f"both strands are compiled{_apart(skew)}", compiled, options, skew=skew, like=plain)
                for skew in skews
            ]
        programs = [pair for whole in wholes for pair in _with_alternatives(options, whole, models, console)]
    asked = _order_options(chosen)

    def planned(limit: MemoryLimit) -> tuple[list[Candidate], Candidate, Memory | None]:
        with _Work(console, len(programs) + (options is not None)) as work:
            find = functools.partial(search, options=asked, limit=limit)
            candidates = _candidates(programs, find, work, console)
            if options is None:
                best = min(candidates, key=Candidate.rank)
                return candidates, best, best.program.memory
            of_setting = {model.setting: model for model in models}

            def again(candidate: Candidate, closer: MemoryLimit) -> Candidate:
                return find(candidate.program, of_setting[candidate.plan.target.setting], limit=closer)

            return _confirmed(candidates, again, options, limit, work, console)

    usual, room = MemoryLimit.of(asked.most_bytes, plain), memory_need.room(describe(gpu))
    (candidates, best, memory), limit = with_room(planned, usual, room, functools.partial(say, console))
    plain_seconds = None if plain is None else {m.setting: played(plain, m) for m in models}
    gain = _gain(best, plain or best.program, {model.setting: model for model in models})
    if chosen["inter_bandwidth"] and not gain.after.assumed:
        say(console, NO_EFFECT)
    return PlanView(best, tuple(candidates), gain, plain, plain_seconds, memory, limit)


def _order_options(chosen: dict[str, Any]) -> StepOptions:
    """The options of the step that concern the order of operators. Raises DhelixError if a value is invalid."""
    names = ("schedule", "memory_limit", "max_in_flight")
    return StepOptions(**{name: chosen[name] for name in names if chosen[name] is not None})


def _gain(best: Candidate, before: Program, models: Mapping[str, CostModel]) -> Gain:
    """How much faster the best candidate is than the program `before`. Each is predicted in its own order."""
    costs = models[best.plan.target.setting].costs()
    return Gain(
        step_parts(HloModule.from_bytes(before.module), costs),
        step_parts(best.module, best.costs, played=best.timeline),
    )


def _candidates(
    programs: Sequence[tuple[CostModel, Program]],
    find: Callable[[Program, CostModel], Candidate],
    work: _Work,
    console: Console,
) -> list[Candidate]:
    """The plans that `find` makes for `programs`. Programs that have no plan within the memory limit are left out.

    Raises:
      OverLimitError: no program has a plan within the limit. The error names the smallest sufficient limit.
    """
    found: list[Candidate] = []
    refused: list[OverLimitError] = []
    for model, program in programs:
        try:
            found.append(work.do(f"{model.setting} is planned{_apart(program.skew)}", find, program, model))
        except OverLimitError as error:
            refused.append(error)
    if not found:
        raise min(refused, key=lambda error: error.needed)
    for error in refused:
        say(console, f"Left out: {error}.")
    return found


def _confirmed(
    candidates: Sequence[Candidate],
    again: Callable[[Candidate, MemoryLimit], Candidate],
    options: trainer.Options,
    limit: MemoryLimit,
    work: _Work,
    console: Console,
) -> tuple[list[Candidate], Candidate, Memory]:
    """Compiles the step with each plan, the fastest plan first, until a compiled step keeps within the memory limit.

    In a plan's order, the compiler may leave larger gaps between buffers than in XLA's order. A plan that exceeds the
    limit because of these gaps is made again (by `again`), at most twice. The new search allows for gaps of this size.

    Returns:
      All candidates, where a plan that was made again replaces the original; the chosen candidate; its memory.

    Raises:
      OverLimitError: no plan keeps within the limit. The error names the smallest sufficient limit.
    """
    waiting: list[tuple[Candidate, tuple[MemoryLimit, ...]]] = [(candidate, (limit,)) for candidate in candidates]
    refused: list[OverLimitError] = []
    given: list[Candidate] = []  # over the limit, and given up
    while waiting:
        candidate, limits = waiting.pop(min(range(len(waiting)), key=lambda n: waiting[n][0].rank()))
        target = candidate.program.target
        memory = work.do("the plan is compiled", plan_step.confirmed, options, candidate.plan, target)
        if limit.bytes is None or memory.peak <= limit.bytes:
            best = candidate.with_memory(memory)
            return [*given, best, *(other for other, _ in waiting)], best, memory
        refused.append(OverLimitError(candidate.program, limit, memory.peak))
        if len(limits) <= _AGAIN:
            closer = limits[-1].with_gaps_of(candidate, memory)
            with contextlib.suppress(OverLimitError):
                waiting.append((work.do("planned again, with less", again, candidate, closer), (*limits, closer)))
                continue
        given.append(candidate)
        say(console, f"Left out, {candidate.plan.target.setting}: {refused[-1]}.")
    raise min(refused, key=lambda error: error.needed)


def _with_alternatives(
    options: trainer.Options, whole: Program, models: Sequence[CostModel], console: Console
) -> list[tuple[CostModel, Program]]:
    """Pairs of a cost model and a program: each model with `whole`, and with forms of the step that may be faster.

    A form differs from `whole` in one or more of these ways:

    - Some collectives are replaced by collectives of another kind.
    - Each chain from an all-gather to a reduce-scatter is computed in parts of the rows.
    - Gradients are reduced at the end of the step instead of layer by layer.
    """
    wanted = [(model, other) for model in models for other in _alternatives(whole, model)]
    programs = {whole.collectives: whole}
    compiled = functools.partial(plan_step.of_preset, options, target=whole.target, skew=whole.skew, like=whole)
    others = [other for other in dict.fromkeys(other for _, other in wanted) if other not in programs]
    with _Work(console, len(others)) as work:
        for other in others:
            exchanged = [f"{exchange.in_words(other.decomposed)} decomposed"] if other.decomposed else []
            parts = [f"{other.row_parts} row parts"] if other.row_parts else []
            stacks = ["gradients reduced at the end"] if other.reduced < whole.collectives.reduced else []
            told = " and ".join([*exchanged, *parts, *stacks])
            programs[other] = work.do(f"both strands are compiled{_apart(whole.skew)} with {told}", compiled, other)
    return [(model, programs[other]) for model, other in wanted]


def _alternatives(whole: Program, model: CostModel) -> list[CollectivesSection]:
    """The forms of the step to try with a cost model. The first form is the step as it is."""
    faster = exchange.faster(HloModule.from_bytes(whole.module), model)
    pays = whole.before is not None and row_partition.pays(HloModule.from_bytes(whole.before), model)
    found = itertools.product(dict.fromkeys([(), faster]), (0, RowPartition.parts) if pays else (0,))
    reduced = range(whole.collectives.reduced, -1, -1)
    return [CollectivesSection(keys, parts, by_layer) for keys, parts in found for by_layer in reduced]


def _apart(skew: int) -> str:
    return f", {skew} layer{'s' * (skew > 1)} apart" if skew else ""


def _gpus_per_node(chosen: dict[str, Any], gpus: int) -> int:
    """Number of GPUs per node for a step on `gpus` GPUs; 0 stands for the usual number."""
    per_node = chosen["gpus_per_node"] or (gpus // 2 if chosen["link"] == "two-nodes" else 0)
    if per_node and gpus > per_node and gpus % per_node:
        raise DhelixError(f"{gpus} GPUs do not fill nodes of {per_node}: change --gpus_per_node or --mesh")
    return per_node


def _models(chosen: dict[str, Any], gpu: str, gpus_per_node: int, console: Console) -> list[CostModel]:
    """A cost model for each launch setting in --settings, or for each setting of the profile."""
    profile = _profile(chosen, gpu)
    wanted = chosen["settings"] or [name for name in SETTINGS if name in profile.sections]
    if line := alike.told(profile, wanted):
        say(console, line)
    for line in storage.differences(profile, Provenance("", 0, jax=jax.__version__)):
        say(console, f"{line}.")
    network = 1e9 * (chosen["inter_bandwidth"] or 0.0)
    return [
        CostModel(profile, name, gpus_per_node=gpus_per_node, inter_bandwidth=network) for name in dict.fromkeys(wanted)
    ]


def _profile(chosen: dict[str, Any], gpu: str) -> Profile:
    if chosen["profile"]:
        found = storage.load(chosen["profile"])
        if found.hardware.lower() != gpu.lower():
            raise DhelixError(
                f"{chosen['profile']} is a profile of {found.hardware}, but the step is for {gpu}: give --hardware or "
                "another profile"
            )
        return found
    found = storage.find(gpu, chosen["link"])
    if found is None:
        raise DhelixError(
            f"no profile of {gpu} with link {chosen['link']}: run `dhelix profile` on such GPUs, give --profile, or use"
            f" one of {', '.join(storage.shipped())}"
        )
    return found


class _Work:
    """Runs long tasks one after the other and shows the progress."""

    def __init__(self, console: Console, total: int) -> None:
        self._progress, self._done = Progress(console, 0, total, "plan"), 0

    def __enter__(self) -> _Work:
        self._progress.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.__exit__()

    def do[**P, T](self, words: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function`, then shows `words`, and returns the result of the function."""
        result = function(*args, **kwargs)
        self._done += 1
        self._progress.update(self._done, words)
        return result
