"""What has to be done to a command line before it is parsed."""

from __future__ import annotations

from collections.abc import Sequence

_WITH_VALUE = ("--precision", "--dtype", "--option")
"""Options of `run` that take a value; what follows the script's name is the script's."""


def before_script(tokens: Sequence[str]) -> list[str]:
    """The tokens of a command line with `--` before the script of `run`, so that what follows is left to the script."""
    if not tokens or tokens[0] != "run":
        return list(tokens)
    place = 1
    while place < len(tokens) and tokens[place].startswith("-") and tokens[place] != "--":
        place += 2 if tokens[place] in _WITH_VALUE else 1
    if place >= len(tokens) or tokens[place] == "--":
        return list(tokens)
    return [*tokens[:place], "--", *tokens[place:]]
