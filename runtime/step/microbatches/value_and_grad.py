"""Defines `dhelix.value_and_grad`.

It is `jax.value_and_grad`, or a loop over micro-batches inside a step with micro-batches.

    loss, grads = dhelix.value_and_grad(loss_fn)(params, batch)

Outside of a `strand_interleave(microbatches=M)` step, this is `jax.value_and_grad`. Inside of such a step, it becomes
the following loop (`microbatch_loop.py`). The passes turn the loop into two strands.

    for m in range(M):  loss, grads += jax.value_and_grad(loss_fn)(params, batch[m::M])      (lax.scan)

Rules
1. The batch is split along axis 0 of every leaf. M must divide the size of this axis. `batch_split.py` defines which
   arguments are the batch.
2. Outputs have the types of `jax.value_and_grad`. Sums use float32 or wider (`combining.py`).
3. Losses and gradients combine by `reduce`. "mean" and "sum" are the mean and the sum of the micro-batches' values.
   "weighted" is the mean weighted by `weights` (token counts). `reduce` must fit `loss_fn`. For example, a loss may
   divide by the number of unmasked tokens. Then "mean" is wrong if this number differs between micro-batches.
   `strand_interleave(verify=True)` detects this.
4. An auxiliary output whose shape does not depend on the batch combines like the loss if it is floating point. If it is
   an integer, it is a count and is summed. Outputs with the batch as leading axis are joined.
5. Some Flax collections have rules of their own. Running statistics (BatchNorm) are averaged. For fp8 histories and
   scales, the largest values are taken.
6. Flax NNX objects and Equinox modules are differentiated as by their frameworks' own `value_and_grad`
   (`frameworks.gradients`). Changes that the loss makes to NNX objects pass from one micro-batch to the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state

from dhelix.runtime.pipeline.fold import Fold
from dhelix.runtime.step.frameworks import gradients, nnx_front
from dhelix.runtime.step.microbatches.batch_split import Naming, is_index
from dhelix.runtime.step.microbatches.combining import comparable
from dhelix.runtime.step.microbatches.microbatch_loop import Loop, Options, PipelinedLoop, Weights
from dhelix.runtime.step.options import REDUCTIONS, one_of


@dataclass
class Microbatching:
    """Controls `value_and_grad` while a step is traced, and records its calls.

    Attributes:
      microbatches: number of micro-batches; 1 leaves the batch whole.
      reduce: the `reduce` of calls that do not pass their own.
      pipeline: the pipeline through which micro-batches pass; None: no pipeline.
      calls: number of calls.
      returned: (value, gradients) of each call by the step itself, as tracers. Calls in functions that JAX traces
        separately (shard_map, jit, scan) are missing, because tracers of such a function are valid only inside it.
      trace: identifies the trace of the step itself.
    """

    microbatches: int
    reduce: str
    pipeline: Fold | None = None
    calls: int = 0
    returned: list[Any] = field(default_factory=list)
    trace: Any = field(default_factory=get_opaque_trace_state)

    @property
    def splits(self) -> bool:
        return self.pipeline is not None or self.microbatches > 1

    def called(self, result: Any) -> None:
        self.calls += 1
        if get_opaque_trace_state() == self.trace:
            self.returned.append(result)

    @property
    def results(self) -> list[Any]:
        """The values of `returned`, converted to types that can be compared."""
        return nnx_front.map_values(comparable, self.returned)


_traced_for = jax.make_user_context()
"""A part of the key of JAX's trace cache. So a function that calls `value_and_grad` is traced anew for each step."""
_active: ContextVar[Microbatching | None] = ContextVar("dhelix_microbatching", default=None)


