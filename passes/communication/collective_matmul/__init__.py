"""Collective matmuls in place of collectives beside matrix products: finding sites, choosing forms, splicing."""
