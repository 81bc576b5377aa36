"""Tables, figures and pages. Drawn by a few hundred lines of our own; nothing in here imports torch."""
