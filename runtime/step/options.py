"""Defines the options of a step, from which the decorator's keywords and the commands' flags follow.

    options = StepOptions(schedule="list", max_in_flight=2, donate_argnums=0)

To add an option, add a field to `StepOptions` with its type, default and description. If commands have a flag for the
option, add a help text, too. The keywords of `strand_interleave`, their types and `help`, and the flags of
`dhelix train` follow from the field. A pass with a field of the same name receives the option's value
(`pass_lists.py`).

This module does not import jax, because `dhelix train --help` imports this module.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, get_args, overload

from dhelix.errors import DhelixError
from dhelix.passes import pipeline_fold
from dhelix.passes.framework.units import parse_bytes

if TYPE_CHECKING:
    from dhelix.passes.plans.plan import Plan
    from dhelix.passes.sharding.factors import Factors
    from dhelix.profiles.collective_matmul.sites import Form
    from dhelix.profiles.profile import Profile
    from dhelix.runtime.pipeline.fold import Fold
    from dhelix.runtime.planning.live_plan import PlannedStates
    from dhelix.runtime.sharding.state_plan import StatePlan
    from dhelix.runtime.step.interleaved_step import InterleavedStep

Reduce = Literal["mean", "sum", "weighted"]
Schedule = Literal["dp", "list", "xla", "intra_batch"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
REDUCTIONS: tuple[Reduce, ...] = get_args(Reduce)
AUTO = "auto"
OFF = "off"
_WHOLE = {  # whole numbers: the smallest value, and what to give
    "microbatches": (1, "a whole number of at least 1, or None for the step's own loop"),
    "max_in_flight": (1, "a whole number of collectives of at least 1, or None for what is fastest"),
    "skew": (0, "a whole number of layers of at least 0"),
}
_LIMITED = ("dp", "list")
_SKEWED = ("dp", "list", "xla")


@dataclass(frozen=True)
class Flag:
    """The command-line flag of an option.

    Attributes:
      help: the help text, one line.
      least: the smallest allowed value, if the option is a whole number; None for other options.
      choices: the allowed values; empty if any value is allowed.
    """

    help: str
    least: int | None = None
    choices: Sequence[str] = ()


def _flag(default: Any, *flag: Any, **flags: Any) -> Any:
    """Returns a dataclass field for an option that has a `Flag` on the command line."""
    return dataclasses.field(default=default, metadata={"flag": Flag(*flag, **flags)})


class _NotGiven:
    def __repr__(self) -> str:
        return "not given"


_NOT_GIVEN: Any = _NotGiven()


@dataclass(frozen=True, kw_only=True)
class JitOptions:
    """Options of `jax.jit`. If an option is not given, the default of `jax.jit` applies."""

    in_shardings: Any = _NOT_GIVEN
    out_shardings: Any = _NOT_GIVEN
    static_argnums: int | Sequence[int] | None = _NOT_GIVEN
    static_argnames: str | Iterable[str] | None = _NOT_GIVEN
    donate_argnums: int | Sequence[int] | None = _NOT_GIVEN
    donate_argnames: str | Iterable[str] | None = _NOT_GIVEN
    keep_unused: bool = _NOT_GIVEN
    device: Any = _NOT_GIVEN
    backend: str | None = _NOT_GIVEN
    inline: Any = _NOT_GIVEN
    compiler_options: dict[str, Any] | None = _NOT_GIVEN

    @property
    def jit(self) -> dict[str, Any]:
        """The options that were given, as keywords for `jax.jit`."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(JitOptions)}
        return {name: value for name, value in given.items() if value is not _NOT_GIVEN}

    @property
    def xla(self) -> Mapping[str, Any] | None:
        """The XLA options with which the step is compiled; None if none are given."""
        return self.jit.get("compiler_options")


