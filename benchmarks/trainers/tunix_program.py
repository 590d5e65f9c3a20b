"""A Tunix program that knows nothing of dhelix: fine-tuning, FSDP over all devices, and accumulation in a `lax.scan`.

    python tunix_program.py                # an own step of the trainer loops over the micro-batches of a batch
    python tunix_program.py across-calls   # Tunix accumulates by optax.MultiSteps: a step for each micro-batch

It prints each optimizer step's loss in all digits of a float32.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType
from tunix.sft.hooks import TrainingHooks  # pyright: ignore[reportMissingImports]: in an environment of its own
from tunix.sft.peft_trainer import (  # pyright: ignore[reportMissingImports]
    PeftTrainer,
    TrainingConfig,
    TrainingInput,
)

LAYERS, WIDTH, HEADS, SEQ, VOCAB, ROWS, MICROBATCHES, STEPS = 2, 64, 4, 64, 256, 32, 4, 10
SPLIT = (None, "fsdp")
KIND = nnx.Param  # what is trained; nnx.LoRAParam with LoRA


class Accumulating(PeftTrainer):
    def create_train_step_fn(self):
        def train_step(model, optimizer, batch):
            # Each device keeps its rows, and gives some of them to each micro-batch.
            parts = jax.tree.map(lambda a: a.reshape(-1, MICROBATCHES, *a.shape[1:]).swapaxes(0, 1), batch)
            graph, params, rest = nnx.split(model, KIND, ...)

            def loss_fn(params, rest, part):
                used = nnx.merge(graph, params, rest, copy=True)
                return self.loss_fn(used, **self.gen_model_input_fn(part)), nnx.split(used, KIND, ...)[2]

            def accumulate(carry, part):
                sums, rest = carry
                (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, rest, part)
                return (jax.tree.map(jnp.add, sums, (loss, grads)), rest), None

            zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
            (sums, rest), _ = jax.lax.scan(accumulate, (zeros, rest), parts)
            loss, grads = jax.tree.map(lambda a: a / MICROBATCHES, sums)
            nnx.update(model, rest)  # such as the state of dropout
            optimizer.update(model, grads)
            return loss, None, optax.global_norm(grads)

        return train_step


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), SPLIT)
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.List(nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH, rngs), linear(WIDTH, WIDTH, rngs)
        self.up, self.down = linear(WIDTH, 4 * WIDTH, rngs), linear(4 * WIDTH, WIDTH, rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        q, k, v = jnp.split(self.qkv(self.norms[0](x)).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, mask=mask[:, None]).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(0.02), SPLIT)
        self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(LAYERS))
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = linear(WIDTH, VOCAB, rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array, cache: None, mask: jax.Array):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x)), cache


def inputs(one: TrainingInput) -> dict[str, jax.Array]:
    """The arguments of Tunix's own loss."""
    causal = jnp.tril(jnp.ones((SEQ, SEQ), bool))
    return {
        "input_tokens": one.input_tokens,
        "input_mask": one.input_mask,
        "positions": jnp.broadcast_to(jnp.arange(SEQ), one.input_tokens.shape),
        "attention_mask": one.input_mask[:, None] & causal,
    }


class Print(TrainingHooks):
    def on_train_step_end(self, train_ctx, train_step, train_loss):
        print(f"loss {float(train_loss)!r}", flush=True)

    def _nothing(self, *_):
        pass

    on_train_start = on_train_end = on_train_step_start = on_eval_step_start = on_eval_step_end = _nothing


def main(across_calls: bool) -> None:
    calls = MICROBATCHES if across_calls else 1
    tokens = np.random.default_rng(0).integers(VOCAB, size=(STEPS * calls, ROWS // calls, SEQ), dtype=np.int32)
    batches = [TrainingInput(input_tokens=one, input_mask=np.ones(one.shape, bool)) for one in tokens]
    steps = calls if across_calls else None
    config = TrainingConfig(eval_every_n_steps=STEPS + 1, max_steps=STEPS, gradient_accumulation_steps=steps)
    mesh = jax.make_mesh((len(jax.devices()),), ("fsdp",), axis_types=(AxisType.Auto,))
    with mesh, jax.set_mesh(mesh):  # Tunix asks for the first mesh, and Flax for the second
        trainer = (PeftTrainer if across_calls else Accumulating)(Model(nnx.Rngs(0)), optax.adamw(1e-3), config)
        trainer.with_gen_model_input_fn(inputs).with_training_hooks(Print())
        trainer.train(batches)


if __name__ == "__main__":
    main(sys.argv[1:] == ["across-calls"])
