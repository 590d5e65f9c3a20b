"""Reading what XLA dumped: files, HLO text of any version, and what a module was compiled for."""
