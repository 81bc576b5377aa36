"""What a model costs on a machine, from configurations alone. Nothing in here imports torch."""
