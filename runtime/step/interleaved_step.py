"""Defines the step that `@strand_interleave` makes in place of the user's function.

Arguments may hold Flax NNX objects, or leaves that are not arrays. A front (`frameworks`) turns them into arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import jax
from jax.core import Tracer

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat
from dhelix.passes.framework.manager import Stage, say_once
from dhelix.passes.framework.report import Report
from dhelix.profiles.profile import Profile
from dhelix.runtime.compiler import registration
from dhelix.runtime.processes.first_run import FirstRun
from dhelix.runtime.profiling import in_process
from dhelix.runtime.profiling.session import Progress
from dhelix.runtime.sharding.sharded_program import ShardedStates
from dhelix.runtime.step import verification
from dhelix.runtime.step.frameworks import front_choice
from dhelix.runtime.step.frameworks.argument_keys import leaf_key, name_of
from dhelix.runtime.step.frameworks.plain_jit import PLAIN
from dhelix.runtime.step.microbatches.value_and_grad import Microbatching, microbatching
from dhelix.runtime.step.options import JitOptions, StepOptions
from dhelix.runtime.step.specialization import Specialization
from dhelix.runtime.step.step_passes import pass_manager


def _through_front[M: Callable[..., Any]](method: M) -> M:
    """Decorates a method that takes the step's arguments. If they need a front, the method runs through the front."""

    @functools.wraps(method)
    def dispatch(self: InterleavedStep, *args: Any, **kwargs: Any) -> Any:
        front = self._front(args, kwargs)
        return method(self, *args, **kwargs) if front is None else front.run(method.__name__, args, kwargs, {})

    return dispatch  # pyright: ignore[reportReturnType]


_numbers = itertools.count(1)  # each step gets the next number


