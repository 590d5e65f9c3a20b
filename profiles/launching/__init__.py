"""What is known about environment variables and flags of a process: reasons, and measured effects."""
