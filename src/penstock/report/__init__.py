"""Tables, figures and pages, drawn by a few hundred lines of Penstock's own; nothing here imports torch."""
