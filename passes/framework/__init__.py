"""The pass framework: the manager that runs passes, its reports, and the fingerprints of a step."""
