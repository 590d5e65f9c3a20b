"""The step that `@strand_interleave` makes: what stands in place of the function, for arguments of every kind.

Arguments that hold objects of Flax NNX or leaves that are no arrays go through a front (`frameworks`), which makes
arrays of them for an inner step.
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
from dhelix.runtime.step import verification
from dhelix.runtime.step.argument_keys import leaf_key
from dhelix.runtime.step.frameworks import front_choice
from dhelix.runtime.step.microbatches.value_and_grad import Microbatching, microbatching
from dhelix.runtime.step.options import JitOptions, StepOptions
from dhelix.runtime.step.specialization import Specialization
from dhelix.runtime.step.step_passes import pass_manager


class _PlainJit:
    def __call__(self, function: Callable[..., Any], **options: Any) -> Any:
        function = getattr(function, "jitted_fn", function)  # of nnx.jit, whose static arguments are asked for
        return function if jax_compat.is_jitted(function) else jax.jit(function, **options)

    def results(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return jax.jit(function, **options)


_PLAIN = _PlainJit()


def _through_front[M: Callable[..., Any]](method: M) -> M:
    """A method of the arguments of the step, for those that need a front as well."""

    @functools.wraps(method)
    def dispatch(self: InterleavedStep, *args: Any, **kwargs: Any) -> Any:
        front = self._front(args, kwargs)
        return method(self, *args, **kwargs) if front is None else front.run(method.__name__, args, kwargs, {})

    return dispatch  # pyright: ignore[reportReturnType]


_numbers = itertools.count(1)  # of steps


class InterleavedStep[**P, R]:
    """A train step to call in place of the function that it wraps. `options`: as they were given."""

    __name__: str
    __qualname__: str
    __wrapped__: Callable[..., Any]

    def __init__(
        self,
        function: Callable[..., Any],
        options: StepOptions,
        *,
        front: type[front_choice.Front] | None = None,
        jit: front_choice.Jit = _PLAIN,
    ):
        """
        Args:
          front: what every call goes through; None: what its arguments need.
          jit: what traces and compiles the function; of a front, whose arguments are arrays.
        """
        functools.update_wrapper(self, function)
        named = function
        while isinstance(named, functools.partial):
            named = named.func
        self.__name__ = getattr(named, "__name__", type(named).__name__)
        self._number = next(_numbers)
        self._label = f"{self.__name__} {self._number}"  # what tells it from other steps in the log
        self.options = options
        self._manager = pass_manager(options)  # of no program yet; what it refuses is said at decoration
        self._function = function
        self._front_kind = front
        self._fronts: dict[type[front_choice.Front], front_choice.Front] = {}
        self._jit = jit
        # A front makes the function to run; of this one static arguments are asked for.
        own = {name: value for name, value in options.jit.items() if front is None or name.startswith("static")}
        self._jitted = jit(function if options.microbatches is None else self._traced(options.microbatches), **own)
        self._static_numbers, self._static_names = jax_compat.static_arguments(self._jitted)
        self._hosts = FirstRun(self.__name__, self._asked())
        self._splits = False  # whether it is known to call value_and_grad
        self._specializations: dict[Hashable, Specialization] = {}
        self._lock = threading.RLock()

    def with_jit(self, jit: front_choice.Jit) -> InterleavedStep:
        """The same step of what another `jit` makes of its function, for a front."""
        return InterleavedStep(self._function, self.options, jit=jit)

    @_through_front
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            if registration.on():
                reason = "is called inside another transformation of JAX, and becomes part of it as it is"
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
        """The transformed program before XLA; `jax.ShapeDtypeStruct`s do for arguments, as with `jax.jit`."""
        if not registration.on():
            return self._jitted.lower(*args, **kwargs)
        return self._specialize(self._key(args, kwargs), args, kwargs).lowered

    @_through_front
    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """As of `jax.jit`, of the step without passes; so is what `jax.export` exports."""
        return self._jitted.trace(*args, **kwargs)

    @_through_front
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As of `jax.jit`: shapes and types of the results."""
        return self._jitted.eval_shape(*args, **kwargs)

    @_through_front
    def preview(self, *args: Any, **kwargs: Any) -> Report:
        """What the passes decide for these arguments before XLA compiles: the LOWERED stage."""
        if not registration.on():
            return self._report_off()
        return self._specialize(self._key(args, kwargs), args, kwargs).preview()

    @_through_front
    def report(self, *args: Any, **kwargs: Any) -> Report:
        """What the passes did, all stages; compiles the step for these arguments if that has not happened."""
        kind = functools.partial(self._key, args, kwargs)
        with self._hosts.taking_part(registration.on, kind, self._jitted, args, kwargs) as (on, key):
            return self._specialize(key, args, kwargs).report() if on else self._report_off()

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
        front = self._front(args, kwargs)
        if front is not None:
            options = {"out": out, "link": link, "pairs": pairs, "again": again, "progress": progress}
            return front.run("profile", args, kwargs, options)
        process = in_process.this_process(link, self.options.xla)
        lowered, compiled = self._compiled(args, kwargs)
        _, arguments = self._separate(args, kwargs)
        return in_process.profile(process, lowered, compiled, arguments, out, pairs, again, progress)

    def _compiled(self, args: Any, kwargs: Any) -> tuple[jax.stages.Lowered, Any]:
        """The program that a call with these arguments runs, before and after XLA."""
        kind = functools.partial(self._key, args, kwargs)
        with self._hosts.taking_part(registration.on, kind, self._jitted, args, kwargs) as (on, key):
            if not on:
                lowered = self._jitted.lower(*args, **kwargs)
                return lowered, lowered.compile()
            chosen = self._specialize(key, args, kwargs)
            compiled = chosen.compile() or chosen.original.compile()
            return chosen.lowered, compiled  # in this order: what does not compile is left alone

    def _asked(self) -> dict[str, object]:
        """What was asked for, as other processes must have been asked, too."""
        a_hosts_own = {"dump_to", *(field.name for field in dataclasses.fields(JitOptions))}
        names = (field.name for field in dataclasses.fields(self.options) if field.name not in a_hosts_own)
        asked: dict[str, object] = {name: getattr(self.options, name) for name in names}
        return {**asked, "collective_matmul": self.options.matmuls}

    def clear_cache(self) -> None:
        """Forgets the programs that were compiled for the arguments so far, and frees their memory."""
        with self._lock:
            self._specializations.clear()
            self._hosts.clear()
            for front in self._fronts.values():
                front.clear_cache()
            self._jitted.clear_cache()

    def static_positions(self, args: Any) -> tuple[set[int], frozenset[str]]:
        """Which of positional arguments are static, and the names of static keyword arguments."""
        found = {number % len(args) for number in self._static_numbers if -len(args) <= number < len(args)}
        return found, self._static_names

    def __reduce__(self) -> str:
        """By name, as a function: copies are the step itself."""
        return self.__qualname__

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As a method of a class, like a function."""
        return self if instance is None else _BoundStep(self, instance)

    def _report_off(self) -> Report:
        name = f"jit_{self.__name__}"
        return Report(name, "", (self._manager.not_run(Stage.LOWERED, name, registration.switched_off()),))

    def _front(self, args: Any, kwargs: Any) -> front_choice.Front | None:
        """What makes arrays of these arguments; None if they are arrays."""
        if self._jit is not _PLAIN:
            return None
        kind = self._front_kind or front_choice.kind_of(self._function, self._separate(args, kwargs)[1])
        if kind is None:
            return None
        with self._lock:
            if kind not in self._fronts:
                self._fronts[kind] = kind(self)
            return self._fronts[kind]

    def _traced(self, microbatches: int, results: bool = False) -> Callable[..., Any]:
        """The function with its batch split; with `results`, returns what value_and_grad returned."""

        @functools.wraps(self._function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with microbatching(microbatches, self.options.reduce, self.options.pipeline, self._number) as active:
                output = self._function(*args, **kwargs)
            self._check_used(active)
            if results and len(active.results) < max(active.calls, 1):
                reason = (
                    "verify= compares micro-batches with the whole batch only where the step itself calls"
                    " dhelix.value_and_grad, not inside of a shard_map, jax.jit or scan: that part is left out"
                )
                say_once(f"{self.__name__}: {reason}", (self._label, reason))
            return active.results if results else output

        traced.__name__ = self.__name__  # a functools.partial has none
        return traced

    def _results(self, microbatches: int) -> Callable[..., Any]:
        """What value_and_grad returned, as a function of the step's arguments, which it leaves alone."""
        dropped = {"donate_argnums", "donate_argnames", "out_shardings"}
        options = {k: v for k, v in self.options.jit.items() if k not in dropped}
        return self._jit.results(self._traced(microbatches, results=True), **options)

    def _check_used(self, active: Microbatching) -> None:
        self._splits |= active.calls > 0
        if self._splits:  # or did so in a function that JAX has traced for this step before
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
                self._specializations[same] = Specialization(self.__name__, self._label, self.options, lowered)
            if key is not None:
                self._specializations[key] = self._specializations[same]
            return self._specializations[same]

    def _call(self, chosen: Specialization, args: Any, kwargs: Any) -> Any:
        compiled = chosen.compile()
        if compiled is None:
            return self._plain(args, kwargs)
        _, (args, kwargs) = self._separate(args, kwargs)
        return compiled(*args, **kwargs)

    def _plain(self, args: Any, kwargs: Any) -> Any:
        with front_choice.captured_objects_named(self._function, self.__name__):
            return self._jitted(*args, **kwargs)

    def _key(self, args: Any, kwargs: Any) -> Hashable | None:
        """What `jax.jit` tells programs apart by; None if an argument is none that it takes."""
        static, dynamic = self._separate(args, kwargs)
        leaves, treedef = jax.tree.flatten(dynamic)
        try:
            key = (jax_compat.trace_context(), static, treedef, tuple(map(leaf_key, leaves)))
            hash(key)
            return key
        except TypeError:  # jax.jit explains it better when it lowers
            return None

    def _separate(self, args: Any, kwargs: Any) -> tuple[Hashable, Any]:
        """Static arguments, and the others."""
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
        """Raises VerificationError unless the step computes what the plain one does, and says what was compared."""
        lines = []
        if (changed := chosen.compile()) is not None:
            plain = jax_compat.apart(chosen.original).compile()
            _, (dynamic, keywords) = self._separate(args, kwargs)
            passes = ", ".join(entry.name for entry in chosen.report() if entry.changed)
            found = verification.check_passes(plain, changed, chosen.original, dynamic, keywords, passes)
            lines.append(f"all {found.leaves} results are those of the plain step: {found}")
        if (count := self.options.microbatches) is not None:
            whole, split = self._results(1), self._results(count)
            found = verification.check_microbatches(
                whole, split, chosen.original, args, kwargs, count, self.options.reduce
            )
            if found is not None:
                lines.append(f"losses and gradients ({found.leaves} leaves) are those of the whole batch: {found}")
        text = ". ".join(lines) or "nothing was compared, since the step runs as it is"
        say_once(f"{self.__name__}, verified: {text}", (self._label, text))


class _BoundStep:
    """A decorated method of one object: as the step, with the object as its first argument."""

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
