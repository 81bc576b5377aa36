"""Published measurements, and what the planner says of each: `python tools/planner_accuracy.py` writes the page.

The tables are facts copied with their sources. Constants are fitted on those that `rows.FITTED` names and on nothing
else; the others are shown because a prediction that is never tested is worth nothing.
"""
