"""Smaller models: pruning, students of a teacher, and numbers in few bits."""