@contextlib.contextmanager
def microbatching(
    microbatches: int, reduce: str, pipeline: Fold | None = None, step: int = 0
) -> Iterator[Microbatching]:
    """Inside this context, `value_and_grad` splits its batch. `step` is a number that identifies the step."""
    token = _active.set(Microbatching(microbatches, reduce, pipeline))
    try:
        active = _active.get()
        assert active is not None
        with _traced_for((microbatches, reduce, pipeline, step)):
            yield active
    finally:
        _active.reset(token)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: Any = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    *,
    batch_argnums: int | Sequence[int] | None = None,
    batch_argnames: str | Sequence[str] | None = None,
    rng_argnums: int | Sequence[int] = (),
    rng_argnames: str | Sequence[str] = (),
    reduce: str | None = None,
    weights: Weights | None = None,
) -> Callable[..., Any]:
    """Replaces `jax.value_and_grad`, and becomes a loop over micro-batches inside a dhelix step.

    Inside a `strand_interleave(microbatches=M)` step, the returned function splits the batch [B, ...] into M
    micro-batches [B/M, ...] and combines their losses, auxiliary outputs and gradients. Outside, it is
    `jax.value_and_grad`. The module docstring lists the rules.

    Args:
      fun: the loss function, `fun(*args, **kwargs) -> loss` or `-> (loss, aux)`. The loss is a scalar.
      argnums: the position of the argument to differentiate by, or several positions. For Flax NNX objects,
        `nnx.DiffState` selects the variables (rule 6). These arguments are not split.
      has_aux: whether `fun` also returns auxiliary outputs (rules 4 and 5).
      holomorphic, allow_int, reduce_axes: as in `jax.value_and_grad`.
      batch_argnums: positions of the arguments to split (rule 1). Every micro-batch gets the other arguments unchanged.
      batch_argnames: parameter names of the arguments to split. The call may pass these arguments by position or by
        keyword. If neither `batch_argnums` nor `batch_argnames` is given, the batch is the only argument outside of
        `argnums` that holds arrays with an axis.
      rng_argnums: positions of arguments that are random keys or pytrees of keys. Micro-batch m gets
        `jax.random.fold_in(key, m)`.
      rng_argnames: parameter names of such arguments.
      reduce: "mean", "sum" or "weighted" (rule 3). The default is the option `reduce` of `strand_interleave`.
      weights: for "weighted": function of the arguments of `fun` that returns the weight of the micro-batch, a scalar.

    Returns:
      A function of the same arguments that returns `(loss, grads)` or `((loss, aux), grads)`, with the shapes and types
      of `jax.value_and_grad` on the whole batch.

    Raises:
      DhelixError: `reduce` is unknown, or no parameter has a given name. A call inside a step raises this error in the
        following cases: several arguments hold arrays and none is named as the batch; M does not divide the rows; the
        shape of an auxiliary output depends on the batch in an axis other than the leading one; `reduce` is "weighted"
        without `weights`; or `weights` is given for another `reduce`.
    """
    if reduce is not None:
        one_of("reduce", reduce, REDUCTIONS)
    numbers = gradients.numbers_of(argnums)

    def differentiated(loss: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
        return jax.value_and_grad(loss, numbers, has_aux, holomorphic, allow_int, reduce_axes)

    naming = Naming.of(fun, numbers, batch_argnums, batch_argnames, rng_argnums, rng_argnames)
    single = is_index(numbers)
    options = Options(fun, differentiated(fun, has_aux), naming, single, has_aux, holomorphic, reduce, weights)

    def of_pure(loss_fn: Callable[..., Any], carried: Any = None) -> Callable[..., Any]:
        pure = dataclasses.replace(options, loss=loss_fn, plain=differentiated(loss_fn, True), has_aux=True)
        return functools.partial(_of_arrays, pure, carried)

    @functools.wraps(fun)
    def value_and_grad_fn(*args: Any, **kwargs: Any) -> Any:
        active = _active.get()
        objects = gradients.of_objects(fun, argnums, has_aux, args, kwargs)
        if objects is None:
            result = _of_arrays(options, None, *args, **kwargs)
        else:
            result = objects.run(of_pure, active is not None and active.splits, args, kwargs)
        if active is not None:
            active.called(result)
        return result

    return value_and_grad_fn


def _of_arrays(options: Options, carried: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Returns the value and gradients of a function of arrays. `carried` is the value in `gradients.Differentiate`."""
    active = _active.get()
    argnums = options.naming.argnums
    passed = argnums and all(-len(args) <= index < len(args) for index in argnums)
    if active is None or not active.splits or not passed:
        given = {} if carried is None else {"carried": carried}
        return options.plain(*args, **given, **kwargs)  # if an argument of `argnums` is missing, JAX raises an error
    if active.pipeline is not None:
        return PipelinedLoop(active.pipeline, options, active.microbatches, active.reduce, args, kwargs, carried).run()
    return Loop(options, active.microbatches, active.reduce, args, kwargs, carried).run()
