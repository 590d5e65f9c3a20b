"""Splits a loss function into embedding, a chain of equal layers, and head.

    loss(params, batch):                         Chain
      x = params.embedding[batch.tokens]           embed(params, batch)          -> x
      x, _ = lax.scan(layer, x, params.layers)     layer(context, x, weights)    -> x       once per layer
      return mean(cross_entropy(x @ params.head))  head(params, batch, x)        -> loss

The function is traced once. The chain of layers is the `lax.scan` over stacked parameters. Each part consists of the
traced operations that compute the part's results. The only condition on the model's code is that one scan runs all
layers.

Contract:
- The trace contains all layers of the model. In the pipeline, each stage runs the parts with its own layers only.
- `context` is what a layer reads besides its own weights, such as rotary tables and masks. It may depend on the batch,
  but not on parameters.
- Weights are the arrays that the scan iterates over. The code that makes weights from the parameters (a cast, a split)
  does not read the batch and does not mix layers.
- If a function breaks these rules, `take_apart` raises a DhelixError of one line that names the obstacle. Examples of
  obstacles are per-layer outputs that the head reads, weights that all layers share, random keys among the scan's xs,
  and a scan in reverse.
- If embedding and head both need a value, each of them computes it. The value's gradient is the sum of the gradients
  from both parts, as in the derivative of the whole function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex_core

from dhelix.errors import DhelixError
from dhelix.runtime.pipeline.jaxprs import as_keys, as_numbers, part, shape, variables

Values = list[Any]
_CALLS = ("jit", "pjit", "closed_call", "core_call")
# Primitives that work element by element.
_ELEMENTWISE = frozenset(
    "abs add convert_element_type copy div erf exp integer_pow log logistic max min mul neg pow round rsqrt sign sqrt"
    " square stop_gradient sub tanh".split()
)


@dataclass(frozen=True)
class Chain:
    """The parts of a loss function. Arguments and results of the parts are flat lists of arrays.

    Attributes:
      layer_leaves: indices of the parameters from which the layers' weights are made.
      end_leaves: indices of the parameters that embedding and head read.
      prepare: (the layers' parameters, stacked) -> the scan's stacked weights.
      casts: for each stack of weights, the index of its parameter among the layers' parameters. The stack is that
        parameter or a cast of it. Empty if stacks and parameters do not correspond one to one.
      context: (batch) -> what every layer reads besides its weights.
      context_of_batch: whether `context` differs from micro-batch to micro-batch.
      embed: (end parameters, batch) -> the x that the first layer reads.
      layer: (context, x, one layer's weights) -> x.
      head: (end parameters, batch, x) -> the outputs of the loss function.
      state: shapes of x, the values that one layer passes to the next. Random keys among them have the shape of their
        key data.
      weights: shapes of the scan's stacked weights.
      length: number of layers that the scan runs over.
    """

    layer_leaves: tuple[int, ...]
    end_leaves: tuple[int, ...]
    prepare: Callable[[Sequence[Any]], Values]
    casts: tuple[int, ...]
    context: Callable[[Sequence[Any]], Values]
    context_of_batch: bool
    embed: Callable[[Sequence[Any], Sequence[Any]], Values]
    layer: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Values]
    head: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Values]
    state: tuple[jax.ShapeDtypeStruct, ...]
    weights: tuple[jax.ShapeDtypeStruct, ...]
    length: int


def trace(function: Callable[..., Sequence[Any]], params: Sequence[Any], batch: Sequence[Any]) -> Any:
    """Traces `function(*params, *batch)`, and inlines calls that contain a scan.

    Args:
      function: returns a flat list whose first element is the loss.
      params: the parameters, as arrays or shapes.
      batch: one micro-batch and all other arguments that are not parameters, as arrays or shapes.
    """
    return _inline_calls(jax.make_jaxpr(function)(*params, *batch))


def take_apart(jaxpr: Any, parameters: int) -> Chain:
    """Splits a traced function into the parts of a chain.

    Args:
      jaxpr: the result of `trace`.
      parameters: number of parameters, which are the first arguments of the traced function.

    Raises:
      DhelixError: the function is not a chain of equal layers.
    """
    return _Cut(jaxpr, parameters).chain()


class _Cut:
    """Splits one traced loss function, and checks that it can be split."""

    def __init__(self, jaxpr: Any, parameters: int):
        self.jaxpr = jaxpr
        self.params = list(self.jaxpr.invars[:parameters])
        self.batch = list(self.jaxpr.invars[parameters:])
        self.scan = self._find_scan()
        consts, carries = _consts_and_carries(self.scan)
        self.consts = self.scan.invars[:consts]
        self.start = self.scan.invars[consts : consts + carries]
        self.stacks = self.scan.invars[consts + carries :]
        self.end = self.scan.outvars[:carries]
        self.ys = self.scan.outvars[carries:]

    def chain(self) -> Chain:
        self._check()
        layer_vars = self._reads(self.stacks)
        end_vars = self._reads([*self.start, *self.jaxpr.outvars], stop=self.end)
        layers = tuple(i for i, var in enumerate(self.params) if var in layer_vars)
        ends = tuple(i for i, var in enumerate(self.params) if var in end_vars)
        shared = sorted(set(layers) & set(ends))
        if shared:
            raise DhelixError(
                f"pipeline=: parameter {shared[0]} {self.params[shared[0]].aval.str_short()} is used by the layers and "
                "by the embedding or the head; give each its own"
            )
        layer_params = [self.params[i] for i in layers]
        end_params = [self.params[i] for i in ends]
        prepare = part(self.jaxpr, layer_params, self.stacks)
        context = part(self.jaxpr, self.batch, self.consts)
        embed = part(self.jaxpr, [*end_params, *self.batch], self.start)
        head = part(self.jaxpr, [*end_params, *self.batch, *self.end], self.jaxpr.outvars)
        body = jex_core.jaxpr_as_fun(self.scan.params["jaxpr"])
        carries = len(self.start)
        state = [shape(var) for var in self.end]

        def run_layer(context: Sequence[Any], x: Sequence[Any], weights: Sequence[Any]) -> Values:
            return as_numbers(body(*context, *as_keys(x, state), *weights)[:carries])

        return Chain(
            layer_leaves=layers,
            end_leaves=ends,
            prepare=lambda stacked: prepare(*stacked),
            casts=self._casts(layer_params),
            context=lambda batch: context(*batch),
            context_of_batch=bool(set(self.batch) & self._reads(self.consts)),
            embed=lambda params, batch: as_numbers(embed(*params, *batch)),
            layer=run_layer,
            head=lambda params, batch, x: head(*params, *batch, *as_keys(x, state)),
            state=tuple(jax.eval_shape(as_numbers, state)),
            weights=tuple(shape(var) for var in self.stacks),
            length=self.scan.params["length"],
        )

    def _casts(self, layer_params: Sequence[Any]) -> tuple[int, ...]:
        made = {eqn.outvars[0]: eqn for eqn in self.jaxpr.eqns if eqn.primitive.name == "convert_element_type"}
        sources = [made[var].invars[0] if var in made else var for var in self.stacks]
        if sorted(map(id, sources)) != sorted(map(id, layer_params)):
            return ()
        return tuple(layer_params.index(var) for var in sources)

    def _find_scan(self) -> Any:
        """The scan over stacked parameters. Raises DhelixError unless there is exactly one."""
        loops = [eqn for eqn in self.jaxpr.eqns if eqn.primitive.name == "scan"]
        sizes = [self._parameter_bytes(eqn) for eqn in loops]
        if not loops or not max(sizes):
            raise DhelixError(
                "pipeline= needs layers that are one jax.lax.scan over stacked parameters, but the loss function has "
                "no such scan; stack the layers' parameters and scan over them"
            )
        if sum(size > 0 for size in sizes) > 1:
            raise DhelixError(
                f"pipeline= needs one chain of equal layers, but the loss function has {sum(s > 0 for s in sizes)} "
                "loops over stacked parameters; merge them into one"
            )
        return loops[sizes.index(max(sizes))]

    def _parameter_bytes(self, eqn: Any) -> int:
        stacks = [v for v in eqn.invars[sum(_consts_and_carries(eqn)) :] if not isinstance(v, jex_core.Literal)]
        # Parameters that reach a stack only through other loops do not count. For example, a head may scan over pieces
        # of the last layer's result.
        made = [var for loop in self.jaxpr.eqns if loop.primitive.name == "scan" for var in loop.outvars]
        used = self._reads(stacks, stop=made)
        return sum(v.aval.size * v.aval.dtype.itemsize for v in self.params if v in used)

    def _check(self) -> None:
        params, batch = set(self.params), set(self.batch)
        if self.scan.params["reverse"]:
            raise DhelixError("pipeline=: the scan over layers runs in reverse; give it the layers in order")
        fixed = [var for var in self.stacks if not self._reads([var]) & (params | batch)]
        if fixed:
            raise DhelixError(
                f"pipeline=: the scan over layers runs over {fixed[0].aval.str_short()}, which depends on no parameter "
                "(layer numbers, frozen weights), but a stage has only its own layers: carry a counter through the "
                "layers, or make it a parameter"
            )
        if self._reads(self.stacks) & batch:
            raise DhelixError(
                "pipeline=: the scan over layers also runs over values of the batch (or random keys), one per layer; "
                "derive them inside the layer from values that all layers share"
            )
        self._check_preparation()
        if self._reads(self.consts) & params:
            raise DhelixError("pipeline=: all layers share one parameter; give each layer its own")
        if self._reads(self.jaxpr.outvars, stop=self.scan.outvars) & set(self.ys):
            raise DhelixError(
                "pipeline=: the loss reads values that each layer returns in addition to its carry (the scan's ys, "
                "such as auxiliary losses); carry their sum through the layers"
            )

    def _check_preparation(self) -> None:
        """Raises DhelixError if a layer's weights may depend on other layers' parameters. Other stages hold those."""
        needed = variables(self.stacks)
        for eqn in reversed(self.jaxpr.eqns):
            if needed.isdisjoint(eqn.outvars):
                continue
            needed |= variables(eqn.invars)
            if not _keeps_layers_apart(eqn):
                raise DhelixError(
                    f"pipeline=: {eqn.primitive.name} computes the weights of the scan over layers and may mix layers, "
                    "but a stage has only its own; compute it inside the layer"
                )

    def _reads(self, outputs: Sequence[Any], stop: Sequence[Any] = ()) -> set[Any]:
        """Of the function's inputs and the variables in `stop`, those that `outputs` depend on.

        The search ends at variables in `stop`: what they depend on is not included.
        """
        needed, met = variables(outputs), set()
        for eqn in reversed(self.jaxpr.eqns):
            met |= needed & set(stop)
            needed -= set(stop)
            if not needed.isdisjoint(eqn.outvars):
                needed -= set(eqn.outvars)
                needed |= variables(eqn.invars)
        return (needed & set(self.jaxpr.invars)) | met


def _consts_and_carries(scan: Any) -> tuple[int, int]:
    """The number of loop-invariant operands of a scan, and the number of loop-carried operands.

    The other operands are stacks. A stack has a higher rank outside of the scan's body than inside.
    """
    body = scan.params["jaxpr"]
    stacked = sum(v.aval.ndim > w.aval.ndim for v, w in zip(scan.invars, body.invars, strict=True))
    carries = sum(v.aval.ndim == w.aval.ndim for v, w in zip(scan.outvars, body.outvars, strict=True))
    return len(scan.invars) - stacked - carries, carries


def _keeps_layers_apart(eqn: Any) -> bool:
    """Whether row l of each result depends only on row l of the operands, and `eqn` is possible with any row count."""
    name, params = eqn.primitive.name, eqn.params
    shapes = [v.aval.shape for v in [*variables(eqn.invars), *eqn.outvars] if v.aval.shape]
    if len({shape[0] for shape in shapes}) > 1:
        return False
    if name == "slice":
        strides = params["strides"] or (1,)
        return params["start_indices"][0] == 0 and params["limit_indices"][0] == shapes[0][0] and strides[0] == 1
    if name == "transpose":
        return params["permutation"][0] == 0
    if name == "reshape":
        return params["dimensions"] is None
    if name in ("split", "concatenate"):
        return params["axis" if name == "split" else "dimension"] != 0
    return name in _ELEMENTWISE and len(set(shapes)) == 1


def _inline_calls(jaxpr: Any) -> Any:
    """Inlines each call in `jaxpr` that contains a scan."""
    while any(_holds_scan(eqn) for eqn in jaxpr.eqns):
        jaxpr = jax.make_jaxpr(functools.partial(_inlined, jaxpr))(*(shape(var) for var in jaxpr.invars))
    return jaxpr


def _holds_scan(eqn: Any) -> bool:
    return eqn.primitive.name in _CALLS and any(
        inner.primitive.name == "scan" or _holds_scan(inner) for inner in eqn.params["jaxpr"].eqns
    )


def _inlined(jaxpr: Any, *args: Any) -> Values:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*jaxpr.consts, *args], strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex_core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        body = eqn.params["jaxpr"] if _holds_scan(eqn) else _alone(jaxpr, eqn)
        inputs = eqn.invars if _holds_scan(eqn) else body.invars
        values.update(zip(eqn.outvars, jex_core.jaxpr_as_fun(body)(*map(value, inputs)), strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _alone(jaxpr: Any, eqn: Any) -> Any:
    """A jaxpr that consists of `eqn` only."""
    inputs = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, jex_core.Literal)))
    return jaxpr.replace(constvars=[], invars=inputs, outvars=eqn.outvars, eqns=[eqn])
