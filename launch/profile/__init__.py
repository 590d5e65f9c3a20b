"""`dhelix profile`: costs of a step's operators and collectives: measured, or looked up if there is no GPU."""
