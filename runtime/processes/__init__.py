"""The processes of a job: what they agree on before a step first runs, and how they communicate.

    rendezvous.py       the transport: each process sends a text, the first process judges, all receive the verdict
    records.py          what each process reports about itself, and the first difference, in words
    agreement.py        agreement on records, on the largest of several numbers, and on whether something succeeded
    description.py      the properties of a step and its process that must be alike: options, versions, flags, passes
    first_run.py        the points at which a decorated step takes part in the agreement
    launch_settings.py  the launch setting of this process, and the one that a plan wants
    nodes.py            which devices share a node, and one machine that emulates several nodes

Hosts that run different programs, or order collectives differently, wait for each other for ever. Neither JAX nor NCCL
reports this. Every wait here has a timeout. Nothing happens in a job of one process, or for a program whose devices all
belong to this process.
"""
