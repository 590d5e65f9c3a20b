#!/bin/bash
#SBATCH --job-name=${name}
#SBATCH --nodes=${nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=${gpus_per_node}
#SBATCH --exclusive
#SBATCH --time=${time}
#SBATCH --output=%x-%j.log
set -euo pipefail

# Variables and XLA flags that are usually fastest for GPUs linked by NVLink; "dhelix flags" says why.
# eval "$$(dhelix flags --link nvlink --shell)"

# One process on each node has all GPUs of the node. JAX's own detection of Slurm finds the coordinator.
srun --kill-on-bad-exit=1 --cpu-bind=none \
    ${in_shell} ${program}