@dataclass(frozen=True, kw_only=True)
class StepOptions(JitOptions):
    """The options of an interleaved step.

    What is interleaved
        microbatches: number of micro-batches into which `dhelix.value_and_grad` splits its batch. None: the step's own
            loop over micro-batches is used unchanged.
        reduce: how losses and gradients of micro-batches combine: "mean", "sum" or "weighted".
        pipeline: the pipeline (`Fold`) through which `dhelix.value_and_grad` sends the micro-batches. It needs
            `microbatches`, a model that scans over its layers, and a state folded by `Fold.fold`
            (docs/guide/pipeline.md).
        sharding: how model states are sharded over data-parallel devices: a strategy such as "zero1", a plan file of
            `dhelix shard`, or what `dhelix.sharding_plan` or `dhelix.plan_sharding` returns. The step then takes and
            returns states that `dhelix.shard_state` has placed (docs/guide/sharding.md). None: states are as the
            arguments are.
        skew: number of layers by which the strands are apart. The first and last layers of the step then also overlap
            with another micro-batch. This makes a step faster if communication is slow and micro-batches are few. The
            residuals of `skew` more layers stay alive. At least 3 micro-batches are needed
            (`passes/strands/strand_skew.py`).

    Order and costs
        schedule: how operators are ordered on GPUs. "dp" pairs both strands by dynamic programming (DHelix section
            4.2). "list" schedules collectives by list scheduling. "xla" leaves the order of both strands to XLA.
            "intra_batch" orders a single micro-batch without strands.
        plan: a plan of `dhelix plan`, `dhelix shard` or `dhelix tune`, or its path. The plan's order replaces
            `schedule`. If the plan does not fit the step, XLA's order stays and a line in the log says why. With
            `strict`, this is an error. The plan's factors of model states stand for `sharding`, and its settings of
            collectives for `tuning`.
        tuning: settings of collectives under NCCL: a plan of `dhelix tune`, or its path. If they do not fit the step or
            the machine, NCCL's defaults stay and a line in the log says why (docs/guide/tuning.md).
        profile: source of operator costs: "auto", a profile's path, a `Profile`, or None. "auto" is the shipped or the
            user's own profile of the GPUs that the step is lowered for. If there is no such profile, or with None,
            costs come from a roofline model.
        collective_matmul: what replaces a collective next to a matrix product on GPUs: "off", "auto", a form, or None.
            With "off", all collectives stay. "auto" takes the fastest form measured on these GPUs, if it is faster than
            the collective. With strands, it takes the form only if the step is also predicted to be faster. A form,
            such as "ring" or "hybrid:4", replaces all collectives that can have it (docs/guide/collective_matmul.md).
            None means "auto" with schedule="intra_batch", and "off" otherwise. Unless the value is "off", dhelix keeps
            custom calls out of the step's CUDA graphs. For a step that is already jitted, XLA_FLAGS must keep them out;
            otherwise no kernels are used.

    Limits
        memory_limit: memory that the step may need on each GPU, arguments included, in bytes or as text such as
            "60GiB". With None, the limit for "dp", "list" and plans is the plain step's total memory plus 3 %. For a
            plan, it is at least the limit with which the plan was made. If no order fits, but two strands need at most
            half of the GPU's memory, they run, and a line in the log says so. Otherwise the plain step runs, and a line
            names the smallest sufficient limit. To find the plain step's memory, XLA schedules the plain step, too.
            Other schedules have no limit by default.
        max_in_flight: largest number of collectives of one lane that may be in flight at once. A lane is a CUDA stream
            for communication. With None, the passes choose the number for which the step is fastest.

    Debugging
        strict: whether dhelix raises an error instead of leaving the step alone, that is, running it as `jax.jit`
            would. With `strict`, the step is interleaved even if it is predicted to be slower.
        verify: whether the first call with arguments of a kind compares the results of the step with the results of the
            plain step (`runtime/step/verification.py`). The comparison uses copies of the arguments.
        passes: passes that replace the passes of the schedule (`runtime/step/pass_lists.py`).
        disable: names of passes that do not run.
        dump_to: folder to which the HLO before and after each pass is written.

    Options of `jax.jit`
        donate_argnums, static_argnames, in_shardings, ... They are not allowed for a function that is already jitted,
            because it has options of its own.

    Raises DhelixError for invalid values and for options that do not fit together.
    """

    microbatches: int | None = None
    reduce: Reduce = "mean"
    pipeline: Fold | None = None
    sharding: StatePlan | PlannedStates | Factors | str | Path | None = None
    skew: int = _flag(
        0,
        "layers by which the strands are apart, so that the step's first and last layers also overlap (default: 0)",
        0,
    )

    schedule: Schedule = _flag("dp", "how operators are ordered on GPUs (default: dp)", choices=SCHEDULES)
    plan: str | Path | Plan | None = _flag(
        None, "plan file of `dhelix plan`, `shard` or `tune`: order, states and settings of collectives (default: none)"
    )
    tuning: str | Path | Plan | None = _flag(
        None, "plan file of `dhelix tune` with settings of collectives under NCCL (default: those of --plan)"
    )
    profile: str | Path | Profile | None = _flag(
        AUTO, "profile file with operator costs (default: a shipped profile or your own)"
    )
    collective_matmul: str | Form | None = _flag(
        None,
        "replace collectives next to matrix products: auto, off or a form (default: auto with --schedule "
        "intra_batch, else off)",
    )

    memory_limit: int | str | None = _flag(
        None,
        "memory that the step may need on each GPU, arguments included, such as 60GiB (default: the plain step's plus "
        "3 %)",
    )
    max_in_flight: int | None = _flag(
        None, "largest number of collectives of one lane in flight at once (default: what is fastest)", 1
    )

    strict: bool = False
    verify: bool = _flag(False, "compare the results of the first step with those of the plain step")
    # The type is Any instead of `manager.Pass`, because type checkers reject passes whose `name` is a class attribute.
    passes: Sequence[Any] | None = None
    disable: Collection[str] = ()
    dump_to: str | Path | None = None

    def __post_init__(self) -> None:
        if self.schedule in pipeline_fold.SCHEDULES:
            raise DhelixError(
                f"schedule={self.schedule!r} is a pipeline's: give it to pipeline=dhelix.Fold(..., schedule=...)"
            )
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("reduce", self.reduce, REDUCTIONS)
        for name, (least, wanted) in _WHOLE.items():
            object.__setattr__(self, name, _whole(name, getattr(self, name), least, wanted))
        for name in ("strict", "verify"):
            if not isinstance(value := getattr(self, name), bool):
                raise DhelixError(f"{name}={value!r}: give True or False")
        for name in ("plan", "tuning"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (str, Path)) and not hasattr(value, "leaves_program"):
                raise DhelixError(f"{name}={value!r}: give a plan's path, or what dhelix.passes.plans loads from it")
        _check_lists(self.passes, self.disable)
        if self.memory_limit is not None:
            object.__setattr__(self, "memory_limit", parse_bytes("memory_limit", self.memory_limit))
        _check_together(self)

    @property
    def most_bytes(self) -> int | None:
        """The option `memory_limit` in bytes; None if it is not given."""
        assert not isinstance(self.memory_limit, str)  # converted by `__post_init__`
        return self.memory_limit

    @property
    def loaded_plan(self) -> Plan:
        """The option `plan`. It must be given, and its file must have been read."""
        assert self.plan is not None and not isinstance(self.plan, (str, Path))
        return self.plan

    @property
    def loaded_tuning(self) -> Plan:
        """The option `tuning`. It must be given, and its file must have been read."""
        assert self.tuning is not None and not isinstance(self.tuning, (str, Path))
        return self.tuning

    @property
    def orders_by_plan(self) -> bool:
        """Whether `plan` is known to decide the order. A file that was not read yet may only shard states."""
        return self.plan is not None and not isinstance(self.plan, (str, Path)) and not self.plan.leaves_program

    @property
    def limited(self) -> bool:
        """Whether the plain step's memory plus 3 % is the limit if `memory_limit` is not given."""
        return self.passes is None and (self.plan is not None or self.schedule in _LIMITED)

    @property
    def insists(self) -> bool:
        """Whether the user's options ask for passes that must run even if the step is predicted to be slower."""
        return self.strict or any(given is not None for given in (self.passes, self.plan, self.tuning))

    @property
    def matmuls(self) -> str | Form:
        """The effective value of `collective_matmul`: the user's value if it is given, else the schedule's default.

        The default is "auto" for schedule="intra_batch" without plan or passes, and "off" otherwise.
        """
        if self.collective_matmul is not None:
            return self.collective_matmul
        alone = self.schedule == "intra_batch" and self.plan is None and self.passes is None
        return AUTO if alone else OFF

    def but(self, **changes: Any) -> StepOptions:
        return dataclasses.replace(self, **changes)


