"""The rungs, one file each. Every module in here is imported when the ladder is climbed; see `ladder/rung.py`."""
