"""The settings of `penstock tune`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """The settings of `penstock tune`."""

    budget: float = 300.0
    """Seconds for the whole tuning."""
    rounds: int = 7
    """Least number of rounds before a difference under 5 % is believed."""
    round_seconds: float = 0.3
    """Least seconds of one turn."""
    rungs: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    output: str = "runs/tune"
    """Folder of the processes' logs and of the report."""
    timeout: float = 300.0
    """Longest silence of a script in seconds, such as until its first step."""