def one_of(name: str, value: object, known: Sequence[str]) -> None:
    """Raises DhelixError unless `value` is in `known`. `name` is the option's name in the message."""
    if value not in known:
        raise DhelixError(f"{name}={value!r} is unknown; use one of {', '.join(known)}")


def _whole(name: str, value: object, least: int, wanted: str) -> int | None:
    """`value` as an int, also if it is a NumPy integer."""
    if value is None:
        return None
    if not isinstance(value, Integral) or int(value) < least:
        raise DhelixError(f"{name}={value!r}: give {wanted}")
    return int(value)


def _check_lists(passes: object, disable: object) -> None:
    """Raises DhelixError unless `passes` holds passes and `disable` holds names."""
    if passes is not None and not (
        isinstance(passes, Sequence) and all(hasattr(one, "stage") and hasattr(one, "run") for one in passes)
    ):
        raise DhelixError(f"passes={passes!r}: give a list of passes, each with name, stage and run()")
    if not (isinstance(disable, Collection) and all(isinstance(name, str) for name in disable)):
        raise DhelixError(f"disable={disable!r}: give names of passes, such as ('strand-pairing',)")


def _check_together(options: StepOptions) -> None:
    """Raises DhelixError if an option has no effect because of another option."""
    given = {name for name in _WITH_PASSES if getattr(options, name) != getattr(StepOptions, name)}
    if not options.orders_by_plan:
        given.discard("plan")
    if options.passes is not None:
        for name, instead in _WITH_PASSES.items():
            if name in given and getattr(options, name) != OFF:
                raise DhelixError(f"only the passes in passes= run, so {name}= has no effect: {instead}")
    if options.orders_by_plan:
        if "max_in_flight" in given:
            raise DhelixError(
                "a plan already limits collectives in flight: leave out max_in_flight=, or make the plan with "
                "--max_in_flight"
            )
        if "skew" in given:
            raise DhelixError("a plan already sets the skew of strands: leave out skew=, or make the plan with --skew")
    elif options.plan is None and options.schedule == "xla":
        for name in ("memory_limit", "max_in_flight"):
            if name in given:
                raise DhelixError(f"schedule='xla' cannot keep to {name}: leave it out, or use another schedule")
    if "skew" in given and options.pipeline is not None:
        raise DhelixError("a pipeline pairs micro-batches by its own schedule: leave out skew=")
    if "skew" in given and options.schedule not in _SKEWED:
        said = f"schedule={options.schedule!r} has no skew: leave out skew=, or use schedule {', '.join(_SKEWED)}"
        raise DhelixError(said)


