"""Checkpoints that transformers wrote (`make_references.py`): the same logits here, and the same bytes back."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dhelix.models.common.mesh import make_mesh, on_mesh
from dhelix.models.families import family_of
from dhelix.models.huggingface import files
from dhelix.models.huggingface.configs import read_config
from dhelix.models.huggingface.weights import read, write
from dhelix.models.train_step import make_train_step
from dhelix.tests.models.huggingface.stored import FOLDER, assert_same_bytes, copied, tensors_of

MODELS = ["llama", "tied", "gpt2", "mixtral", "phimoe"]


def logits(config: Any, params: Any) -> np.ndarray:
    """The logits of the stored tokens, in float32."""
    wide, family = dataclasses.replace(config, dtype="float32"), cast(Any, family_of(config))
    tokens = np.load(FOLDER / "logits.npz")["tokens"]
    take = jax.jit(lambda params: family.logits(wide, params, tokens))
    found = take(jax.tree.map(lambda weight: weight.astype("float32"), params))
    return found[0] if isinstance(found, tuple) else found


def assert_equal_trees(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, leaf), like in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert leaf.dtype == like.dtype
        np.testing.assert_array_equal(leaf, like, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_and_the_bytes_come_back(name: str, tmp_path: Path) -> None:
    config, params = read(FOLDER / name)
    assert config.param_dtype == ("bfloat16" if name == "tied" else "float32")
    np.testing.assert_allclose(logits(config, params), np.load(FOLDER / "logits.npz")[name], atol=1e-4)
    write(tmp_path / name, config, params)
    assert_same_bytes(tensors_of(FOLDER / name), tensors_of(tmp_path / name))
    again, same = read(tmp_path / name)
    assert again == config
    assert_equal_trees(same, params)


@pytest.mark.parametrize("name", MODELS)
def test_one_dict_for_each_layer(name: str, tmp_path: Path) -> None:
    _, stacked = read(FOLDER / name)
    config, params = read(FOLDER / name, config=read_config(FOLDER / name, scan_layers=False))
    layers = [jax.tree.map(lambda weight, i=i: weight[i], stacked["layers"]) for i in range(config.layers)]
    assert_equal_trees(params, stacked | {"layers": layers})
    write(tmp_path / name, config, params)
    assert_same_bytes(tensors_of(FOLDER / name), tensors_of(tmp_path / name))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_on_a_mesh_are_read_and_written_in_parts(name: str, tmp_path: Path) -> None:
    config, whole = read(FOLDER / name)
    mesh = make_mesh(2, 2, ep=2)
    specs = on_mesh(family_of(config).param_specs(config), mesh)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    _, params = read(FOLDER / name, shardings=shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings
    assert_equal_trees(params, whole)
    write(tmp_path / name, config, params)
    assert_same_bytes(tensors_of(FOLDER / name), tensors_of(tmp_path / name))


@pytest.mark.parametrize("name", ["llama", "phimoe"])
def test_a_step_starts_from_a_checkpoint(name: str) -> None:
    """The shardings of FSDP, and other types than those of the files."""
    config = read_config(FOLDER / name, remat="full")
    mesh = make_mesh(2, 2, ep=2 if name == "phimoe" else None)
    training = make_train_step(config, mesh, optax.sgd(0.1), 1, "fsdp")
    found, params = read(FOLDER / name, "bfloat16", training.state_shardings.params, config)
    assert found == dataclasses.replace(config, param_dtype="bfloat16")
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == training.state_shardings.params
    assert_equal_trees(params, read(FOLDER / name, "bfloat16")[1])


def test_any_dimension_may_be_split() -> None:
    """A part of each head is no box of the tensor, so a larger box is read."""
    mesh, whole = make_mesh(2, 2), read(FOLDER / "llama")[1]
    shardings = jax.tree.map(
        lambda leaf: NamedSharding(mesh, PartitionSpec(*[None] * (leaf.ndim - 2), *(["dp", "tp"][-leaf.ndim :]))), whole
    )
    _, params = read(FOLDER / "llama", shardings=shardings)
    assert params["layers"]["wq"].addressable_shards[0].data.shape == (2, 16, 2, 4)
    assert_equal_trees(params, whole)


def test_each_part_is_read_once_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of a half of each tensor: half of the values are read."""
    read_values, counted = files.Files.values, []

    def values(self: Any, name: str, box: Any) -> np.ndarray:
        found = read_values(self, name, box)
        counted.append(found.size)
        return found

    monkeypatch.setattr(files.Files, "values", values)
    config, mesh = read_config(FOLDER / "gpt2"), make_mesh(2, 1)
    shapes = jax.eval_shape(lambda: family_of(config).init_params(config, jax.random.key(0)))
    replicated = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), shapes)
    _, params = read(FOLDER / "gpt2", shardings=replicated)
    assert sum(counted) == sum(leaf.size for leaf in jax.tree.leaves(params)) == config.parameter_count


def test_other_types_and_several_files(tmp_path: Path) -> None:
    config, params = read(FOLDER / "tied", "float32")
    assert config.param_dtype == "float32" and config.dtype == "bfloat16"
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    write(tmp_path / "half", config, params, "bfloat16", file_bytes=4000)
    written = sorted(path.name for path in (tmp_path / "half").iterdir())
    assert written[:2] == ["config.json", "model-00001-of-00004.safetensors"] and len(written) == 6
    assert_same_bytes(tensors_of(tmp_path / "half"), tensors_of(FOLDER / "tied"))
    assert_equal_trees(read(tmp_path / "half")[1], read(FOLDER / "tied")[1])


def test_names_and_buffers_of_published_files(tmp_path: Path) -> None:
    """GPT-2 was published without the prefix and with masks; older Llamas with frequencies; others with a tied head."""
    stored = tensors_of(FOLDER / "gpt2")
    bare = {name.removeprefix("transformer."): array for name, array in stored.items()}
    mask = {"h.0.attn.bias": np.ones((1, 1, 16, 16), "float32"), "h.1.attn.masked_bias": np.full(1, -1e4)}
    assert_equal_trees(read(copied("gpt2", tmp_path, bare | mask))[1], read(FOLDER / "gpt2")[1])
    stored = tensors_of(FOLDER / "tied")
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, "float32"),
        "lm_head.weight": stored["model.embed_tokens.weight"],
    }
    assert_equal_trees(read(copied("tied", tmp_path, stored | more))[1], read(FOLDER / "tied")[1])
