"""`dhelix train --states`: training with sharded states gives the losses of the plain step."""

import re
import shutil

import jax
import pytest
from jax.sharding import PartitionSpec

from dhelix.errors import DhelixError
from dhelix.launch.train import loop, trainer
from dhelix.launch.train.saved.checkpoint import Checkpoints
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import Plan
from dhelix.passes.sharding.factors import Factor, Factors
from dhelix.passes.sharding.sharding_plan import ShardingPlan

SLOW = pytest.mark.slow
TINY = {"layers": 2, "seq": 32, "batch": 8, "microbatches": 2, "mesh": "dp=4,tp=2", "steps": 3}


def losses(**options) -> list[float]:
    run = trainer.prepare(trainer.Options(**TINY | options))
    trainer.start(run)
    return [step.loss for step in loop.train(run)]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return losses(plain=True)


@SLOW
@pytest.mark.parametrize("options", [{}, {"plain": True}], ids=["strands", "plain"])
def test_losses_are_those_of_the_plain_step(options, expected):
    assert losses(states="zero1", **options) == pytest.approx(expected, rel=1e-5)


@SLOW
def test_a_device_holds_its_share_between_steps():
    run = trainer.prepare(trainer.Options(**TINY, states="zero1"))
    trainer.start(run)
    embedding = run.state.params["embedding"]
    assert embedding.addressable_shards[0].data.size * 8 == embedding.size


@pytest.mark.parametrize(("states", "sharding"), [("zero1", "shard_map"), pytest.param("mics", "auto", marks=SLOW)])
def test_a_part_of_the_devices_holds_one_copy(states, sharding, expected):
    run = trainer.prepare(trainer.Options(**TINY, states=states, states_group=2, sharding=sharding, plain=True))
    assert dict(run.training.mesh.shape) == {"dp_1": 2, "dp_0": 2, "tp": 2}
    trainer.start(run)
    embedding = run.state.params["embedding"]
    assert embedding.addressable_shards[0].data.size * 2 * 2 == embedding.size, "split over dp_0 and tp"
    assert [step.loss for step in loop.train(run)] == pytest.approx(expected, rel=1e-5)


def test_a_plan_file_splits_the_mesh(tmp_path):
    file = tmp_path / "plan.json"
    plan = Plan("llama-demo", sharding=ShardingPlan(Factors(Factor(2, 2), optimizer=Factor(2))))
    file.write_text(plan_files.dumps(plan))
    run = trainer.prepare(trainer.Options(**TINY, states=str(file)))
    assert dict(run.training.mesh.shape) == {"dp_1": 2, "dp_0": 2, "tp": 2}
    assert run.training.state_shardings.params["embedding"].spec == PartitionSpec("tp", "dp_0")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"states": "mics"}, "--states mics needs --states_group, the number of devices of dp that hold one copy"),
        ({"states_group": 2}, "--states_group needs --states"),
        ({"states": "zero1", "states_group": 3}, "the factor of optimizer is 3x1, and does not divide mesh = 4x1"),
        ({"states": "mics", "states_group": 2, "sharding": "fsdp"}, "use a mesh with the axis dp"),
    ],
)
def test_groups_that_do_not_fit_are_refused(options, says):
    with pytest.raises(DhelixError, match=re.escape(says)):
        trainer.prepare(trainer.Options(**TINY, **options))


def test_stages_of_a_pipeline_hold_shares():
    options = TINY | {"layers": 4, "mesh": "dp=2,tp=2", "pp": 2}
    training = trainer.prepare(trainer.Options(**options, states="zero1")).training
    for sharding in jax.tree.leaves(training.state_shardings.params["layers"]):
        stage, layers, *within = sharding.spec
        assert (stage, layers) == ("pp", None) and "dp" in jax.tree.leaves(within)
    again = training.from_model_order(training.to_model_order(training.abstract_state()))
    assert again == training.abstract_state()


@pytest.mark.slow
def test_a_pipelines_checkpoint_is_resumed_under_another_plan_without_stages(tmp_path):
    options = TINY | {"steps": 4, "microbatches": 2, "save_every": 2, "plain": True}
    stages = {"pp": 2, "pipeline": "1f1b", "mesh": "dp=2,tp=1"}

    def trained(**given):
        run = trainer.prepare(trainer.Options(**options | given, checkpoint_dir=str(tmp_path)))
        with Checkpoints(tmp_path, trainer.identity(run)) as checkpoints:
            trainer.start(run, checkpoints)
            return [step.loss for step in loop.train(run, checkpoints)]

    whole = trained(states="zero1", **stages)
    shutil.rmtree(tmp_path / "4")  # as if it had been stopped after step 2
    assert trained(states="zero2", mesh="dp=4,tp=1", resume=True) == pytest.approx(whole[2:], rel=1e-5)
