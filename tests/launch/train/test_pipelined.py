"""A pipelined train step of Llama compared with the step without a pipeline, and its state in the model's order."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from dhelix.errors import DhelixError
from dhelix.launch.train import trainer
from dhelix.launch.train.meshes.pipelined import PipelinedTraining, make_pipelined_step
from dhelix.models import make_mesh, make_train_step
from dhelix.passes.plans.plan import CollectivesSection, OrderSection, Plan, PlanBody, PlanTarget
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.models.tiny import TINY

CONFIG = dataclasses.replace(TINY, layers=5)
# Adam would not do. With it, a gradient that consists of rounding errors still moves a weight by the learning rate.
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(0.5), optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9)
)  # fmt: skip


def pipelined(**overrides: Any) -> PipelinedTraining:
    config = dataclasses.replace(CONFIG, **overrides)
    return make_pipelined_step(config, make_mesh(2, 2, pp=2), OPTIMIZER, microbatches=3)


def with_choices(**choices: Any) -> PipelinedTraining:
    return make_pipelined_step(CONFIG, make_mesh(2, 2, pp=2), OPTIMIZER, microbatches=3, **choices)


@pytest.mark.slow
def test_the_initial_state_is_the_models_own_folded() -> None:
    training, key = pipelined(), jax.random.key(5)
    plain = make_train_step(CONFIG, make_mesh(2, 2), OPTIMIZER, microbatches=3)
    state = training.init(key)
    assert state.params["layers"]["wq"].shape == (4, 2, 32, 4, 8)
    abstract = training.abstract_state()
    kinds = [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(state)]
    assert kinds == [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(abstract)]
    jax.tree.map(np.testing.assert_array_equal, training.to_model_order(state), plain.init(key))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pp", "dp", "tp", "microbatches", "overrides", "choices"),
    [
        (2, 2, 2, 3, {}, {}),
        (2, 2, 2, 3, {"vocab": 66}, {"schedule": "1f1b"}),  # with own ends, only tp must divide the vocabulary
        (2, 1, 2, 2, {"layers": 4}, {"sharding": "auto"}),
    ],
    ids=["uneven_layers", "1f1b", "auto"],
)
def test_five_steps_are_those_without_a_pipeline(
    pp: int, dp: int, tp: int, microbatches: int, overrides: dict[str, Any], choices: dict[str, Any]
) -> None:
    config, options = dataclasses.replace(CONFIG, **overrides), {"xla_backend_optimization_level": 0}
    training = make_pipelined_step(config, make_mesh(dp, tp, pp=pp), OPTIMIZER, microbatches, **choices)
    step = strand_interleave(
        training.train_step, microbatches=microbatches, pipeline=training.fold, compiler_options=options
    )
    plain = make_train_step(config, make_mesh(dp, tp), OPTIMIZER, microbatches)
    plain_step = jax.jit(plain.train_step, compiler_options=options)

    state, expected = training.init(jax.random.key(0)), plain.init(jax.random.key(0))
    for number in range(5):
        shape = (2 * microbatches * dp, config.seq + 1)
        batch: Any = {"tokens": np.random.default_rng(number).integers(0, config.vocab, shape).astype(np.int32)}
        state, metrics = step(state, batch)
        expected, expected_metrics = plain_step(expected, batch)
        for name, value in expected_metrics.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-6)
    for (path, leaf), like in zip(
        jax.tree_util.tree_leaves_with_path(training.to_model_order(state)), jax.tree.leaves(expected), strict=True
    ):
        error = np.abs(np.asarray(leaf) - np.asarray(like)).max() / np.abs(like).max()
        assert error <= 1e-6, f"{jax.tree_util.keystr(path)}: {error}"
    # Padding is still zero, so training changed only the model's layers.
    for name, folded in state.params["layers"].items():
        assert np.count_nonzero(folded) == np.count_nonzero(expected.params["layers"][name])


@pytest.mark.slow
def test_a_state_in_the_models_order_comes_from_any_number_of_stages() -> None:
    two = pipelined()
    four = make_pipelined_step(
        dataclasses.replace(CONFIG, layers=5), make_mesh(1, 2, pp=4), OPTIMIZER, microbatches=3, schedule="1f1b"
    )
    state = two.init(jax.random.key(1))
    stored = two.to_model_order(state)
    expected = four.to_model_order(four.abstract_state())
    assert jax.tree.map(lambda x: (x.shape, x.dtype), stored) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    there = four.from_model_order(jax.device_put(stored, jax.tree.map(lambda x: x.sharding, expected)))
    for leaf, like in zip(jax.tree.leaves(there), jax.tree.leaves(four.abstract_state()), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (like.shape, like.dtype, like.sharding)
    jax.tree.map(np.testing.assert_array_equal, four.to_model_order(there), stored)


@pytest.mark.parametrize(
    ("choices", "ends"),
    [
        ({}, ("tp", "pp")),
        ({"schedule": "1f1b"}, "tp"),
        ({"schedule": "interleaved", "chunks_per_stage": 1}, "tp"),
        ({"schedule": "interleaved_si", "chunks_per_stage": 1}, ("tp", "pp")),
        ({"schedule": "1f1b", "shared_ends": True}, ("tp", "pp")),
        ({"shared_ends": False}, "tp"),
        ({"sharding": "auto"}, "tp"),
    ],
)
def test_stages_that_wait_for_neighbours_alone_share_no_ends(choices: dict[str, Any], ends: Any) -> None:
    training = with_choices(**choices)
    params = training.abstract_state().params
    assert params["embedding"].sharding.spec == PartitionSpec(ends)
    assert params["head"].sharding.spec == PartitionSpec(None, ends)
    shared = "pp" in ends
    rows = jax.ShapeDtypeStruct((6, 15), "int32")  # 14 tokens are divisible by tp, but not by tp x pp
    if shared:
        with pytest.raises(ValueError, match="is not divisible by tp x pp 4"):
            training.check_batch({"tokens": rows})
    else:
        training.check_batch({"tokens": rows})


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"vocab": 66}, "vocab = 66 is not divisible by tp x pp = 4"),
        ({"kv_heads": 1}, "kv_heads = 1 is not divisible by tp = 2"),
        ({"layers": 3}, "3 layers do not fill 4 chunks on 2 stages"),
        ({"scan_layers": False}, "a pipeline needs stacked layers"),
    ],
)
def test_what_makes_no_pipeline_is_refused(overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pipelined(**overrides)


def test_batches_and_meshes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="use a multiple of 6 rows"):
        pipelined().check_batch({"tokens": jax.ShapeDtypeStruct((8, 17), "int32")})
    with pytest.raises(ValueError, match="the mesh must have the Auto axes 'pp', 'dp' and 'tp'"):
        make_pipelined_step(CONFIG, make_mesh(2, 2), OPTIMIZER, microbatches=3)
    with pytest.raises(DhelixError, match="schedule='zigzag'"):
        with_choices(schedule="zigzag")
    with pytest.raises(DhelixError, match="sharding='manual' does not work in a pipeline"):
        with_choices(sharding="manual")
    with pytest.raises(DhelixError, match="needs sharding='shard_map'"):
        with_choices(sharding="auto", shared_ends=True)
    with pytest.raises(DhelixError, match="attention='cudnn' in a pipeline needs sharding='shard_map'"):
        config = dataclasses.replace(CONFIG, attention="cudnn")
        make_pipelined_step(config, make_mesh(2, 2, pp=2), OPTIMIZER, microbatches=3, sharding="auto")


def test_a_plan_for_a_step_without_a_pipeline_is_refused_and_stops_nothing() -> None:
    """The plan asks for passes that do not run on a pipeline."""
    order = OrderSection((PlanBody("both strands", "0123456789abcdef", 1, (), ()),))
    plan = Plan("a step", PlanTarget.of("H200", "nvlink", "default"), CollectivesSection(reduced=1), order)
    training = with_choices(schedule="1f1b")
    step = trainer.make_step(training, False, StepOptions(plan=plan))
    report = step.preview(training.abstract_state(), training.abstract_batch(6))
    assert "gradient-reduction" not in [entry.name for entry in report]


def test_a_checkpoint_of_adafactor_gets_the_shardings_of_the_step() -> None:
    """Else the second step would be compiled again, and on CPU devices its collectives may wait for one another."""
    given = trainer.Options(layers=4, seq=16, pp=2, mesh="dp=1,tp=2", optimizer="adafactor", data=__file__)
    training = trainer.prepare(given).training
    saved = jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        training.to_model_order(training.abstract_state()),
    )
    state = training.from_checkpoint(saved)
    same = jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), state, training.state_shardings)
    assert all(jax.tree.leaves(same))
    said = list[str]()
    trainer.prepare(dataclasses.replace(given, layers=5), said.append)
    assert "3 of 8 places of the pipeline are padding" in said[-1]
