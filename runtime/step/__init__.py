"""A user's train step: the decorator, its options, `value_and_grad`, and the compiled step for one kind of arguments.

    strand_interleave.py   the decorator
    interleaved_step.py    the step that the decorator makes
    argument_keys.py       keys that tell kinds of arguments apart
    frameworks/            arguments that are objects of Flax NNX or modules of Equinox
    options.py             the options of a step; a new option starts here
    target.py              the GPUs that a program is for, and operator costs there
    pass_lists.py          the passes of each schedule, as data; step_passes.py makes them for one program
    collective_matmuls/    collective matmuls in place of collectives next to matrix products
    microbatches/          `value_and_grad`: JAX's, or a loop over micro-batches
    specialization.py      one program: lowered, transformed, compiled
    plain_step.py          the plain step, which an interleaved step is compared with
    verification.py        compares the results of two steps

This folder may import everything from `runtime`, `passes` and `profiles`.
"""
