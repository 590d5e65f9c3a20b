"""`dhelix flags`: environment variables and flags for a job, and what is wrong with those that it has."""
