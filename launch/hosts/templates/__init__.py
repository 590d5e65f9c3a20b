"""Job files that `dhelix launch --template` prints: for Slurm, for Kubernetes (JobSet), and a Dockerfile."""
