"""Makes tests/testdata/moe/references.npz: outputs and gradients of published implementations of experts.

    python tests/models/moe/make_references.py        # needs torch 2.11 and transformers 5.17; a CPU suffices

Mixtral of Hugging Face's transformers is a whole model whose experts are chosen and weighted as in `models.moe`. The
experts of DeepSeek-V2 have shared ones and do not scale weights. Names and shapes of the stored arrays are those of
`models.moe`. Weights are drawn here, so every array comes from one seed. All arrays are float32.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers.models.deepseek_v2 import (  # pyright: ignore[reportMissingImports]
    configuration_deepseek_v2,
    modeling_deepseek_v2,
)
from transformers.models.mixtral import (  # pyright: ignore[reportMissingImports]
    configuration_mixtral,
    modeling_mixtral,
)
from transformers.models.switch_transformers.modeling_switch_transformers import (  # pyright: ignore[reportMissingImports]
    router_z_loss_func,
)

PATH = Path(__file__).parents[2] / "testdata" / "moe" / "references.npz"
BALANCE, Z = 0.5, 0.25  # weights of the routing losses: large, so that their gradients count
Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    vocab: int = 64
    hidden: int = 32
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    ffn: int = 24
    seq: int = 16
    experts: int = 4
    chosen: int = 2


def whole_model(sizes: Sizes, random: np.random.Generator) -> Arrays:
    """Mixtral: `tokens`, `mixtral/param/...`, `mixtral/gradient/...`, logits and the losses."""
    config = configuration_mixtral.MixtralConfig(
        vocab_size=sizes.vocab, hidden_size=sizes.hidden, intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim, num_local_experts=sizes.experts, num_experts_per_tok=sizes.chosen,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        max_position_embeddings=sizes.seq, sliding_window=None, tie_word_embeddings=False,
        attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    model = modeling_mixtral.MixtralForCausalLM(config).float()
    draw(model, random)
    tokens = random.integers(0, sizes.vocab, (3, sizes.seq + 1))
    inputs, targets = torch.tensor(tokens[:, :-1]), torch.tensor(tokens[:, 1:])
    out = model(inputs, output_router_logits=True, use_cache=False)
    entropy = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
    # Both losses of a layer, averaged over layers. Mixtral's balance is k times that of Switch Transformers.
    balance = torch.stack(
        [
            modeling_mixtral.load_balancing_loss_func((layer,), sizes.experts, sizes.chosen) / sizes.chosen
            for layer in out.router_logits
        ]
    ).mean()
    z = torch.stack([router_z_loss_func(layer[None]) for layer in out.router_logits]).mean()
    (entropy + BALANCE * balance + Z * z).backward()
    found: Arrays = {"tokens": tokens.astype(np.int32), "mixtral/logits": out.logits}
    found |= {"mixtral/cross_entropy": entropy, "mixtral/balance": balance, "mixtral/z": z}
    for kind, of in (("param", lambda weight: weight), ("gradient", lambda weight: weight.grad)):
        for name, array in mixtral_arrays(model, sizes, of).items():
            found[f"mixtral/{kind}/{name}"] = array
    return found


def mixtral_arrays(model: Any, sizes: Sizes, of: Any) -> Arrays:
    def heads(weight: Any, count: int) -> Any:
        return of(weight).T.reshape(sizes.hidden, count, sizes.head_dim)

    def layer(block: Any) -> Arrays:
        attention, experts = block.self_attn, block.mlp.experts
        gate, up = of(experts.gate_up_proj).chunk(2, dim=1)
        return {
            "attention_norm": of(block.input_layernorm.weight),
            "wq": heads(attention.q_proj.weight, sizes.heads),
            "wk": heads(attention.k_proj.weight, sizes.kv_heads),
            "wv": heads(attention.v_proj.weight, sizes.kv_heads),
            "wo": of(attention.o_proj.weight).T.reshape(sizes.heads, sizes.head_dim, sizes.hidden),
            "ffn_norm": of(block.post_attention_layernorm.weight),
            "router": of(block.mlp.gate.weight).T,
            "w_gate": gate.transpose(1, 2),
            "w_up": up.transpose(1, 2),
            "w_down": of(experts.down_proj).transpose(1, 2),
        }

    layers = [layer(block) for block in model.model.layers]
    stacked = {f"layers/{name}": torch.stack([each[name] for each in layers]) for name in layers[0]}
    ends = {"embedding": of(model.model.embed_tokens.weight), "final_norm": of(model.model.norm.weight)}
    return stacked | ends | {"head": of(model.lm_head.weight).T}


def shared_experts(sizes: Sizes, random: np.random.Generator) -> Arrays:
    """The experts of DeepSeek-V2 on `deepseek/x`; gradients of the sum of sines of the output."""
    config = configuration_deepseek_v2.DeepseekV2Config(
        hidden_size=sizes.hidden, moe_intermediate_size=sizes.ffn, n_routed_experts=8, n_shared_experts=2,
        num_experts_per_tok=3, topk_method="greedy", norm_topk_prob=False, routed_scaling_factor=1.0,
        experts_implementation="eager",
    )  # fmt: skip
    block = modeling_deepseek_v2.DeepseekV2Moe(config).float()
    draw(block, random)
    x = torch.tensor(random.standard_normal((2, sizes.seq, sizes.hidden)).astype(np.float32), requires_grad=True)
    y = block(x)
    torch.sin(y).sum().backward()
    found: Arrays = {"deepseek/x": x, "deepseek/y": y, "deepseek/gradient/x": x.grad}
    for kind, of in (("param", lambda weight: weight), ("gradient", lambda weight: weight.grad)):
        gate, up = of(block.experts.gate_up_proj).chunk(2, dim=1)
        own = {
            "router": of(block.gate.weight).T,
            "w_gate": gate.transpose(1, 2),
            "w_up": up.transpose(1, 2),
            "w_down": of(block.experts.down_proj).transpose(1, 2),
            "shared_gate": of(block.shared_experts.gate_proj.weight).T,
            "shared_up": of(block.shared_experts.up_proj.weight).T,
            "shared_down": of(block.shared_experts.down_proj.weight).T,
        }
        found |= {f"deepseek/{kind}/{name}": array for name, array in own.items()}
    return found


def draw(module: Any, random: np.random.Generator) -> None:
    """Norms near one, and weights large enough that every nonlinearity counts."""
    for _, weight in sorted(module.named_parameters()):
        values = random.standard_normal(tuple(weight.shape)).astype(np.float32)
        values = 1.0 + 0.1 * values if values.ndim == 1 else values * (1.5 / np.sqrt(values.shape[-1]))
        weight.data = torch.tensor(values.astype(np.float32))


def main() -> None:
    random, sizes = np.random.default_rng(0), Sizes()
    found = whole_model(sizes, random) | shared_experts(sizes, random)
    arrays = {name: a.detach().numpy() if isinstance(a, torch.Tensor) else a for name, a in found.items()}
    PATH.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(PATH, allow_pickle=False, **arrays)
    print(
        f"{PATH}: {len(arrays)} arrays, {PATH.stat().st_size:,} bytes; cross-entropy {found['mixtral/cross_entropy']}"
    )


if __name__ == "__main__":
    main()
