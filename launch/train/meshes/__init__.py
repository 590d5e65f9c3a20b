"""Meshes of `dhelix train`: the sizes of their axes, pipelines, and sharded states."""
