"""The part of `dhelix launch` that lives in the user's process, which may know nothing of dhelix.

task.py         what the launcher tells a process, and the pipe in which the process answers
joining.py      joins the job of `jax.distributed`, if the program does not do so itself
ending.py       ends a process that failed at once, and finds out which process failed first
health.py       compares counts and versions of all processes before the program uses devices
bandwidth.py    measures an all-gather over each mesh axis, and looks up what the profile says
"""
