"""The programs of docs/guide/pipeline.md run as they are printed, and give the results of the plain step."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "pipeline.md"


def plain_step(names: dict[str, Any], params: Any) -> Any:
    """Parameters and loss after one step of the page's model on one device."""

    def step(params: Any) -> Any:
        loss, grads = jax.value_and_grad(names["loss_fn"])(params, np.asarray(names["tokens"]))
        updates, _ = names["optimizer"].update(grads, names["optimizer"].init(params), params)
        return optax.apply_updates(params, updates), loss

    return jax.jit(step)(params)


def start(names: dict[str, Any]) -> Any:
    """The parameters that the page's first program begins with."""
    draw = names["draw"]
    layers = {"up": draw(6, 64, 128), "down": draw(6, 128, 64)}
    return {"embedding": draw(256, 64), "head": draw(64, 256), "layers": layers}


@pytest.mark.slow
def test_both_programs_take_the_plain_step() -> None:
    automatic, by_hand = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(automatic, str(PAGE), "exec"), names)
    params = start(names)
    expected = plain_step(names, params)
    results = [(names["params"], names["loss"])]

    exec(compile(by_hand, str(PAGE), "exec"), names)
    placed = jax.device_put(params, jax.tree.map(lambda s: jax.NamedSharding(names["mesh"], s), names["specs"]))
    state = names["fold"].fold((placed, names["optimizer"].init(placed)))
    state, loss = names["train_step"](state, names["tokens"])
    results.append((names["fold"].unfold(state)[0], loss))
    for result in results:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-5), result, expected)
