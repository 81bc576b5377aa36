"""A user's own script, unchanged: settings of a Plan applied to it from outside, and the fastest of them."""
