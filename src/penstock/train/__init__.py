"""Training runs: the loop, its step, checkpoints and what is measured on the way."""
