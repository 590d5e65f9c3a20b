"""A user's train step: the decorator, what it chooses, `value_and_grad`, and the step for one kind of arguments.

    strand_interleave.py   the decorator
    interleaved_step.py    the step that it makes
    frameworks/            arguments that are objects of Flax NNX or modules of Equinox
    options.py             what can be said of a step; a new option starts here
    target.py              the GPUs that a program is for, and what operators cost there
    pass_lists.py          which passes a step goes through, as data; step_passes.py makes them for one program
    collective_matmuls/    what it does to collectives beside matrix products
    gradients/             `value_and_grad`: JAX's, or over micro-batches
    specialization.py      one program: lowered, transformed, compiled
    plain_step.py          what it is compared with
    verification.py        one step against another

May import everything of `runtime`, `passes` and `profiles`.
"""
