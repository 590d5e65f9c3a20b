"""What the tensors of a checkpoint are called, and which arrays of dhelix they hold.

    Rule("model.layers.{layer}.self_attn.o_proj.weight", ("wo",), "linear", rows=2)

says that our `wo [heads, head_dim, hidden]` is a matrix of `heads * head_dim` rows and `hidden` columns, and that
`o_proj` is its transpose. One tensor may hold several of our arrays: GPT-2's `c_attn` is `wq`, `wk` and `wv`, side by
side.
"""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of tensor.

    Attributes:
      name: its name, with `{layer}` and `{expert}` for their numbers.
      leaves: the names of our arrays that it holds, side by side along our last dimension.
      kind: "linear": the transpose of our matrix. "table": our matrix. "vector": our array in one dimension.
      rows: how many leading dimensions of our array are the rows of the matrix. Layer and expert do not count.
    """

    name: str
    leaves: tuple[str, ...]
    kind: Literal["linear", "table", "vector"]
    rows: int = 1

    def __post_init__(self) -> None:
        if self.kind == "vector":
            object.__setattr__(self, "rows", 0)

    @property
    def in_layers(self) -> bool:
        return "{layer}" in self.name

    @property
    def of_experts(self) -> bool:
        return "{expert}" in self.name


@dataclasses.dataclass(frozen=True)
class Names:
    """The tensors of an architecture.

    Attributes:
      rules: all tensors that a model of the architecture may have. Those whose arrays our model lacks do not count.
      prefix: what some published files leave out at the start of each name.
      ignored: patterns of tensors that older files have beside the weights, and that no model needs.
    """

    rules: tuple[Rule, ...]
    prefix: str = ""
    ignored: tuple[str, ...] = ()


def _linear(name: str, leaf: str, rows: int = 1) -> Rule:
    return Rule(f"{name}.weight", (leaf,), "linear", rows)


def _norm(name: str, leaf: str) -> tuple[Rule, Rule]:
    return Rule(f"{name}.weight", (leaf,), "vector"), Rule(f"{name}.bias", (f"{leaf}_bias",), "vector")


def _conv1d(name: str, *letters: str) -> tuple[Rule, Rule]:
    """GPT-2's linear layers store the matrix as we do."""
    weight = Rule(f"{name}.weight", tuple(f"w{letter}" for letter in letters), "table")
    return weight, Rule(f"{name}.bias", tuple(f"b{letter}" for letter in letters), "vector")


_ENDS = (
    Rule("model.embed_tokens.weight", ("embedding",), "table"),
    *_norm("model.norm", "final_norm"),
    _linear("lm_head", "head"),
    Rule("lm_head.bias", ("head_bias",), "vector"),
)

_LAYER = "model.layers.{layer}"
_ATTENTION = (
    *_norm(f"{_LAYER}.input_layernorm", "attention_norm"),
    _linear(f"{_LAYER}.self_attn.q_proj", "wq"),
    _linear(f"{_LAYER}.self_attn.k_proj", "wk"),
    _linear(f"{_LAYER}.self_attn.v_proj", "wv"),
    _linear(f"{_LAYER}.self_attn.o_proj", "wo", rows=2),
    *(Rule(f"{_LAYER}.self_attn.{one}_proj.bias", (f"b{one}",), "vector") for one in "qkvo"),
    *_norm(f"{_LAYER}.post_attention_layernorm", "ffn_norm"),
)
_LLAMA = (
    *_ENDS,
    *_ATTENTION,
    _linear(f"{_LAYER}.mlp.gate_proj", "w_gate"),
    _linear(f"{_LAYER}.mlp.up_proj", "w_up"),
    _linear(f"{_LAYER}.mlp.down_proj", "w_down"),
)
_MOE = (
    *_ENDS,
    *_ATTENTION,
    _linear(f"{_LAYER}.block_sparse_moe.gate", "router"),
    _linear(f"{_LAYER}.block_sparse_moe.experts.{{expert}}.w1", "w_gate"),
    _linear(f"{_LAYER}.block_sparse_moe.experts.{{expert}}.w3", "w_up"),
    _linear(f"{_LAYER}.block_sparse_moe.experts.{{expert}}.w2", "w_down"),
)

_BLOCK = "transformer.h.{layer}"
_GPT2 = (
    Rule("transformer.wte.weight", ("embedding",), "table"),
    Rule("transformer.wpe.weight", ("positions",), "table"),
    *_norm("transformer.ln_f", "final_norm"),
    _linear("lm_head", "head"),
    *_norm(f"{_BLOCK}.ln_1", "attention_norm"),
    *_conv1d(f"{_BLOCK}.attn.c_attn", "q", "k", "v"),
    *_conv1d(f"{_BLOCK}.attn.c_proj", "o"),
    *_norm(f"{_BLOCK}.ln_2", "ffn_norm"),
    *_conv1d(f"{_BLOCK}.mlp.c_fc", "_up"),
    *_conv1d(f"{_BLOCK}.mlp.c_proj", "_down"),
)

_FREQUENCIES = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
NAMES = {
    "LlamaForCausalLM": Names(_LLAMA, ignored=_FREQUENCIES),
    "GPT2LMHeadModel": Names(_GPT2, "transformer.", ("*h.*.attn.bias", "*h.*.attn.masked_bias")),
    "MixtralForCausalLM": Names(_MOE, ignored=_FREQUENCIES),
    "PhimoeForCausalLM": Names(_MOE, ignored=_FREQUENCIES),
    "PhiMoEForCausalLM": Names(_MOE, ignored=_FREQUENCIES),  # the published name of the same
}
"""By the architecture that config.json names."""
HEAD = "lm_head.weight"
"""Some files also have the head if it is tied to the embedding."""
