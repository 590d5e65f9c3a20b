"""Arguments that `jax.jit` does not take unchanged: objects of Flax NNX, modules of Equinox.

    front_choice.py     chooses the front for a call; reports captured objects
    nnx_front.py        a step of NNX objects, by `nnx.jit`
    fixed_leaves.py     a step of arguments with leaves that are not arrays, as `eqx.filter_jit` runs it
    gradients.py        `dhelix.value_and_grad` for both
    nnx_gradients.py    the loop over micro-batches of a loss that changes NNX objects

Nothing here imports Flax or Equinox: a program that passes their objects has imported them.
"""
