"""Smaller models: pruning, distillation from a teacher, and weights in few bits."""
