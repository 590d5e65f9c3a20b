"""A user's train step: the decorator, what it chooses, `value_and_grad`, and the step for one kind of arguments.

    strand_interleave.py   the decorator
    interleaved_step.py    the step that it makes
    frameworks/            arguments that are objects of Flax NNX or modules of Equinox
    schedules.py           which passes a step goes through
    collective_matmul_*.py  what it does to collectives beside matrix products
    value_and_grad.py      JAX's, or over micro-batches: microbatch_loop.py, batch_arguments.py, combining.py
    specialization.py      one program: lowered, transformed, compiled
    plain_step.py          what it is compared with
    verification.py        one step against another

May import everything of `runtime`, `passes` and `profiles`.
"""
