"""Training from a checkpoint of Hugging Face, writing one, and a few tokens of a trained model."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from dhelix.errors import DhelixError
from dhelix.launch import cli
from dhelix.launch.train import loop, trainer
from dhelix.launch.train.data.tokenizers import Bytes
from dhelix.launch.train.generation import Generated, generate
from dhelix.launch.train.saved import weights

MODELS = Path(__file__).parents[3] / "testdata" / "huggingface"


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 64, 2000).astype(np.uint16))
    return str(tmp_path / "ids.npy")


def run_of(**options: Any) -> loop.Run:
    given: dict[str, Any] = {"steps": 1, "microbatches": 2} | options
    run = trainer.prepare(trainer.Options(**given))
    trainer.start(run)
    return run


@pytest.mark.parametrize("mesh", [{"mesh": "dp=2,tp=2"}, {"mesh": "dp=2,tp=1", "sharding": "fsdp"}])
def test_what_is_read_is_written_bit_for_bit(mesh: dict[str, Any], tokens: str, tmp_path: Path) -> None:
    run = run_of(init_from=str(MODELS / "llama"), data=tokens, seq=16, **mesh)
    weights.export(run, str(tmp_path / "out"))
    expected, found = (load_file(folder / "model.safetensors") for folder in (MODELS / "llama", tmp_path / "out"))
    assert expected.keys() == found.keys()
    fields = [json.loads((folder / "config.json").read_text()) for folder in (MODELS / "llama", tmp_path / "out")]
    assert len({one["max_position_embeddings"] for one in fields}) == 1, "rows of the run are shorter"
    assert all(expected[name].tobytes() == found[name].tobytes() for name in expected)


@pytest.mark.slow
def test_a_pipeline_starts_from_the_same_weights(tokens: str) -> None:
    losses = [
        next(run_of(init_from=str(MODELS / "llama"), data=tokens, plain=True, **how).take_steps()).loss
        for how in (
            {"mesh": "dp=1,tp=1", "microbatches": 4},
            {"mesh": "dp=1,tp=2", "pp": 2, "pipeline": "1f1b", "microbatches": 4},
        )
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_trained_model_is_written_with_its_tokenizer_and_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "--layers=2", "--seq=32", "--steps=1", "--mesh=dp=1,tp=2", f"--data={__file__}", "--plain"]
    more = [f"--export={tmp_path / 'out'}", "--generate=import ", "--generate_tokens=3"]
    with pytest.raises(SystemExit) as stopped:
        cli.main([*arguments, *more])
    out = capsys.readouterr().out.splitlines()
    assert not stopped.value.code and "wrote the model to" in out[-4]
    assert out[-3:-1] == ['prompt: "import "', "the model adds 3 tokens:"] and out[-1].startswith("| ")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["architectures"] == ["LlamaForCausalLM"] and fields["num_hidden_layers"] == 2
    with pytest.raises(SystemExit):
        cli.main([*arguments, *more])
    assert "exists; give a new folder" in capsys.readouterr().err


def test_the_likeliest_tokens_follow(tmp_path: Path) -> None:
    """A model that has learnt one sentence by heart says it."""
    (tmp_path / "text").write_text("abcdefgh" * 40)
    run = run_of(layers=1, seq=32, steps=60, lr=1e-2, mesh="dp=1,tp=1", data=str(tmp_path / "text"), plain=True)
    loop.train(run)
    assert generate(run, Bytes(), "abcd", 8) == Generated("abcd", "efghabcd", 8, False)
    assert generate(run, Bytes(), "abcd", 40).text == "efgh" + "abcdefgh" * 3
    with pytest.raises(DhelixError, match="40 tokens of text; give 1 or more, fewer than --seq 32"):
        generate(run, Bytes(), "abcd" * 10, 1)


def test_what_a_model_adds_is_told_from_the_prompt() -> None:
    shown = str(Generated('a "', "\n\n b", 4, True))
    assert shown == 'prompt: "a \\""\nthe model adds 4 tokens and ends the document:\n| \n| \n|  b'
    assert str(Generated("a", "\x1b[2J\tb\r", 4, False)).endswith("| \\x1b[2J\tb\\r")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": 3}, "leave --layers out"),
        ({"vocab": 64}, "leave --vocab out"),
        ({"data": __file__}, "has no tokenizer.json; give --tokenizer"),
        ({"init_from": "/nowhere"}, "/nowhere"),
        ({"init_from": str(MODELS / "gpt2"), "seq": 8}, "has a table of 16 positions"),
        ({"generate": ""}, "0 tokens of text; give 1 or more"),
    ],
)
def test_bad_checkpoints_are_refused(options: dict[str, Any], says: str, tokens: str) -> None:
    given = trainer.Options(init_from=str(MODELS / "llama"), data=tokens)
    with pytest.raises(DhelixError, match=says):
        trainer.prepare(dataclasses.replace(given, **options))


@pytest.mark.parametrize("model", ["gpt2", "llama", "mixtral", "phimoe", "tied"])
def test_what_a_checkpoint_says_of_a_model_is_json(model: str, tokens: str) -> None:
    run = trainer.prepare(trainer.Options(init_from=str(MODELS / model), data=tokens, microbatches=2, mesh="dp=2,tp=1"))
    assert json.loads(json.dumps(trainer.identity(run)))["model"]["hidden"] == run.training.config.hidden


def test_a_state_keeps_its_shardings(tokens: str) -> None:
    run = run_of(init_from=str(MODELS / "llama"), data=tokens, mesh="dp=2,tp=2", states="zero3")
    expected = run.training.state_shardings
    same = jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), run.state, expected)
    assert all(jax.tree.leaves(same))
