"""Supports arguments that `jax.jit` does not accept unchanged: objects of Flax NNX, and modules of Equinox.

A front turns such arguments into arrays for an inner step.

    argument_keys.py    keys that tell kinds of arguments apart, for all steps
    front_choice.py     chooses the front for a call, and reports captured objects
    nnx_front.py        the front for NNX objects; it uses `nnx.jit`
    fixed_leaves.py     the front for arguments with leaves that are not arrays; it works like `eqx.filter_jit`
    gradients.py        `dhelix.value_and_grad` for both kinds of arguments
    nnx_gradients.py    the loop over micro-batches of a loss that changes NNX objects

These modules do not import Flax or Equinox. A program that passes objects of a framework has already imported it.
"""
