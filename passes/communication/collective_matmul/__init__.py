"""Replaces collectives next to matrix products by collective matmuls: finding sites, choosing forms, splicing."""
