"""Makes tests/testdata/huggingface: tiny checkpoints that transformers wrote, and their logits.

    python tests/models/huggingface/make_references.py      # needs torch 2.15 and transformers 5.24; a CPU suffices

Each folder is what `save_pretrained` writes: config.json and safetensors. `logits.npz` has the tokens and the logits of
each model, computed in float32. Weights are drawn here, so every number comes from one seed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

FOLDER = Path(__file__).parents[2] / "testdata" / "huggingface"
SEQ = 16
SIZES = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 32, "attn_implementation": "eager",
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}


def llama() -> Any:
    """Llama 3.1's rotary embedding, which changes two of the four frequencies."""
    rope = {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = transformers.LlamaConfig(**SIZES, intermediate_size=24, rms_norm_eps=1e-5, rope_parameters=rope)
    return transformers.LlamaForCausalLM(config)


def tied() -> Any:
    """Saved in bfloat16, in several files."""
    config = transformers.LlamaConfig(**SIZES, intermediate_size=24, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config).bfloat16()


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=SEQ, n_embd=16, n_layer=2, n_head=4, n_inner=48, attn_implementation="eager"
    )
    return transformers.GPT2LMHeadModel(config)


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SIZES, **EXPERTS, intermediate_size=12, sliding_window=None)
    return transformers.MixtralForCausalLM(config)


def phimoe() -> Any:
    """All biases. Routing within a large margin, so that the softmax of a choice has several experts.

    Rows are not longer than in training: for longer ones, transformers takes the short factors, too.
    """
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0, 1.1, 1.5, 2.0],
        "long_factor": [1.0, 2.0, 8.0, 20.0], "short_mscale": 1.2, "long_mscale": 1.3,
        "original_max_position_embeddings": SEQ,
    }  # fmt: skip
    config = transformers.PhimoeConfig(
        **SIZES, **EXPERTS, intermediate_size=12, sliding_window=None, attention_bias=True, lm_head_bias=True,
        router_jitter_noise=0.2, rope_parameters=rope,
    )  # fmt: skip
    return transformers.PhimoeForCausalLM(config)


MODELS = {"llama": llama, "tied": tied, "gpt2": gpt2, "mixtral": mixtral, "phimoe": phimoe}


def draw(model: Any, random: np.random.Generator) -> None:
    """Norms near one, biases that count, and weights large enough that every nonlinearity counts."""
    for name, weight in sorted(model.named_parameters()):
        values = random.standard_normal(tuple(weight.shape)).astype(np.float32)
        if values.ndim > 1:
            values *= 1.5 / np.sqrt(min(values.shape[-2:]))
        else:
            values = 0.2 * values + (0.0 if name.endswith("bias") else 1.0)
        weight.data = torch.tensor(values).to(weight.dtype)


def main() -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(0, 64, (3, SEQ))
    found = {"tokens": tokens.astype(np.int32)}
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name, build in MODELS.items():
        model = build().eval()
        draw(model, random)
        model.save_pretrained(FOLDER / name, **({"max_shard_size": "3KB"} if name == "tied" else {}))
        (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
        # The whole model in bfloat16 would also round the frequencies of the rotary embedding, so it is read again.
        wide = type(model).from_pretrained(FOLDER / name, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            found[name] = wide(torch.tensor(tokens), use_cache=False).logits.numpy()
    np.savez_compressed(FOLDER / "logits.npz", allow_pickle=False, **found)
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    print(f"{FOLDER}: {len(files)} files, {sum(path.stat().st_size for path in files):,} bytes")


if __name__ == "__main__":
    main()
