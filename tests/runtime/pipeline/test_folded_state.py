"""States in pipeline order and back: places and values are exact, and no device holds the whole state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dhelix.errors import DhelixError
from dhelix.models import make_mesh
from dhelix.passes.pipeline_fold.layouts import fold_layout, interleaved_layout, linear_layout
from dhelix.runtime.pipeline import folded_state
from dhelix.runtime.pipeline.folded_state import fold_leaf, fold_state, unfold_leaf, unfold_state

STACKED = (("layers",),)
LAYOUTS = [fold_layout(8, 2), fold_layout(7, 2), linear_layout(5, 4), interleaved_layout(9, 2, 3), fold_layout(32, 4)]


def test_the_u_layout_puts_first_and_last_layers_on_the_first_stage() -> None:
    folded = fold_leaf(jnp.arange(1, 33), fold_layout(32, 4))
    of_stages = np.asarray(folded).reshape(4, -1) - 1
    assert of_stages.tolist() == [
        [0, 1, 2, 3, 28, 29, 30, 31],
        [4, 5, 6, 7, 24, 25, 26, 27],
        [8, 9, 10, 11, 20, 21, 22, 23],
        [12, 13, 14, 15, 16, 17, 18, 19],
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.layers}_on_{layout.stages}")
def test_a_leaf_comes_back_exactly_and_padding_is_zero(layout: Any) -> None:
    x = np.random.default_rng(0).normal(1, 2, (layout.layers, 3)).astype(np.float32)
    folded = fold_leaf(jnp.asarray(x), layout)
    assert folded.shape == (layout.chunks, layout.padded, 3)
    assert np.count_nonzero(folded) == x.size
    for row, chunk in enumerate(chunk for stage in range(layout.stages) for chunk in layout.chunks_of(stage)):
        layers = layout.layers_of(chunk)
        np.testing.assert_array_equal(folded[row, : len(layers)], x[layers.start : layers.stop])
    np.testing.assert_array_equal(unfold_leaf(folded, layout), x)


def state_on(mesh: Any, layers: int) -> Any:
    """Parameters and AdamW's state in the model's order, split over tp; moments differ from the parameters."""
    generator = np.random.default_rng(1)

    def draw(spec: PartitionSpec, *shape: int) -> jax.Array:
        return jax.device_put(generator.normal(size=shape).astype(np.float32), NamedSharding(mesh, spec))

    params = {
        "embedding": draw(PartitionSpec("tp"), 16, 8),
        "layers": {
            "norm": draw(PartitionSpec(), layers, 8),
            "w_in": draw(PartitionSpec(None, None, "tp"), layers, 8, 12),
            "w_out": draw(PartitionSpec(None, "tp"), layers, 12, 8),
        },
    }
    opt_state = optax.adamw(1e-3).init(params)
    return {"params": params, "opt_state": jax.tree.map(lambda x: x + 2, opt_state), "step": jnp.int32(7)}


@pytest.mark.parametrize("layers", [8, 7])
def test_a_whole_state_comes_back_exactly(layers: int) -> None:
    mesh, layout = make_mesh(1, 2, pp=4), fold_layout(layers, 4) if layers == 8 else linear_layout(layers, 4)
    state = state_on(mesh, layers)
    folded = fold_state(state, STACKED, layout, mesh)
    for tree in (folded["params"], folded["opt_state"][0].mu, folded["opt_state"][0].nu):
        w_in = tree["layers"]["w_in"]
        assert w_in.shape == (layout.chunks, layout.padded, 8, 12)
        assert w_in.sharding == NamedSharding(mesh, PartitionSpec("pp", None, None, "tp"))
        assert tree["layers"]["w_out"].sharding.spec == PartitionSpec("pp", None, "tp")
        assert tree["layers"]["norm"].sharding.spec == PartitionSpec("pp")
    np.testing.assert_array_equal(
        folded["opt_state"][0].nu["layers"]["w_in"], fold_leaf(state["opt_state"][0].nu["layers"]["w_in"], layout)
    )
    assert folded["params"]["embedding"] is state["params"]["embedding"]
    assert folded["step"] is state["step"]

    back = unfold_state(folded, STACKED, layout, mesh)
    jax.tree.map(np.testing.assert_array_equal, back, state)
    # Also in the model's order, every stage holds only its share.
    assert back["params"]["layers"]["w_in"].sharding.spec == PartitionSpec(None, "pp", "tp")
    assert back["params"]["layers"]["w_out"].sharding.spec == PartitionSpec(None, "tp", "pp")
    again = fold_state(back, STACKED, layout, mesh)
    jax.tree.map(np.testing.assert_array_equal, again, folded)
    assert again["params"]["layers"]["w_out"].sharding == folded["params"]["layers"]["w_out"].sharding


def test_shapes_are_folded_as_arrays_are() -> None:
    mesh, layout = make_mesh(1, 2, pp=4), fold_layout(9, 4)

    def abstract(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)

    state = state_on(mesh, 9)
    folded = fold_state(state, STACKED, layout, mesh)
    assert fold_state(abstract(state), STACKED, layout, mesh) == abstract(folded)
    assert unfold_state(abstract(folded), STACKED, layout, mesh) == abstract(
        unfold_state(folded, STACKED, layout, mesh)
    )


def test_a_path_may_name_one_leaf() -> None:
    mesh, layout = make_mesh(1, 2, pp=4), fold_layout(8, 4)
    state = state_on(mesh, 8)
    folded = fold_state(state, (("layers", "w_in"),), layout, mesh)
    assert folded["opt_state"][0].mu["layers"]["w_in"].shape == (8, 1, 8, 12)
    assert folded["params"]["layers"]["w_out"] is state["params"]["layers"]["w_out"]


def test_stages_exchange_layers_and_never_gather_them() -> None:
    mesh, layout = make_mesh(1, 2, pp=4), fold_layout(9, 4)
    folded = fold_state(state_on(mesh, 9), STACKED, layout, mesh)["params"]["layers"]
    unfolded = unfold_state(folded, (("w_in",), ("w_out",), ("norm",)), layout, mesh)
    for fold, stacks in ((True, unfolded), (False, folded)):
        move = folded_state.Move(layout, mesh, "pp", fold)
        for stack in stacks.values():
            text = folded_state.move_array.lower(stack, move, move.rest(stack)).compile().as_text() or ""
            assert "all-to-all" in text
            assert "all-gather" not in text


def test_what_cannot_be_folded_is_refused() -> None:
    mesh, layout = make_mesh(1, 2, pp=4), fold_layout(9, 4)
    state = state_on(mesh, 9)
    with pytest.raises(DhelixError, match="2 stages needs a mesh axis 'pp' of that size"):
        fold_state(state, STACKED, fold_layout(9, 2), mesh)
    with pytest.raises(DhelixError, match="no array under blocks has the leading dimensions \\[9\\]"):
        fold_state(state, (*STACKED, ("blocks",)), layout, mesh)
    with pytest.raises(
        DhelixError, match="no array under layers has the leading dimensions \\[8, 2\\] .* unfold a state"
    ):
        unfold_state(state, STACKED, layout, mesh)


def test_layers_on_other_devices_are_refused() -> None:
    mesh, layout = make_mesh(1, 2, pp=4), fold_layout(9, 4)
    restored = jax.device_put(state_on(mesh, 9), jax.devices()[0])
    with pytest.raises(DhelixError, match=r"\['layers'\]\['norm'\] is on 1 .* instead of the mesh's 8: put the whole"):
        fold_state(restored["params"], STACKED, layout, mesh)
