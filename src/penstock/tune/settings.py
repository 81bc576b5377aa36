"""The settings of `penstock tune`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """The settings of tuning a script."""

    budget: float = 300.0
    """Seconds for everything."""
    rounds: int = 7
    """The least rounds before a difference under 5 % is believed."""
    round_seconds: float = 0.3
    """The least time of one turn."""
    rungs: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    output: str = "runs/tune"
    """Folder of what the processes write, and of the report."""
    timeout: float = 300.0
    """Seconds for the longest silence of a script, such as up to its first step."""
