"""Clusters as data: GPUs, links, constants with their units and origins, files, and names."""
