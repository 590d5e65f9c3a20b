"""Compiler passes over `HloModuleProto`, the analyses that they share, and the manager that runs them."""
