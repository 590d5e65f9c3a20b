"""`@strand_interleave`: a train step whose micro-batches run as two strands.

    @strand_interleave(donate_argnums=0)                    # the step has a loop over micro-batches, or
    @strand_interleave(microbatches=16, donate_argnums=0)   # it calls dhelix.value_and_grad
    def train_step(state, batch): ...

It stands in place of `jax.jit`. For each kind of arguments (told apart as by `jax.jit`: shapes, types,
shardings, static values, configuration) the step is lowered, its HLO goes through the LOWERED passes, and the
result is compiled; on GPUs the compiler calls the passes of the later stages. Where no pass changes anything,
the step is what `jax.jit` makes of it, and a line in the log says why; so too on one device. With
DHELIX=off in the environment it is `jax.jit(train_step)` altogether: no pass, no splitting of the batch.

Nothing here touches a device before the first call: `jax.distributed.initialize()` works after decoration.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import os
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path
from typing import Any, overload

import jax
from jax.core import Tracer

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat
from dhelix.passes.manager import Pass, Stage, say_once
from dhelix.passes.plans.pairing_plan import PairingPlan
from dhelix.passes.report import Report
from dhelix.profiles.collective_matmul import Form
from dhelix.profiles.profile import Profile
from dhelix.runtime import registration
from dhelix.runtime.launch_settings import calls_outside_graphs
from dhelix.runtime.pipeline.fold import Fold
from dhelix.runtime.processes.first_run import FirstRun, decorating
from dhelix.runtime.profiling import in_process
from dhelix.runtime.profiling.session import Progress
from dhelix.runtime.step import verification
from dhelix.runtime.step.collective_matmul_pass import OFF
from dhelix.runtime.step.microbatch_loop import check_reduction
from dhelix.runtime.step.schedules import AUTO, DEFAULT, Choice, collective_matmul_of
from dhelix.runtime.step.specialization import Specialization
from dhelix.runtime.step.value_and_grad import Microbatching, microbatching

_JIT_OPTIONS = frozenset(inspect.signature(jax.jit).parameters) - {"fun"}


@overload
def strand_interleave(function: Callable[..., Any], /, **options: Any) -> InterleavedStep: ...
@overload
def strand_interleave(**options: Any) -> Callable[[Callable[..., Any]], InterleavedStep]: ...
@decorating()
def strand_interleave(
    function: Callable[..., Any] | None = None,
    /,
    *,
    microbatches: int | None = None,
    reduce: str = "mean",
    schedule: str = DEFAULT,
    profile: str | Path | Profile | None = AUTO,
    plan: str | Path | PairingPlan | None = None,
    memory_limit: int | None = None,
    max_in_flight: int | None = None,
    skew: int = 0,
    pipeline: Fold | None = None,
    collective_matmul: str | Form | None = None,
    strict: bool = False,
    verify: bool = False,
    passes: Sequence[Pass] | None = None,
    disable: Collection[str] = (),
    dump_to: str | Path | None = None,
    **jit_options: Any,
) -> Any:
    """Decorates a train step, plain or already jitted.

    Args:
      function: the step.
      microbatches: into how many micro-batches `dhelix.value_and_grad` splits its batch. None: the step has a
        loop over micro-batches of its own, which is used as it stands.
      reduce: how losses and gradients of micro-batches combine: "mean", "sum", "weighted".
      schedule: which strands run together, and in which order on GPUs; one of `schedules.SCHEDULES`.
      profile: where costs come from: "auto", the profile of the GPUs that the step is lowered for, shipped or the
        user's own, and where there is none a roofline; the path of one, or a `Profile`; None, the roofline.
      plan: of `dhelix plan`, its path or itself: orders as it says, in place of `schedule`. Where it does not fit the
        step, XLA's order stays, and a line in the log says why; `strict` raises.
      memory_limit: bytes that the step may need beside its arguments on each GPU; by default ("dp", "list" and plans)
        3 % more than the plain step, arguments and all, for which XLA schedules that, too (`runtime/memory_need.py`).
        Where no order keeps to it the plain step runs, and a line says which limit would do.
      max_in_flight: how many collectives of one lane may be between their start and their end; None: as many as are
        fastest.
      skew: how many layers the strands are apart. First and last layers of the step then run beside another micro-batch
        too, which pays where communication is slow and micro-batches are few, and so many more layers' residuals are
        alive; takes at least 3 micro-batches (`passes/strands/strand_skew.py`).
      pipeline: stages that `dhelix.value_and_grad` sends the micro-batches through; needs `microbatches`, a model that
        is a scan over layers, and a state that `Fold.fold` has folded (docs/pipeline.md).
      collective_matmul: what stands in place of collectives beside matrix products, on GPUs: "off", they stay; "auto",
        the form that was measured to be the fastest on these GPUs, if any is faster, and with strands where the step is
        predicted to be faster by it; or a form for all that can have it, such as "ring" or "hybrid:4"
        (docs/collective_matmul.md). CUDA graphs hold no custom calls of the step then; one that is jitted already
        takes kernels only if XLA_FLAGS say so. None: "auto" with schedule="intra_batch", else "off".
      strict: raise where the step would be left alone.
      verify: at the first call with arguments of a kind, compare with the plain step, on copies of the
        arguments (`runtime.step.verification`).
      passes: what to run in place of `schedules.default_passes(schedule)`.
      disable: names of passes not to run.
      dump_to: folder for the HLO before and after each pass.
      jit_options: of `jax.jit`: donate_argnums, static_argnames, in_shardings, ... Not for a jitted function,
        which keeps its own.

    Returns:
      An `InterleavedStep`, or without `function` a decorator that makes one.
    """
    if function is None:
        return functools.partial(
            strand_interleave, microbatches=microbatches, reduce=reduce, schedule=schedule, profile=profile,
            plan=plan, memory_limit=memory_limit, max_in_flight=max_in_flight, skew=skew, pipeline=pipeline,
            collective_matmul=collective_matmul, strict=strict, verify=verify, passes=passes, disable=disable,
            dump_to=dump_to, **jit_options,
        )  # fmt: skip
    _check_options(function, microbatches, reduce, jit_options)
    collective_matmul = collective_matmul_of(collective_matmul, schedule, plan, passes)
    if collective_matmul != OFF and not jax_compat.is_jitted(function):
        given = jit_options.get("compiler_options") or {}
        jit_options["compiler_options"] = {**calls_outside_graphs(os.environ), **given}
    if pipeline is not None:
        _check_pipeline(pipeline, microbatches, schedule, verify)
    choice = Choice.of(
        schedule, profile, plan, memory_limit, max_in_flight, passes, disable=disable, strict=strict, dump_to=dump_to,
        compiler_options=jit_options.get("compiler_options"), pipelined=pipeline is not None,
        collective_matmul=collective_matmul, skew=skew,
    )  # fmt: skip
    even_on_one_device = strict or passes is not None
    return InterleavedStep(function, microbatches, reduce, choice, verify, jit_options, even_on_one_device, pipeline)


_numbers = itertools.count(1)  # of steps


class InterleavedStep:
    """A train step to call in place of the function that it wraps."""

    __name__: str

    def __init__(
        self,
        function: Callable[..., Any],
        microbatches: int | None,
        reduce: str,
        choice: Choice,
        verify: bool,
        jit_options: dict[str, Any],
        even_on_one_device: bool = False,
        pipeline: Fold | None = None,
    ):
        functools.update_wrapper(self, function)
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._number = next(_numbers)
        self._choice = dataclasses.replace(choice, step=f"{self.__name__} {self._number}")
        self._manager = choice.manager()  # of no program yet; what it refuses is said at decoration
        self._verify = verify
        self._even_on_one_device = even_on_one_device
        self._microbatches = microbatches
        self._reduce = reduce
        self._function = function
        self._jit_options = jit_options
        self._pipeline = pipeline
        if microbatches is not None:
            self._jitted = self._jit_traced(microbatches)
        else:
            self._jitted = function if jax_compat.is_jitted(function) else jax.jit(function, **jit_options)
        self._static_numbers, self._static_names = jax_compat.static_arguments(self._jitted)
        self._hosts = FirstRun(self.__name__, self._options(choice))
        self._splits = False  # whether it is known to call value_and_grad
        self._specializations: dict[Hashable, Specialization] = {}
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            if _on():
                reason = "is called inside another transformation of JAX, and becomes part of it as it is"
                say_once(f"{self.__name__} {reason}; decorate the outermost step", (self.__name__, reason))
            return self._jitted(*args, **kwargs)
        with self._hosts.taking_part(_on, self._jitted, args, kwargs) as on:
            chosen = self._specialize(args, kwargs) if on else None
            if chosen is not None:
                chosen.compile()
        if chosen is None:
            return self._jitted(*args, **kwargs)
        if self._verify and not chosen.verified:
            self._compare(chosen, args, kwargs)
            chosen.verified = True
        return self._call(chosen, args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The transformed program before XLA; `jax.ShapeDtypeStruct`s do for arguments, as with `jax.jit`."""
        if not _on():
            return self._jitted.lower(*args, **kwargs)
        return self._specialize(args, kwargs).lowered

    def plan(self, *args: Any, **kwargs: Any) -> Report:
        """What the passes decide for these arguments, without compiling: the LOWERED stage."""
        return self._specialize(args, kwargs).plan() if _on() else self._report_off()

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """What the passes did, all stages; compiles the step for these arguments if that has not happened."""
        with self._hosts.taking_part(_on, self._jitted, args, kwargs) as on:
            return self._specialize(args, kwargs).report() if on else self._report_off()

    def profile(
        self,
        *args: Any,
        out: str | Path | None = None,
        link: str | None = None,
        pairs: bool = True,
        again: bool = False,
        progress: Progress | bool = True,
        **kwargs: Any,
    ) -> Profile:
        """Measures what the step costs on the job's GPUs, as far as the profile's file does not say.

        The operators of the step as it runs here, after its passes, are measured alone and, where it matters, two at
        once, under the launch setting that this process was started with. Every batch of results goes into the file;
        interrupted, the next call goes on. The arguments are not used up. All processes of a job call it together.

        Args:
          args, kwargs: those of the step; `jax.ShapeDtypeStruct`s do, and take no memory. With arrays the step is
            traced, too, whose times count more than those of operators run alone.
          out: the profile's file; by default the one that `dhelix profile` writes.
          link: "nvlink" or "no-p2p"; by default what NCCL_P2P_DISABLE says.
          pairs: False measures operators alone.
          again: measures what is known, too.
          progress: called with how many are done, of how many, and what comes next; True: lines in the log.

        Returns:
          What the file holds.

        Raises:
          DhelixError: no GPU, a process whose launch setting no profile describes, or a file of other hardware.
          HostsDisagreeError: processes that have not the same to measure.
        """
        process = in_process.this_process(link, self._jit_options.get("compiler_options"))
        lowered, compiled = self._compiled(args, kwargs)
        _, arguments = self._separate(args, kwargs)
        return in_process.profile(process, lowered, compiled, arguments, out, pairs, again, progress)

    def _compiled(self, args: Any, kwargs: Any) -> tuple[jax.stages.Lowered, Any]:
        """The program that a call with these arguments runs, before and after XLA."""
        with self._hosts.taking_part(_on, self._jitted, args, kwargs) as on:
            if not on:
                lowered = self._jitted.lower(*args, **kwargs)
                return lowered, lowered.compile()
            chosen = self._specialize(args, kwargs)
            compiled = chosen.compile() or chosen.original.compile()
            return chosen.lowered, compiled  # in this order: what does not compile is left alone

    def _options(self, choice: Choice) -> dict[str, object]:
        """What was asked for, as other processes must have been asked, too."""
        asked = {field.name: getattr(choice, field.name) for field in dataclasses.fields(choice)}
        for name in ("dump_to", "compiler_options", "paired", "pipelined", "step"):  # a host's own, or said otherwise
            del asked[name]
        more = {"microbatches": self._microbatches, "reduce": self._reduce, "pipeline": self._pipeline}
        return {**more, **asked, "verify": self._verify}

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As a method of a class, like a function."""
        return self if instance is None else _BoundStep(self, instance)

    def _report_off(self) -> Report:
        name = f"jit_{self.__name__}"
        return Report(name, "", (self._manager.not_run(Stage.LOWERED, name, _OFF),))

    def _jit_traced(self, microbatches: int, results: bool = False) -> Any:
        """The function jitted with its batch split; with `results`, returns what value_and_grad returned."""

        @functools.wraps(self._function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with microbatching(microbatches, self._reduce, self._pipeline, self._number) as active:
                output = self._function(*args, **kwargs)
            self._check_used(active)
            if results and len(active.results) < max(active.calls, 1):
                reason = (
                    "verify= compares micro-batches with the whole batch only where the step itself calls"
                    " dhelix.value_and_grad, not inside of a shard_map, jax.jit or scan: that part is left out"
                )
                say_once(f"{self.__name__}: {reason}", (self.__name__, reason))
            return active.results if results else output

        dropped = {"donate_argnums", "donate_argnames", "out_shardings"} if results else set()
        return jax.jit(traced, **{k: v for k, v in self._jit_options.items() if k not in dropped})

    def _check_used(self, active: Microbatching) -> None:
        self._splits |= active.calls > 0
        if self._splits:  # or did so in a function that JAX has traced for this step before
            return
        reason = "microbatches= has no effect: the step does not call dhelix.value_and_grad"
        if self._choice.strict:
            raise DhelixError(reason)
        say_once(f"{self.__name__}: {reason}", (self.__name__, reason))

    def _specialize(self, args: Any, kwargs: Any) -> Specialization:
        key = self._key(args, kwargs)
        with self._lock:
            if key is not None and key in self._specializations:
                return self._specializations[key]
            lowered = self._jitted.lower(*args, **kwargs)
            same = ("program", jax_compat.program_key(lowered))
            if same not in self._specializations:
                self._specializations[same] = Specialization(
                    self.__name__, self._choice, lowered, self._even_on_one_device
                )
            if key is not None:
                self._specializations[key] = self._specializations[same]
            return self._specializations[same]

    def _call(self, chosen: Specialization, args: Any, kwargs: Any) -> Any:
        compiled = chosen.compile()
        if compiled is None:
            return self._jitted(*args, **kwargs)
        _, (args, kwargs) = self._separate(args, kwargs)
        return compiled(*args, **kwargs)

    def _key(self, args: Any, kwargs: Any) -> Hashable | None:
        """What `jax.jit` tells programs apart by; None if an argument is none that it takes."""
        static, dynamic = self._separate(args, kwargs)
        leaves, treedef = jax.tree.flatten(dynamic)
        try:
            key = (jax_compat.trace_context(), static, treedef, tuple(map(_leaf_key, leaves)))
            hash(key)
            return key
        except TypeError:  # jax.jit explains it better when it lowers
            return None

    def _separate(self, args: Any, kwargs: Any) -> tuple[Hashable, Any]:
        """Static arguments, and the others."""
        if not self._static_numbers and not self._static_names:
            return (), (args, kwargs)
        numbers = {number % len(args) for number in self._static_numbers if -len(args) <= number < len(args)}
        static = (
            tuple((i, type(args[i]), args[i]) for i in sorted(numbers)),
            tuple((k, type(kwargs[k]), kwargs[k]) for k in sorted(kwargs) if k in self._static_names),
        )
        dynamic = (
            tuple(arg for i, arg in enumerate(args) if i not in numbers),
            {k: v for k, v in kwargs.items() if k not in self._static_names},
        )
        return static, dynamic

    def _compare(self, chosen: Specialization, args: Any, kwargs: Any) -> None:
        """Raises VerificationError unless the step computes what the plain one does, and says what was compared."""
        lines = []
        if (changed := chosen.compile()) is not None:
            plain = jax_compat.apart(chosen.original).compile()
            _, (dynamic, keywords) = self._separate(args, kwargs)
            passes = ", ".join(entry.name for entry in chosen.report() if entry.changed)
            found = verification.check_passes(plain, changed, chosen.original, dynamic, keywords, passes)
            lines.append(f"all {found.leaves} results are those of the plain step: {found}")
        if self._microbatches is not None:
            whole, split = (self._jit_traced(count, results=True) for count in (1, self._microbatches))
            found = verification.check_microbatches(
                whole, split, chosen.original, args, kwargs, self._microbatches, self._reduce
            )
            if found is not None:
                lines.append(f"losses and gradients ({found.leaves} leaves) are those of the whole batch: {found}")
            whole.clear_cache()  # JAX would keep its executable
        text = ". ".join(lines) or "nothing was compared, since the step runs as it is"
        say_once(f"{self.__name__}, verified: {text}", (self._choice.step, text))


class _BoundStep:
    """A decorated method of one object: as the step, with the object as its first argument."""

    def __init__(self, step: InterleavedStep, instance: object) -> None:
        functools.update_wrapper(self, step)
        self._step, self._instance = step, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(self._instance, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self._step.lower(self._instance, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Report:
        return self._step.plan(self._instance, *args, **kwargs)

    def report(self, *args: Any, **kwargs: Any) -> Report:
        return self._step.report(self._instance, *args, **kwargs)

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        return self._step.profile(self._instance, *args, **kwargs)


_OFF = "DHELIX=off, jax.disable_jit, jax_debug_nans or jax_debug_infs"


def _on() -> bool:
    """Where JAX looks for NaNs it runs a step again, operation by operation; it can do so of its own programs alone."""
    config = jax.config
    return registration.enabled() and not (config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs)


def _leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, jax.Array):
        return leaf.aval, leaf.sharding, leaf.committed
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return type(leaf), jax.typeof(leaf)


def _check_pipeline(pipeline: Fold, microbatches: int | None, schedule: str, verify: bool) -> None:
    if not isinstance(pipeline, Fold):
        raise DhelixError(f"pipeline={pipeline!r}: give a dhelix.Fold(stages=...)")
    if microbatches is None:
        raise DhelixError("pipeline= needs microbatches=: how many go through the stages in one step")
    if schedule in ("forward_forward", "backward_backward", "intra_batch"):
        raise DhelixError(f"schedule={schedule!r} has no pipeline: take dp, list, xla or round_robin")
    if verify:
        raise DhelixError(
            "verify= compares with the step without strands, and with pipeline= there is none: compare a few steps with"
            " those of an unfolded state, as docs/pipeline.md shows"
        )


def _check_options(
    function: Callable[..., Any], microbatches: int | None, reduce: str, jit_options: dict[str, Any]
) -> None:
    name = getattr(function, "__name__", repr(function))
    if not callable(function):
        raise DhelixError(f"strand_interleave decorates a function, not {type(function).__name__}")
    if microbatches is not None and (not isinstance(microbatches, int) or microbatches < 1):
        raise DhelixError(f"microbatches={microbatches!r}: give how many, 1 or more, or None for the step's own loop")
    check_reduction(reduce)
    for option in sorted(set(jit_options) - _JIT_OPTIONS):
        raise DhelixError(f"{option!r} is an option of neither strand_interleave nor jax.jit")
    if jax_compat.is_jitted(function):
        if jit_options:
            raise DhelixError(f"{name} is jitted already: give {', '.join(sorted(jit_options))} to that jax.jit")
        if microbatches is not None:
            raise DhelixError(
                f"{name} is jitted already, and may be traced: decorate the plain function with"
                " strand_interleave(microbatches=...), which takes the options of jax.jit"
            )
    elif isinstance(function, InterleavedStep):
        raise DhelixError(f"{name} is interleaved already: leave out one of the two strand_interleave around it")
    elif hasattr(function, "lower"):
        raise DhelixError(
            f"{name} is a {type(function).__name__}, not a plain function: decorate the function itself; with"
            " Flax NNX split the state and pass it (nnx.split, nnx.merge)"
        )
