"""Lets the processes of a job compare their settings and programs before a step first runs.

    rendezvous.py       meetings: each process sends a text, the first process judges, all processes receive the verdict
    records.py          the records that processes compare, and a message that describes the first difference
    agreement.py        meetings that compare records, find the largest number, or learn whether all processes succeeded
    description.py      the properties of a step that must be equal in all processes: options, versions, flags, passes
    first_run.py        the points at which a decorated step takes part in meetings
    launch_settings.py  the launch setting of this process, and the launch setting of a plan
    nodes.py            which devices share a node, and one machine that emulates several nodes
    stdout.py           keeps lines of libraries away from stdout
    this_machine.py     the GPUs and free ports of this machine, without jax

If hosts run different programs, or run collectives in different orders, they wait for each other for ever. Neither JAX
nor NCCL reports this. Every wait in these modules has a timeout. There are no meetings in a job of one process, or for
a program whose devices all belong to this process.
"""
