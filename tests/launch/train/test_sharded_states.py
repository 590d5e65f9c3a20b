"""`dhelix train --states`: training with sharded states gives the losses of the plain step."""

import pytest

from dhelix.errors import DhelixError
from dhelix.launch.train import trainer

TINY = {"layers": 2, "seq": 32, "batch": 8, "microbatches": 2, "mesh": "dp=4,tp=2", "steps": 3}


def losses(**options) -> list[float]:
    run = trainer.prepare(trainer.Options(**TINY | options))
    trainer.start(run)
    return [step.loss for step in trainer.train(run)]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return losses(plain=True)


@pytest.mark.parametrize("options", [{}, {"plain": True}], ids=["strands", "plain"])
def test_losses_are_those_of_the_plain_step(options, expected):
    assert losses(states="zero1", **options) == pytest.approx(expected, rel=1e-5)


def test_a_device_holds_its_share_between_steps():
    run = trainer.prepare(trainer.Options(**TINY, states="zero1"))
    trainer.start(run)
    embedding = run.state.params["embedding"]
    assert embedding.addressable_shards[0].data.size * 8 == embedding.size


def test_a_pipeline_places_its_own_states():
    with pytest.raises(DhelixError, match="not sharded with --pp"):
        trainer.prepare(trainer.Options(**TINY | {"layers": 4, "mesh": "dp=2,tp=2", "pp": 2}, states="zero1"))
