"""Advice for steps that hold one micro-batch: it names the trainer whose step it is, and what to change there."""

import jax
import jax.numpy as jnp
import optax
import pytest

from dhelix.passes import jax_compat
from dhelix.runtime.undecorated.across_calls import explained

WHY = "jit_step: the step does not take gradients in a loop over micro-batches: give microbatches= of 2 or more"


@pytest.mark.parametrize(
    ("place", "advice"),
    [
        ("maxtext/trainers/pre_train/train.py", "MaxText: set gradient_accumulation_steps to 2 or more"),
        ("levanter/trainer.py", "Levanter: set trainer.per_device_parallelism below"),
        ("tunix/sft/peft_trainer.py", "override create_train_step_fn with a loop"),
        ("keras/src/backend/jax/trainer.py", "override train_step with a loop"),
        ("keras/src/layers/core/dense.py", "give all micro-batches of an optimizer step to one call"),
    ],
)
def test_a_trainer_is_known_by_the_files_that_its_step_names(place: str, advice: str) -> None:
    text = explained(WHY, "/site-packages/" + place + " MultiSteps.update" * ("tunix" in place))
    assert advice in text
    assert text.startswith("jit_step: the step does not take gradients") and "microbatches=" not in text


def test_other_reasons_stay() -> None:
    assert explained("two strands are not faster", "keras/src/backend/jax/trainer.py") == "two strands are not faster"


@pytest.mark.parametrize("accumulates", [True, False])
def test_multi_steps_is_recognized_without_names_of_its_state(accumulates: bool) -> None:
    # Flax NNX numbers the leaves of an optimizer's state. SGD with momentum comes from the same file of optax.
    inner = optax.sgd(1e-2, momentum=0.9)
    optimizer = optax.MultiSteps(inner, 4) if accumulates else inner
    leaves, tree = jax.tree.flatten(optimizer.init(jnp.ones(4)))

    def step(params, leaves):
        grads = jax.grad(lambda p: jnp.sum(p**2))(params)
        return optimizer.update(grads, jax.tree.unflatten(tree, leaves), params)

    program = jax_compat.debug_text(jax.jit(step).lower(jnp.ones(4), leaves))
    assert ("optax.MultiSteps" in explained(WHY, program)) == accumulates
