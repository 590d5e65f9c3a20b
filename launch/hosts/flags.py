"""The flags of `dhelix launch`, and the text that `--help` prints above them. This module does not import jax."""

from __future__ import annotations

from absl import flags

from dhelix.launch.hosts.templates.fill import NAMES
from dhelix.launch.run.flags import split as split

USAGE = """\
usage: dhelix launch [flags] SCRIPT [its arguments]
       dhelix launch [flags] -m MODULE [its arguments]
       dhelix launch --template slurm [--nodes N] [SCRIPT [its arguments]]

Starts a training program as a job of several processes: with --processes on this machine, or, below srun, mpirun or in
a Kubernetes pod, as one process of the job. The program need not call jax.distributed.initialize(), but it may. Its
steps are interleaved as by `dhelix run`.

  dhelix launch --processes 4 train.py --steps 100           # the GPUs of this machine in four processes
  dhelix launch --processes 4 --cpu_devices 2 train.py       # without GPUs
  srun dhelix launch --mesh dp=16,tp=8 train.py
  dhelix launch --template jobset --nodes 2 train.py > job.yaml

Before the program uses devices, the processes compare versions and devices, and measure an all-gather. The output of
process 0 is shown. If a process fails or is killed, the others end, and a message names it."""


def define_flags(values: flags.FlagValues) -> None:
    """Defines all flags of `dhelix launch` on `values`."""
    words = "number of processes to start on this machine (default: as the scheduler says)"
    flags.DEFINE_integer("processes", None, words, 1, flag_values=values)
    words = "run on this many CPU devices in each process"
    flags.DEFINE_integer("cpu_devices", None, words, 1, flag_values=values)
    words = "host:port of process 0, below no scheduler; or JAX_COORDINATOR_ADDRESS"
    flags.DEFINE_string("coordinator", None, words, flag_values=values)
    words = "number of processes of the job, with --coordinator; or JAX_NUM_PROCESSES"
    flags.DEFINE_integer("num_processes", None, words, 1, flag_values=values)
    words = "number of this process, with --coordinator; or JAX_PROCESS_ID"
    flags.DEFINE_integer("process_id", None, words, 0, flag_values=values)
    words = "whose output is shown: that of process 0, or that of all with their numbers (default: 0, and each " \
            "process where its output is not mixed with that of others)"  # fmt: skip
    flags.DEFINE_enum("log", None, ["0", "all"], words, flag_values=values)
    words = "folder for the output of the processes that are not shown (default: a temporary one, which stays if a " \
            "message names it)"  # fmt: skip
    flags.DEFINE_string("logs", None, words, flag_values=values)
    words = "seconds without a sign of life after which a process counts as dead"
    flags.DEFINE_integer("heartbeat", 100, words, 1, flag_values=values)
    words = "compare versions and devices, and measure bandwidths, before the program uses devices"
    flags.DEFINE_bool("check", True, words, flag_values=values)
    words = "mesh axes whose bandwidth the check measures, outermost first, such as dp=2,tp=4"
    flags.DEFINE_list("mesh", [], words, flag_values=values)
    flags.DEFINE_bool("interleave", True, "run steps as two strands, as `dhelix run` does", flag_values=values)
    words = "TOML file with the options of `dhelix run`"
    flags.DEFINE_string("options", None, words, flag_values=values)
    flags.DEFINE_enum("template", None, list(NAMES), "print a job file instead of running anything", flag_values=values)
    flags.DEFINE_integer("nodes", 2, "with --template: number of nodes", 1, flag_values=values)
    flags.DEFINE_integer("gpus_per_node", 8, "with --template: GPUs of a node", 1, flag_values=values)
    flags.DEFINE_string("name", "train", "with --template: name of the job", flag_values=values)
    words = "with --template jobset: the container image"
    flags.DEFINE_string("image", None, words, flag_values=values)
    flags.DEFINE_string("time", "24:00:00", "with --template slurm: time limit", flag_values=values)
