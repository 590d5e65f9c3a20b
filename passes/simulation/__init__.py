"""Steps on a cluster that need not exist: costs there, orders of other systems, and what a simulation says."""
