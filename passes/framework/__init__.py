"""The pass framework: the manager that runs passes, its reports, and fingerprints of inputs."""
