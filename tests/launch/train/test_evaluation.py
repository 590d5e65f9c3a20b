"""Evaluation: the loss of documents that are not trained on, without the z-loss, on any mesh."""

from typing import Any

import jax
import pytest

from dhelix.launch.train import loop, trainer

TINY = {"layers": 4, "seq": 16, "steps": 2, "microbatches": 2, "mesh": "dp=2,tp=2", "data": __file__}
EVALUATED = {"eval_every": 1, "eval_batches": 2, "eval_fraction": 0.5}


def evaluations(**options: Any) -> list[float]:
    run = trainer.prepare(trainer.Options(**TINY | EVALUATED | options))
    trainer.start(run)
    return [step.evaluation or 0.0 for step in loop.train(run)]


def test_only_the_forward_pass_is_compiled() -> None:
    run = trainer.prepare(trainer.Options(**TINY))
    arguments = run.training.abstract_state(), run.abstract_batch()
    flops = [
        jax.jit(one).lower(*arguments).compile().cost_analysis()["flops"]  # type: ignore
        for one in (run.training.measure, run.training.train_step)
    ]
    assert flops[0] < 0.5 * flops[1]


def test_the_z_loss_does_not_count() -> None:
    assert evaluations(plain=True, z_loss=0.1, lr=0.0) == pytest.approx(evaluations(plain=True, lr=0.0), rel=1e-6)


@pytest.mark.slow
def test_all_meshes_evaluate_alike() -> None:
    expected = evaluations(plain=True)
    assert expected[1] < expected[0]
    for options in ({"pp": 2, "mesh": "dp=2,tp=2"}, {"states": "zero3"}, {"sharding": "fsdp"}, {"sharding": "auto"}):
        assert evaluations(**options) == pytest.approx(expected, rel=1e-5), options
