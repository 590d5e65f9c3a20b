"""`dhelix profile`: shows the times of a step's operators and collectives. On GPUs, it measures missing times."""
