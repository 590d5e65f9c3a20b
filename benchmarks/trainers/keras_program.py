"""A Keras program that knows nothing of dhelix: data parallelism over all devices, and accumulation in a `lax.scan`.

    python keras_program.py                # an own train_step loops over the micro-batches of a batch
    python keras_program.py across-calls   # Keras's optimizer accumulates: a step for each micro-batch

It prints each optimizer step's loss in all digits of a float32.
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras  # pyright: ignore[reportMissingImports]: it is in an environment of its own
import numpy as np

LAYERS, WIDTH, HEADS, SEQ, VOCAB, ROWS, MICROBATCHES, STEPS = 2, 64, 4, 64, 256, 32, 4, 10


class Accumulating(keras.Model):
    def train_step(self, state, data):
        params, others, opt_state, metrics = state
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        batch = {"x": x, "y": y, "sample_weight": weights}
        # Each device keeps its rows, and gives some of them to each micro-batch.
        parts = jax.tree.map(lambda a: a.reshape(-1, MICROBATCHES, *a.shape[1:]).swapaxes(0, 1), batch)
        take = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)

        def accumulate(carry, part):
            sums, others, metrics = carry
            (_, (loss, y_pred, others, metrics)), grads = take(
                params, others, metrics, **part, training=True, optimizer_variables=opt_state
            )
            logs, metrics = self._update_metrics_variables(metrics, loss, y_pred=y_pred, **part)
            return (jax.tree.map(jnp.add, sums, grads), others, metrics), logs

        zeros = jax.tree.map(jnp.zeros_like, params)
        (sums, others, metrics), logs = jax.lax.scan(accumulate, (zeros, others, metrics), parts)
        params, opt_state = self.optimizer.stateless_apply(opt_state, [g / MICROBATCHES for g in sums], params)
        return jax.tree.map(lambda a: a[-1], logs), (params, others, opt_state, metrics)


def model(of: type[keras.Model]) -> keras.Model:
    tokens = keras.Input((SEQ,), dtype="int32")
    x = keras.layers.Embedding(VOCAB, WIDTH)(tokens)
    for _ in range(LAYERS):
        y = keras.layers.RMSNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y, use_causal_mask=True)
        y = keras.layers.Dense(4 * WIDTH, activation="gelu")(keras.layers.RMSNormalization()(x))
        x = x + keras.layers.Dense(WIDTH)(y)
    return of(tokens, keras.layers.Dense(VOCAB, use_bias=False)(keras.layers.RMSNormalization()(x)))


class Print(keras.callbacks.Callback):
    """Prints the mean loss of the calls of an optimizer step."""

    def __init__(self, calls: int):
        super().__init__()
        self.calls, self.losses = calls, []

    def on_train_batch_begin(self, batch, logs=None):
        self.model.reset_metrics()  # else Keras's loss is the mean of all steps so far

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(np.float32((logs or {})["loss"]))
        if len(self.losses) == self.calls:
            print(f"loss {float(np.mean(self.losses))!r}", flush=True)
            self.losses.clear()


def main(across_calls: bool) -> None:
    calls = MICROBATCHES if across_calls else 1
    keras.utils.set_random_seed(0)
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    made = model(keras.Model if across_calls else Accumulating)
    made.compile(
        optimizer=keras.optimizers.AdamW(1e-3, gradient_accumulation_steps=calls if across_calls else None),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    rows = np.random.default_rng(0).integers(VOCAB, size=(STEPS * ROWS, SEQ + 1), dtype=np.int32)
    made.fit(rows[:, :-1], rows[:, 1:], batch_size=ROWS // calls, shuffle=False, verbose=0, callbacks=[Print(calls)])


if __name__ == "__main__":
    main(sys.argv[1:] == ["across-calls"])
