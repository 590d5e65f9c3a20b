"""Makes an interleaved step from a user's train step.

    strand_interleave.py   the decorator
    interleaved_step.py    the step that the decorator makes
    frameworks/            support for arguments that are objects of Flax NNX or modules of Equinox
    options.py             the options of a step; a new option is added here
    loaded_options.py      reads the files that options name
    target.py              the GPUs that a program is for, and the costs of operators on these GPUs
    pass_lists.py          the passes of each schedule, as data
    step_passes.py         makes the passes of one program from these lists
    collective_matmuls/    replaces collectives next to matrix products by collective matmuls
    microbatches/          `value_and_grad`: JAX's, or a loop over micro-batches
    specialization.py      transforms and compiles the program for one kind of arguments
    plain_step.py          memory and time of the plain step, with which an interleaved step is compared
    verification.py        compares the results of two steps

The modules of this folder may import everything from `runtime`, `passes` and `profiles`.
"""
