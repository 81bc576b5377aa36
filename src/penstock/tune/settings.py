"""The settings of `penstock tune`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from penstock.config.convert import Checked, FilledText, Positive, Range, Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig(Checked):
    """How long and with what a script is tuned. Fields are the command's options; each docstring is one line, because
    `--help` shows it.
    """

    budget: Positive = 300.0
    """Seconds for everything, compiling included."""
    rounds: Annotated[int, Range(2, 1_000_000)] = 7
    """Rounds of turns, at least, before a difference under 5 % counts."""
    round_seconds: Positive = 0.3
    """Seconds of one turn, at least."""
    rungs: str = ""
    """Rungs or groups of rungs to try, separated by commas, such as half,compile; all by default."""
    skip: str = ""
    """Rungs or groups of rungs to leave out."""
    procs: Ranks = 1
    """Number of ranks to start the script with, as torchrun does."""
    timeout: Positive = 300.0
    """Seconds that the script may be silent, for example before its first step."""
    output: FilledText = "runs/tune"
    """Folder of tune.html and tune.json, and of what the script writes to its terminal."""
