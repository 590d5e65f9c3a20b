"""Profiles as files: their text, the codec that checks it, where files are looked for, and XLA's tables."""
