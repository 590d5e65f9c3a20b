"""Arguments that `jax.jit` does not take as they are: objects of Flax NNX, modules of Equinox.

    front_choice.py           which of the two a call needs, and captured objects
    nnx_front.py        a step of NNX objects, by `nnx.jit`
    fixed_leaves.py     a step of arguments with leaves that are no arrays, as `eqx.filter_jit` runs it
    gradients.py        `dhelix.value_and_grad` of either
    nnx_gradients.py    the loop over micro-batches of a loss that changes NNX objects

Neither Flax nor Equinox is imported: whoever passes an object of theirs has imported them.
"""
