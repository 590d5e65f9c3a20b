"""Compiler passes over `HloModuleProto`, the analyses they share, and the manager that runs them."""
