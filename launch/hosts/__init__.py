"""`dhelix launch`: starts the processes of a job, or one process of a job that a scheduler started.

command.py      reads the flags
place.py        which process of which job this is: Slurm, Open MPI, Kubernetes or plain variables
children.py     starts processes, each with its task, its devices and its output
output.py       where the output of a process goes, and its last lines
watch.py        waits for the processes; if one fails, ends the others and says which and why
templates/      job files for schedulers
"""
