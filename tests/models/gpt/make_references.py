"""Makes tests/testdata/gpt/references.npz: logits, losses and gradients of published models.

    python tests/models/gpt/make_references.py        # needs torch 2.15 and transformers 5.24; a CPU suffices

The models are GPT-2, Phi and MPT of Hugging Face's transformers, with tiny sizes. Names and shapes of the stored arrays
are those of `models.gpt`. Weights are drawn here, so every array comes from one seed. All arrays are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    GPT2Config,
    GPT2LMHeadModel,
    MptConfig,
    MptForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

PATH = Path(__file__).parents[2] / "testdata" / "gpt" / "references.npz"
VOCAB, LAYERS, SEQ = 64, 2, 16
Arrays = dict[str, Any]
Of = Callable[[Any], Any]


def gpt2() -> Any:
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=16, n_layer=LAYERS, n_head=4, n_inner=48, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def phi() -> Any:
    """Two groups of heads, and half of each head is rotated."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    config = PhiConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SEQ, rope_parameters=rope, attn_implementation="eager",
    )  # fmt: skip
    return PhiForCausalLM(config)


def mpt() -> Any:
    """Six heads, because the slopes of ALiBi differ if the number of heads is no power of two."""
    config = MptConfig(vocab_size=VOCAB, d_model=24, n_heads=6, n_layers=LAYERS, max_seq_len=SEQ)
    return MptForCausalLM(config)


def gpt2_arrays(model: Any, of: Of) -> Arrays:
    def layer(block: Any) -> Arrays:
        qkv, bias = of(block.attn.c_attn.weight).chunk(3, dim=1), of(block.attn.c_attn.bias).chunk(3)
        return {
            **_norm("attention_norm", block.ln_1, of),
            **_norm("ffn_norm", block.ln_2, of),
            **dict(zip(("wq", "wk", "wv"), qkv, strict=True)),
            **dict(zip(("bq", "bk", "bv"), bias, strict=True)),
            "wo": of(block.attn.c_proj.weight),
            "bo": of(block.attn.c_proj.bias),
            "w_up": of(block.mlp.c_fc.weight),
            "b_up": of(block.mlp.c_fc.bias),
            "w_down": of(block.mlp.c_proj.weight),
            "b_down": of(block.mlp.c_proj.bias),
        }

    inner = model.transformer
    ends = {"embedding": of(inner.wte.weight), "positions": of(inner.wpe.weight)}
    return _stacked([layer(block) for block in inner.h]) | ends | _norm("final_norm", inner.ln_f, of)


def phi_arrays(model: Any, of: Of) -> Arrays:
    def layer(block: Any) -> Arrays:
        attention, mlp = block.self_attn, block.mlp
        linear = {
            "q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj, "o": attention.dense,
            "_up": mlp.fc1, "_down": mlp.fc2,
        }  # fmt: skip
        matrices = {f"w{name}": of(module.weight).T for name, module in linear.items()}
        biases = {f"b{name}": of(module.bias) for name, module in linear.items()}
        return _norm("attention_norm", block.input_layernorm, of) | matrices | biases

    inner = model.model
    ends = {
        "embedding": of(inner.embed_tokens.weight),
        "head": of(model.lm_head.weight).T,
        "head_bias": of(model.lm_head.bias),
    }
    return _stacked([layer(block) for block in inner.layers]) | ends | _norm("final_norm", inner.final_layernorm, of)


def mpt_arrays(model: Any, of: Of) -> Arrays:
    def layer(block: Any) -> Arrays:
        query, key, value = (weight.T for weight in of(block.attn.Wqkv.weight).chunk(3))
        return {
            "attention_norm": of(block.norm_1.weight),
            "ffn_norm": of(block.norm_2.weight),
            "wq": query,
            "wk": key,
            "wv": value,
            "wo": of(block.attn.out_proj.weight).T,
            "w_up": of(block.ffn.up_proj.weight).T,
            "w_down": of(block.ffn.down_proj.weight).T,
        }

    inner = model.transformer
    ends = {"embedding": of(inner.wte.weight), "final_norm": of(inner.norm_f.weight)}
    return _stacked([layer(block) for block in inner.blocks]) | ends


def _norm(name: str, module: Any, of: Of) -> Arrays:
    return {name: of(module.weight), f"{name}_bias": of(module.bias)}


def _stacked(layers: list[Arrays]) -> Arrays:
    return {f"layers/{name}": torch.stack([layer[name] for layer in layers]) for name in layers[0]}


def reference(model: Any, arrays: Callable[[Any, Of], Arrays], tokens: np.ndarray, random: Any) -> Arrays:
    """Parameters, logits, the loss and the gradients of `model`."""
    model = model.float().eval()
    draw(model, random)
    inputs, targets = torch.tensor(tokens[:, :-1]), torch.tensor(tokens[:, 1:])
    logits = model(inputs, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    found: Arrays = {"logits": logits, "loss": loss}
    for kind, of in (("param", lambda weight: weight), ("gradient", lambda weight: weight.grad)):
        found |= {f"{kind}/{name}": array for name, array in arrays(model, of).items()}
    return found


def draw(model: Any, random: np.random.Generator) -> None:
    """Norms near one, biases that count, and weights large enough that every nonlinearity counts."""
    for name, weight in sorted(model.named_parameters()):
        values = random.standard_normal(tuple(weight.shape)).astype(np.float32)
        if values.ndim == 2:
            values *= 1.5 / np.sqrt(min(values.shape))
        else:
            values = 0.2 * values + (0.0 if name.endswith("bias") else 1.0)
        weight.data = torch.tensor(values.astype(np.float32))


def main() -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCAB, (3, SEQ + 1))
    found: Arrays = {"tokens": tokens.astype(np.int32)}
    for name, model, arrays in (("gpt2", gpt2(), gpt2_arrays), ("phi", phi(), phi_arrays), ("mpt", mpt(), mpt_arrays)):
        for part, array in reference(model, arrays, tokens, random).items():
            found[f"{name}/{part}"] = array.detach().numpy()
    PATH.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(PATH, allow_pickle=False, **found)
    losses = {name: round(float(found[f"{name}/loss"]), 3) for name in ("gpt2", "phi", "mpt")}
    print(f"{PATH}: {len(found)} arrays, {PATH.stat().st_size:,} bytes; losses {losses}")


if __name__ == "__main__":
    main()
