"""What every pass stands on: the manager that runs passes, what it reports, and fingerprints of inputs."""
