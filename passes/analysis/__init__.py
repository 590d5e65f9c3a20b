"""Read-only analyses of HLO programs: collectives, buffers, dimensions, shardings, replication, execution counts."""
