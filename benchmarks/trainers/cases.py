"""The trainers of `benchmarks/trainers/run.py`: how each is started, and where it writes its losses."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

HERE = Path(__file__).parent
STEPS = 10
type Losses = tuple[float, ...]


@dataclass(frozen=True)
class Case:
    """One trainer with one model on one mesh of 8 CPU devices.

    Attributes:
      name: name for the command line and the tables.
      trainer: the package, whose version is recorded; "" for a program of this folder without one.
      mesh: the mesh, for people.
      environment: name of the virtual environment; its pins are in `<environment>.txt`.
      arguments: what follows `python`, for a folder of the run.
      losses: reads the losses from the folder of the run and the printed text.
      first: pattern of the line with the first loss, which ends the start.
      variables: additional environment variables.
    """

    name: str
    trainer: str
    mesh: str
    environment: str
    arguments: Callable[[Path], list[str]]
    losses: Callable[[Path, str], Losses]
    first: str
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def _maxtext(name: str, mesh: str, **chosen: object) -> Case:
    settings = {
        "run_name": "run",
        "hardware": "cpu",
        "skip_jax_distributed_system": "true",
        "dataset_type": "synthetic",
        "steps": STEPS,
        "enable_checkpointing": "false",
        "enable_goodput_recording": "false",
        "monitor_goodput": "false",
        "log_config": "false",
        "jax_cache_dir": "",
        "gradient_accumulation_steps": 4,
        "per_device_batch_size": 4,
        "max_target_length": 64,
        "base_emb_dim": 64,
        "base_num_query_heads": 4,
        "base_num_kv_heads": 4,
        "head_dim": 16,
        "base_mlp_dim": 128,
        "base_num_decoder_layers": 2,
        "vocab_size": 256,
        "attention": "dot_product",
        "dtype": "float32",
        "weight_dtype": "float32",
        "matmul_precision": "highest",
        **chosen,
    }

    def arguments(folder: Path) -> list[str]:
        given = {**settings, "base_output_directory": folder, "metrics_file": folder / "metrics.jsonl"}
        return ["-m", "maxtext.trainers.pre_train.train", *(f"{key}={value}" for key, value in given.items())]

    def losses(folder: Path, text: str) -> Losses:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found = tuple(row["learning/loss"] for row in rows)
        printed = re.findall(r"completed step: \d+, .* loss: ([\d.]+), lm_loss", text)
        if printed and printed != [f"{loss:.3f}" for loss in found]:
            raise ValueError(f"MaxText printed {printed}, and wrote {found} into its file")
        return found

    return Case(name, "maxtext", mesh, "maxtext", arguments, losses, "completed step: 0,", {"DECOUPLE_GCLOUD": "TRUE"})


_LEVANTER = """\
data:
  tokenizer: {folder}/tokenizer
  cache_dir: {folder}/cache
  shuffle: false
  components:
    numbers:
      source: {{type: url, train_urls: [{folder}/numbers.jsonl]}}
model:
  type: {model}
  tokenizer: {folder}/tokenizer
  max_seq_len: 64
  hidden_dim: 64
  num_heads: 4
  num_layers: 2
  {more}
trainer:
  id: run
  tracker: {{type: json_logger}}
  mp: p=f32,c=f32
  train_batch_size: 32
  per_device_parallelism: {rows}
  num_train_steps: {steps}
  steps_per_eval: 1000
  mesh: {{axes: {axes}}}
  require_accelerator: false
  log_jaxprs: false
  log_xla_hlo: false
  log_dir: {folder}/logs
  load_checkpoint: false
  checkpointer: {{base_path: {folder}/checkpoints, save_interval: 100h, keep: []}}
optimizer: {{learning_rate: 1.0e-3}}
"""


def _write_numbers(folder: Path) -> None:
    """A file of random numbers as text, and a tokenizer that knows these numbers."""
    made = random.Random(0)
    rows = [" ".join(str(made.randrange(255)) for _ in range(256)) for _ in range(400)]
    (folder / "numbers.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    end = {"id": 255, "content": "<end>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    words = {str(n): n for n in range(255)} | {"<end>": 255}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [end],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "0"},
    }
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "bos_token": "<end>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(about))


def _levanter(name: str, mesh: str, model: str, axes: str, rows: int, more: str = "") -> Case:
    def arguments(folder: Path) -> list[str]:
        _write_numbers(folder)
        config = _LEVANTER.format(folder=folder, model=model, axes=axes, steps=STEPS, rows=rows, more=more)
        (folder / "config.yaml").write_text(config)
        return ["-m", "levanter.main.train_lm", "--config_path", str(folder / "config.yaml")]

    def losses(folder: Path, text: str) -> Losses:
        rows = [json.loads(line) for line in re.findall(r'\{"tracker".*"event": "log".*\}', text)]
        found = {row["step"]: row["metrics"]["train/loss"] for row in rows if "train/loss" in row["metrics"]}
        return tuple(found.values())  # it writes the last step more than once

    offline = {"HF_HUB_OFFLINE": "1"}
    return Case(name, "marin-levanter", mesh, "levanter", arguments, losses, '"train/loss"', offline)


def _own(name: str, mesh: str, environment: str, script: str, *words: str, trainer: str = "") -> Case:
    return Case(
        name,
        trainer,
        mesh,
        environment,
        lambda folder: [str(HERE / script), *words],
        lambda folder, text: tuple(float(found) for found in re.findall(r"^loss (\S+)$", text, re.MULTILINE)),
        "^loss ",
    )


def _accumulating(name: str, mesh: str, trainer: str) -> tuple[Case, Case]:
    """A trainer that accumulates across calls: with a step of one's own that loops, and as it is."""
    script = f"{name}_program.py"
    return (
        _own(name, mesh, name, script, trainer=trainer),
        _own(f"{name}-across-calls", mesh, name, script, "across-calls", trainer=trainer),
    )


CASES = (
    _maxtext("maxtext", "FSDP 8", ici_fsdp_parallelism=8),
    _maxtext("maxtext-tp", "FSDP 2 x TP 4", ici_fsdp_parallelism=2, ici_tensor_parallelism=4),
    _maxtext(
        "maxtext-moe",
        "FSDP 2 x EP 4",
        ici_fsdp_parallelism=2,
        ici_expert_parallelism=4,
        decoder_block="mixtral",
        num_experts=8,
        num_experts_per_tok=2,
        base_moe_mlp_dim=128,
        sparse_matmul="false",
        megablox="false",
        capacity_factor=2.0,
    ),
    _levanter("levanter-gpt2", "FSDP 8", "gpt2", "{data: -1, replica: 1, model: 1}", 1),
    _levanter(
        "levanter-llama",
        "FSDP 2 x TP 4",
        "llama",
        "{data: 2, replica: 1, model: 4}",
        4,
        "num_kv_heads: 4\n  intermediate_dim: 128",
    ),
    _own("nnx", "FSDP 8", "maxtext", "nnx_program.py"),
    _own("equinox", "DP 2 x TP 4", "levanter", "equinox_program.py"),
    *_accumulating("keras", "DP 8", "keras"),
    *_accumulating("tunix", "FSDP 8", "google-tunix"),
)
