"""Errors for impossible requests: one line that says what to do."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import dhelix
from dhelix import Fold
from dhelix.errors import DhelixError
from dhelix.tests.runtime.pipeline.models import (
    Setting,
    folded,
    gradients_of,
    in_microbatches,
    init_params,
    loss,
    tokens,
)

SETTING = Setting(pp=2, microbatches=2, layers=8)


def step(state: Any, batch: Any) -> Any:
    return state, batch


def trace(
    params: Any,
    fold: Fold = SETTING.fold,
    loss_fn: Callable[..., Any] = loss,
    setting: Setting = SETTING,
    **options: Any,
) -> Any:
    """Shapes of the loss and the gradients in a pipeline."""
    function = gradients_of(loss_fn, setting.mesh, setting.specs, **options)
    return jax.eval_shape(in_microbatches(function, setting.microbatches, fold=fold), params, setting.batch)


def refuse(message: str, function: Callable[..., Any], *args: Any, **options: Any) -> None:
    with pytest.raises(DhelixError, match=message) as refusal:
        function(*args, **options)
    assert "\n" not in str(refusal.value)
    # the message is complete without notes
    assert not any("pipeline=" in note for note in getattr(refusal.value, "__notes__", []))


def folded_params(fold: Fold = SETTING.fold) -> Any:
    assert fold.layers is not None
    return folded(init_params(fold.layers), fold.layout())


def test_what_makes_no_pipeline() -> None:
    refuse(r"Fold\(stages=0\): give a whole number of at least 1", Fold, 0)
    refuse(r"Fold\(chunks_per_stage=0\): give a whole number", Fold, 2, chunks_per_stage=0)
    names = "w, interleaved_si, 1f1b, interleaved, dualpipev"
    refuse(rf"schedule='gpipe'\) is unknown; use one of {names}", Fold, 2, schedule="gpipe")
    refuse(r'"w" and "interleaved_si", not to "1f1b"', Fold, 2, schedule="1f1b", sends_beside=True)
    refuse(
        r'chunks_per_stage=4\) applies to "interleaved_si" and "interleaved", not to "w"', Fold, 2, chunks_per_stage=4
    )
    refuse(r"6 layers do not divide into 4 chunks: give Fold\(layers=6\)", Fold(2).layout, 6)
    refuse("3 layers do not fill 4 chunks on 2 stages", Fold(2, layers=3).layout)
    refuse(r"Fold\(layers=\) is needed", Fold(2).layout)


def test_what_does_not_go_with_a_pipeline() -> None:
    interleave = dhelix.strand_interleave
    refuse(r"pipeline=2: give a dhelix.Fold\(stages", interleave, step, microbatches=2, pipeline=2)
    refuse("needs microbatches=: give the number of micro-batches", interleave, step, pipeline=Fold(2))
    refuse(
        "compare a few steps with those of an unfolded state", interleave, step, microbatches=2, pipeline=Fold(2),
        verify=True,
    )  # fmt: skip
    refuse(
        "schedule='intra_batch' has no pipeline: use dp, list or xla",
        interleave, step, microbatches=2, pipeline=Fold(2), schedule="intra_batch",
    )  # fmt: skip


def test_a_state_that_cannot_be_folded() -> None:
    params, mesh = init_params(5), SETTING.mesh
    refuse(r"5 layers do not divide into 4 chunks: give Fold\(layers=5\)", Fold(2).fold, params, mesh)
    refuse("4 stages needs a mesh axis 'pp' of that size", Fold(4, layers=8).fold, init_params(8), mesh)
    refuse("2 stages needs a mesh axis 'stage' of that size", Fold(2, 8, axis="stage").fold, params, mesh)
    refuse(r"leading dimensions \[8\] of 8 layers in the model's order", Fold(2, layers=8).fold, params, mesh)
    refuse("there is no array at layers: give the paths", Fold(2).fold, {"blocks": params["layers"]}, mesh)

    for stacked, meant in (("layers", r"\(\('layers',\),\)"), (("model", "layers"), r"\(\('model', 'layers'\),\)")):
        refuse(rf"each a tuple of names, such as {meant}", SETTING.fold.fold, params, mesh, stacked)


def test_a_mesh_of_explicit_axes() -> None:
    mesh = jax.make_mesh((2, 4), ("pp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with pytest.raises(DhelixError, match=r"explicit axes.*axis_types=\(jax.sharding.AxisType.Auto,\) \* 2"):
        Fold(stages=2, mesh=mesh).fold({"layers": jnp.zeros((4, 2))})


def test_a_state_that_is_not_folded() -> None:
    specs = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), init_params(8))
    function = in_microbatches(gradients_of(loss, SETTING.mesh, specs), 2, fold=SETTING.fold)
    refuse("are not folded for 2 stages of 2 chunks, .* fold the", jax.eval_shape, function, init_params(8), tokens(4))


def test_as_many_layers_as_chunks_that_are_not_folded() -> None:
    fold = Fold(2, layers=4, mesh=SETTING.mesh)
    function = in_microbatches(dhelix.value_and_grad(loss), 2, fold=fold)
    words = "chunks of 1: give both the model's number of layers, and fold the state only once"
    refuse(words, jax.eval_shape, function, init_params(4), tokens(4))


def test_layers_that_are_not_trained() -> None:
    def of_ends(ends: Any, rows: Any) -> Any:
        return loss({**init_params(8), **ends}, rows)

    ends = {name: x for name, x in folded_params().items() if name != "layers"}
    setting = Setting(pp=2, microbatches=2, layers=8)
    function = gradients_of(of_ends, setting.mesh, {name: jax.sharding.PartitionSpec() for name in ends})
    function = in_microbatches(function, 2, fold=setting.fold)
    refuse("or argnums= does not name them", jax.eval_shape, function, ends, setting.batch)


def test_a_fold_of_another_state_or_mesh() -> None:
    refuse(
        r"folded into chunks of 2 layers, but Fold\(layers=16\) makes chunks of 4: give both", trace, folded_params(),
        Fold(2, layers=16),
    )  # fmt: skip
    four = Fold(4, layers=8)
    refuse(r"Fold\(stages=4\) needs a mesh axis 'pp' of that size, but the mesh", trace, folded_params(four), four)
    other = Fold(2, layers=8, axis="stage")
    refuse("outside jax.shard_map over 'stage', so give the mesh", trace, folded_params(), other)
    other = Fold(2, layers=8, schedule="1f1b")
    refuse("are not folded for 2 stages of 1 chunks, .* fold", trace, folded_params(), other)


def test_a_loss_function_that_a_pipeline_cannot_run() -> None:
    def with_rows(params: Any, rows: Any) -> Any:
        return loss(params, rows), {"first": rows[:, 0]}

    def with_answer(params: Any, rows: Any) -> Any:
        return loss(params, rows), {"any": jnp.any(rows > 3)}

    def in_bfloat16(params: Any, rows: Any) -> Any:
        return loss(params, rows).astype(jnp.bfloat16)

    def without_layers(params: Any, rows: Any) -> Any:
        return jnp.mean(params["embedding"][rows] ** 2)

    refuse(
        r"returns int32\[4\]; under a pipeline .* must be numbers: reduce",
        trace,
        folded_params(),
        loss_fn=with_rows,
        has_aux=True,
    )
    refuse(r"returns bool\[\]; under", trace, folded_params(), loss_fn=with_answer, has_aux=True)
    assert trace(folded_params(), loss_fn=in_bfloat16)[0].dtype == jnp.bfloat16
    refuse("needs layers that are one jax.lax.scan", trace, folded_params(), loss_fn=without_layers)


def test_batches_and_where_it_is_called() -> None:
    odd = Setting(pp=2, microbatches=3, layers=8)
    function = gradients_of(loss, odd.mesh, odd.specs)
    refuse(
        "argument 1 has 8 rows, which do not divide into 3 micro-batches", jax.eval_shape,
        in_microbatches(function, 3, fold=odd.fold), folded_params(), tokens(8),
    )  # fmt: skip
    outside = in_microbatches(dhelix.value_and_grad(loss), 2, fold=SETTING.fold)
    refuse(
        r"outside jax.shard_map over 'pp', so give the mesh: Fold\(\.\.\., mesh=",
        jax.eval_shape,
        outside,
        folded_params(),
        tokens(8),
    )


def test_traced_shapes_are_those_of_the_parameters() -> None:
    value, gradients = trace(folded_params())
    assert value.shape == () and value.dtype == jnp.float32
    assert jax.tree.map(np.shape, gradients) == jax.tree.map(np.shape, folded_params())
