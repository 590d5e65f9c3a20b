"""Sharded model states: where they are placed, and the step that works on them (AMSP)."""
