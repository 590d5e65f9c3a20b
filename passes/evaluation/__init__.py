"""Cost of a program and of its schedules: profile keys, operator times and the simulated timeline."""
