"""`dhelix.value_and_grad`: JAX's, or a loop over micro-batches in a step that is decorated with one.

    loss, grads = dhelix.value_and_grad(loss_fn)(params, batch)

Outside a `strand_interleave(microbatches=M)` step this is `jax.value_and_grad`. Inside it becomes

    for m in range(M):  loss, grads += jax.value_and_grad(loss_fn)(params, batch[m::M])      (lax.scan)

which is the loop that the passes turn into two strands (`microbatch_loop.py`).

Rules
1. The batch is split along axis 0 of every leaf, which M must divide; what the batch is, `batch_split.py` says.
2. Outputs come back in the types of `jax.value_and_grad`; sums are of float32 or wider (`combining.py`).
3. They combine by `reduce`: "mean" or "sum" of the micro-batches' values, or "weighted": the mean weighted by
   `weights` (token counts). It must fit `loss_fn`: "mean" is wrong for a loss that divides by the number of
   unmasked tokens when micro-batches differ in it. `strand_interleave(verify=True)` tells.
4. An auxiliary output whose shape does not depend on the batch combines like the loss if it is floating
   point; if integer it is a count and adds up. One with the batch as leading axis is put together again.
5. Flax's collections that are no sums have rules of their own: the mean of running statistics (BatchNorm), the largest
   of fp8 histories and scales.
6. Objects of Flax NNX and modules of Equinox are differentiated as their own `value_and_grad`s do it
   (`frameworks.gradients`). What the loss changes in NNX objects goes from one micro-batch to the next.
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
    """What `value_and_grad` does while a step is traced, and what it did.

    Attributes:
      microbatches: 1 leaves the batch whole.
      reduce: used by calls that do not name their own.
      pipeline: executes the micro-batches by a schedule over pipeline stages.
      calls: how often it was called.
      returned: (value, gradients) of each call of the step itself, tracers; what a function returned that the step has
        JAX trace by itself (shard_map, jit, scan) is known only there.
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
        """What was returned, in types that can be compared."""
        return nnx_front.map_values(comparable, self.returned)


_traced_for = jax.make_user_context()
"""JAX keeps what it traced: a function that calls `value_and_grad` is traced for each step, and once more outside of
any."""
_active: ContextVar[Microbatching | None] = ContextVar("dhelix_microbatching", default=None)


@contextlib.contextmanager
def microbatching(
    microbatches: int, reduce: str, pipeline: Fold | None = None, step: int = 0
) -> Iterator[Microbatching]:
    """While this is entered, `value_and_grad` splits its batch; `step` tells steps apart."""
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
    """Drop-in for `jax.value_and_grad` that a `strand_interleave(microbatches=M)` step turns into a loop.

    Args:
      fun: the loss function, `fun(*args, **kwargs) -> loss` or `-> (loss, aux)`; loss is a scalar.
      argnums: positional arguments to differentiate by, an int or several; `nnx.DiffState` where they are objects of
        Flax NNX (rule 6). None of them is split.
      has_aux: whether `fun` returns auxiliary outputs too (rules 4 and 5).
      holomorphic, allow_int, reduce_axes: as in `jax.value_and_grad`.
      batch_argnums: positional arguments to split (rule 1). Every micro-batch gets all others as they are.
      batch_argnames: the same by the names of the parameters of `fun`, whether they are passed by position or by
        keyword. Without either, the batch is the one argument beside those of `argnums` that holds arrays.
      rng_argnums: random keys, or pytrees of them; micro-batch m gets `jax.random.fold_in(key, m)`.
      rng_argnames: the same by name.
      reduce: "mean", "sum" or "weighted" (rule 3); by default what `strand_interleave` was given.
      weights: for "weighted": takes the arguments of `fun` and returns the weight of the micro-batch.

    Returns:
      A function of the same arguments that returns `(loss, grads)` or `((loss, aux), grads)`.

    Raises:
      DhelixError: a batch that is not named where several arguments hold arrays, or that M does not divide; a name that
        no parameter has; an auxiliary output whose shape depends on the batch in another way; "weighted" without
        weights or the reverse.
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
    """Value and gradients of a function of arrays; `carried` as of `gradients.Differentiate`."""
    active = _active.get()
    argnums = options.naming.argnums
    passed = argnums and all(-len(args) <= index < len(args) for index in argnums)
    if active is None or not active.splits or not passed:
        given = {} if carried is None else {"carried": carried}
        return options.plain(*args, **given, **kwargs)  # which raises what JAX says of positions that are not passed
    if active.pipeline is not None:
        return PipelinedLoop(active.pipeline, options, active.microbatches, active.reduce, args, kwargs, carried).run()
    return Loop(options, active.microbatches, active.reduce, args, kwargs, carried).run()
