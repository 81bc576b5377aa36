"""What comes from outside comes in here: one bounded reader per kind of input, with typed errors, free of torch."""
