"""`python -m penstock.planner.calibration [--quick] [ROOT]`: write the page of the planner's accuracy.

`--quick` keeps the stored errors of models left out instead of fitting again without each, which takes minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.planner.calibration.report import write

if __name__ == "__main__":
    paths = [Path(word) for word in sys.argv[1:] if not word.startswith("-")]
    sys.stdout.write(f"{write(paths[0] if paths else Path.cwd(), refit='--quick' not in sys.argv)}\n")