class InterleavedStep[**P, R]:
    """A train step. It is called like the function that it wraps, and is compiled once for each kind of arguments.

    A kind is a combination of shapes, types, shardings and static values. The first call with arguments of a kind
    lowers the function, runs the passes and compiles the result. If no pass changes anything, the step runs as
    `jax.jit` would run it.

    Attributes:
      options: the options of the step, with its plan and profile loaded.
    """

    __name__: str
    __qualname__: str
    __wrapped__: Callable[..., Any]

    def __init__(
        self,
        function: Callable[..., Any],
        options: StepOptions,
        *,
        front: type[front_choice.Front] | None = None,
        jit: front_choice.Jit = PLAIN,
    ):
        """
        Args:
          function: the user's function.
          options: options of the step.
          front: the front that every call passes through. None: the arguments of each call decide the front.
          jit: traces and compiles the function. Fronts give their inner step a `jit` of their own.
        """
        functools.update_wrapper(self, function)
        self.__name__ = name_of(function)
        self._number = next(_numbers)
        self._label = f"{self.__name__} {self._number}"  # distinguishes this step from others in the log
        self.options = options
        self._manager = pass_manager(options)  # made without a program, so errors in options show at decoration
        self._function = function
        self._front_kind = front
        self._fronts: dict[type[front_choice.Front], front_choice.Front] = {}
        self._jit = jit
        # With a front, the front's inner step runs. Then `_jitted` is only used to find which arguments are static.
        own = {name: value for name, value in options.jit.items() if front is None or name.startswith("static")}
        self._jitted = jit(function if options.microbatches is None else self._traced(options.microbatches), **own)
        self._static_numbers, self._static_names = jax_compat.static_arguments(self._jitted)
        self._hosts = FirstRun(self.__name__, self._asked())
        self._splits = False  # whether the step is known to call value_and_grad
        self._specializations: dict[Hashable, Specialization] = {}
        self._states = ShardedStates(options.sharding, options.dump_to)
        self._lock = threading.RLock()

    def with_jit(self, jit: front_choice.Jit) -> InterleavedStep:
        """Returns the same step with another `jit`. The result is the inner step of a front."""
        return InterleavedStep(self._function, self.options, jit=jit)

    def but(self, **changes: Any) -> InterleavedStep:
        """Returns the same step with other options."""
        return InterleavedStep(self._function, self.options.but(**changes), jit=self._jit, front=self._front_kind)

    @_through_front
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        kinds = set(map(type, jax.tree.leaves((args, kwargs))))
        if jax.ShapeDtypeStruct in kinds:
            raise DhelixError(f"{self.__name__} is called with shapes instead of arrays: call its report() or lower()")
        if any(issubclass(kind, Tracer) for kind in kinds):
            if registration.on():
                reason = "is called inside another JAX transformation and becomes part of it unchanged"
                say_once(f"{self.__name__} {reason}; decorate the outermost step", (self._label, reason))
            return self._plain(args, kwargs)
        kind = functools.partial(self._key, args, kwargs)
        with self._hosts.taking_part(registration.on, kind, self._jitted, args, kwargs) as (on, key):
            chosen = self._specialize(key, args, kwargs) if on else None
            if chosen is not None:
                chosen.compile()
        if chosen is None:
            return self._plain(args, kwargs)
        if self.options.verify and not chosen.verified:
            self._compare(chosen, args, kwargs)
            chosen.verified = True
        return self._call(chosen, args, kwargs)

    @_through_front
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the step as `lower` of `jax.jit` does, and applies the passes of stage LOWERED, before XLA compiles.

        Arguments may be `jax.ShapeDtypeStruct`s. If dhelix is switched off, the result is the unchanged program.
        """
        if not registration.on():
            return self._states.of(self._jitted.lower(*args, **kwargs))[0]
        return self._specialize(self._key(args, kwargs), args, kwargs).lowered

    @_through_front
    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces the step as `trace` of `jax.jit` does. No pass runs, so `jax.export` exports a step without passes."""
        return self._jitted.trace(*args, **kwargs)

    @_through_front
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns shapes and types of the results, as `eval_shape` of `jax.jit` does."""
        return self._jitted.eval_shape(*args, **kwargs)

    @_through_front
    def preview(self, *args: Any, **kwargs: Any) -> Report:
        """Reports what the passes of stage LOWERED do for these arguments. This method does not compile the step."""
        if not registration.on():
            return self._report_off()
        return self._specialize(self._key(args, kwargs), args, kwargs).preview()

    @_through_front
    def report(self, *args: Any, **kwargs: Any) -> Report:
        """Reports what the passes of all stages did. Compiles the step for these arguments if necessary."""
        kind = functools.partial(self._key, args, kwargs)
        with self._hosts.taking_part(registration.on, kind, self._jitted, args, kwargs) as (on, key):
            return self._specialize(key, args, kwargs).report() if on else self._report_off()

    @_through_front
    def outcomes(self, *args: Any, **kwargs: Any) -> Report:
        """As `report`, without the gain. So the plain step need not be compiled for it."""
        if not registration.on():
            return self._report_off()
        return self._specialize(self._key(args, kwargs), args, kwargs).report(compared=False)

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
        """Measures on the job's GPUs how long the step's operators take, and saves the times in a profile's file.

        Only operators whose times are missing in the file are measured. The operators are those of the step after its
        passes. The times are for the launch setting of this process. Each operator is measured alone. Two operators are
        measured at once if their overlap may matter. Every batch of results is saved. So a call after an interruption
        continues where the interrupted call stopped. The arguments are not donated. All processes of a job must call
        this method together.

        Args:
          *args, **kwargs: the step's arguments, or `jax.ShapeDtypeStruct`s, which take no memory. With arrays and no
            keyword arguments, the step also runs under the profiler. Operators other than products and attention then
            get their times from this run.
          out: the profile's file; default: the file that `dhelix profile` writes.
          link: "nvlink" or "no-p2p"; the default follows from NCCL_P2P_DISABLE.
          pairs: whether pairs of operators are measured. If False, only single operators are measured.
          again: whether known operators are measured again.
          progress: function that is called with the number of finished items, the number of all items, and a text about
            the next items. True writes log lines.

        Returns:
          The profile in the file, with the new times (seconds).

        Raises:
          DhelixError: there is no GPU, no launch setting matches this process, or the file is for other hardware.
          HostsDisagreeError: the processes do not have the same items to measure.
        """
        front = self._front(args, kwargs)
        if front is not None:
            options = {"out": out, "link": link, "pairs": pairs, "again": again, "progress": progress}
            return front.run("profile", args, kwargs, options)
        process = in_process.this_process(link, self.options.xla)
        lowered, compiled = self._compiled(args, kwargs)
        _, arguments = self._separate(args, kwargs)
        return in_process.profile(process, lowered, compiled, arguments, out, pairs, again, progress)

    def _compiled(self, args: Any, kwargs: Any) -> tuple[jax.stages.Lowered, Any]:
        """The program that a call with these arguments runs: lowered, and compiled by XLA."""
        kind = functools.partial(self._key, args, kwargs)
        with self._hosts.taking_part(registration.on, kind, self._jitted, args, kwargs) as (on, key):
            if not on:
                lowered, _ = self._states.of(self._jitted.lower(*args, **kwargs))
                return lowered, lowered.compile()
            chosen = self._specialize(key, args, kwargs)
            compiled = chosen.compile() or chosen.original.compile()
            return chosen.lowered, compiled  # `lowered` is read after compile(), which resets it on failure

    def _asked(self) -> dict[str, object]:
        """The options that must be the same in all processes of a job."""
        a_hosts_own = {"dump_to", *(field.name for field in dataclasses.fields(JitOptions))}
        names = sorted({field.name for field in dataclasses.fields(self.options)} - a_hosts_own)
        return {**{name: getattr(self.options, name) for name in names}, "collective_matmul": self.options.matmuls}

    def clear_cache(self) -> None:
        """Forgets all compiled programs and frees their memory."""
        with self._lock:
            self._specializations.clear()
            self._states.clear()
            self._hosts.clear()
            for front in self._fronts.values():
                front.clear_cache()
            self._jitted.clear_cache()

    def static_positions(self, args: Any) -> tuple[set[int], frozenset[str]]:
        """Returns the positions of static arguments among `args`, and the names of static keyword arguments."""
        found = {number % len(args) for number in self._static_numbers if -len(args) <= number < len(args)}
        return found, self._static_names

    def __reduce__(self) -> str:
        """Makes pickle store the step by its name, like a function. `copy.copy` returns the step itself."""
        return self.__qualname__

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Binds the step to an object, if the step is a method of a class."""
        return self if instance is None else _BoundStep(self, instance)

    def _report_off(self) -> Report:
        name = f"jit_{self.__name__}"
        return Report(name, "", (self._manager.not_run(Stage.LOWERED, name, registration.switched_off()),))

    def _front(self, args: Any, kwargs: Any) -> front_choice.Front | None:
        """The front for these arguments; None if `jax.jit` accepts the arguments unchanged."""
        if self._jit is not PLAIN:
            return None
        kind = self._front_kind or front_choice.kind_of(self._function, self._separate(args, kwargs)[1])
        if kind is None:
            return None
        with self._lock:
            if kind not in self._fronts:
                self._fronts[kind] = kind(self)
            return self._fronts[kind]

    def _traced(self, microbatches: int, results: bool = False) -> Callable[..., Any]:
        """The user's function. Inside it, `value_and_grad` splits its batch into micro-batches.

        With `results`, the function returns the results of its calls of value_and_grad instead of its own results.
        """

        @functools.wraps(self._function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with microbatching(microbatches, self.options.reduce, self.options.pipeline, self._number) as active:
                output = self._function(*args, **kwargs)
            self._check_used(active)
            if results and len(active.results) < max(active.calls, 1):
                reason = (
                    "verify= skips the comparison of micro-batches with the whole batch, because dhelix.value_and_grad "
                    "is called inside a shard_map, jax.jit or scan instead of by the step itself"
                )
                say_once(f"{self.__name__}: {reason}", (self._label, reason))
            return active.results if results else output

        traced.__name__ = self.__name__  # a functools.partial has no __name__
        return traced

    def _results(self, microbatches: int) -> Callable[..., Any]:
        """A function of the step's arguments that returns the results of value_and_grad, and donates no arguments."""
        dropped = {"donate_argnums", "donate_argnames", "out_shardings"}
        options = {k: v for k, v in self.options.jit.items() if k not in dropped}
        return self._jit.results(self._traced(microbatches, results=True), **options)

    def _check_used(self, active: Microbatching) -> None:
        self._splits |= active.calls > 0
        if self._splits:  # called now, or earlier in a function that JAX does not trace again
            return
        reason = "microbatches= has no effect: the step does not call dhelix.value_and_grad"
        if self.options.strict:
            raise DhelixError(reason)
        say_once(f"{self.__name__}: {reason}", (self._label, reason))

    def _specialize(self, key: Hashable | None, args: Any, kwargs: Any) -> Specialization:
        with self._lock:
            if key is not None and key in self._specializations:
                return self._specializations[key]
            with front_choice.captured_objects_named(self._function, self.__name__):
                lowered = self._jitted.lower(*args, **kwargs)
            same = ("program", jax_compat.program_key(lowered))
            if same not in self._specializations:
                made = self._states.of(lowered)
                self._specializations[same] = Specialization(self.__name__, self._label, self.options, *made)
            if key is not None:
                self._specializations[key] = self._specializations[same]
            return self._specializations[same]

    def _call(self, chosen: Specialization, args: Any, kwargs: Any) -> Any:
        compiled = chosen.compile(runs=True)
        if compiled is None:
            return self._plain(args, kwargs)
        _, (args, kwargs) = self._separate(args, kwargs)
        return compiled(*args, **kwargs)

    def _plain(self, args: Any, kwargs: Any) -> Any:
        with front_choice.captured_objects_named(self._function, self.__name__):
            return self._states.run(self._jitted, args, kwargs, self._key, self._separate)

    def _key(self, args: Any, kwargs: Any) -> Hashable | None:
        """The key by which `jax.jit` distinguishes programs; None if `jax.jit` does not accept an argument."""
        static, dynamic = self._separate(args, kwargs)
        leaves, treedef = jax.tree.flatten(dynamic)
        try:
            key = (jax_compat.trace_context(), static, treedef, tuple(map(leaf_key, leaves)))
            hash(key)
            return key
        except TypeError:  # jax.jit raises a better error when it lowers
            return None

    def _separate(self, args: Any, kwargs: Any) -> tuple[Hashable, Any]:
        """Returns the static arguments, and (args, kwargs) of the other arguments."""
        if not self._static_numbers and not self._static_names:
            return (), (args, kwargs)
        numbers, _ = self.static_positions(args)
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
        """Raises VerificationError unless the step computes the same as the plain step. Logs what was compared."""
        lines = []
        if (changed := chosen.compile()) is not None:
            plain = jax_compat.apart(chosen.original).compile()
            _, (dynamic, keywords) = self._separate(args, kwargs)
            passes = ", ".join(entry.name for entry in chosen.report() if entry.changed)
            found = verification.check_passes(plain, changed, chosen.original, dynamic, keywords, passes)
            lines.append(f"all {found.leaves} results agree with the plain step: {found}")
        if (count := self.options.microbatches) is not None:
            whole, split = self._results(1), self._results(count)
            found = verification.check_microbatches(
                whole, split, chosen.original, args, kwargs, count, self.options.reduce
            )
            if found is not None:
                lines.append(f"losses and gradients ({found.leaves} leaves) agree with the whole batch: {found}")
        text = ". ".join(lines) or "nothing was compared, because the step runs as it is"
        say_once(f"{self.__name__}, verified: {text}", (self._label, text))


class _BoundStep:
    """A decorated method that is bound to one object. A call passes the object to the step as first argument."""

    def __init__(self, step: InterleavedStep, instance: object) -> None:
        functools.update_wrapper(self, step, updated=())
        self._step, self._instance = step, instance
        for name in ("lower", "trace", "eval_shape", "preview", "report", "profile"):
            setattr(self, name, functools.partial(getattr(step, name), instance))
        self.clear_cache = step.clear_cache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(self._instance, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self._step)
        return signature.replace(parameters=list(signature.parameters.values())[1:])