_WITH_PASSES = {
    "plan": "leave out plan= or passes=, or add PlannedOrder to passes=",
    "memory_limit": "give it to a pass in passes=",
    "collective_matmul": "add its passes to passes=",
    "max_in_flight": "give it to a pass in passes=",
    "skew": "add StrandSkew and StrandEnds to passes=",
}


def flags() -> dict[str, Flag]:
    """Returns the command-line flags by option name."""
    return {field.name: field.metadata["flag"] for field in dataclasses.fields(StepOptions) if field.metadata}


class Decorator(Protocol):
    """The type of a decorator that turns a function into an `InterleavedStep` with the same signature."""

    def __call__[**P, R](self, function: Callable[P, R], /) -> InterleavedStep[P, R]: ...


class StrandInterleave[**O](Protocol):
    """The type of `strand_interleave` for type checkers. `O` stands for the options of a step."""

    @overload
    def __call__[**P, R](
        self, function: Callable[P, R], /, *args: O.args, **options: O.kwargs
    ) -> InterleavedStep[P, R]: ...
    @overload
    def __call__(self, *args: O.args, **options: O.kwargs) -> Decorator: ...


def with_options_of[**O](options: Callable[O, StepOptions]) -> Callable[[Callable[..., Any]], StrandInterleave[O]]:
    """Returns a decorator that gives a function the keywords of `options`, for type checkers and for `help`.

    It also replaces `  <options>` in the function's docstring by the docstring of `options`. The summary line of that
    docstring, and its part that begins with "Raises", are left out.
    """

    def of(function: Callable[..., Any]) -> StrandInterleave[O]:
        own = inspect.signature(function)
        first = next(iter(own.parameters.values()))
        of_jit = {field.name for field in dataclasses.fields(JitOptions)}
        keywords = sorted(inspect.signature(options).parameters.values(), key=lambda p: p.name in of_jit)  # ours first
        function.__signature__ = own.replace(parameters=[first, *keywords])  # pyright: ignore[reportFunctionMemberAccess]
        said = inspect.cleandoc(options.__doc__ or "").partition("\n\n")[2].partition("\n\nRaises")[0]
        function.__doc__ = inspect.cleandoc(function.__doc__ or "").replace("  <options>", textwrap.indent(said, "  "))
        return cast("StrandInterleave[O]", function)

    return of
