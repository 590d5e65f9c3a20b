"""The processes of a job: what they agree on before a step first runs, and how they tell each other.

    rendezvous.py      the transport: each process says something, one judges, and all hear the verdict or all stop
    records.py       what each says of itself, and the first difference, in words
    agreement.py     agreement on records, on the largest of numbers, on whether something worked
    description.py   what of a step and of its process must be alike: options, versions, flags, passes
    first_run.py     where a decorated step takes part

Hosts that run different programs, or order collectives differently, wait for each other for ever: nothing in JAX or
NCCL says so. Every wait here ends. Nothing happens in a job of one process, nor for a program whose devices all belong
to this process.
"""
