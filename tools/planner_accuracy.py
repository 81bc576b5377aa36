"""Write docs/reference/planner-accuracy.md: every published row beside its prediction.

    python tools/planner_accuracy.py [--quick]

`--quick` keeps the stored errors of models left out, instead of fitting again without each.
"""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.planner.calibration.report import write

ROOT = Path(__file__).parent.parent

if __name__ == "__main__":
    write(ROOT, refit="--quick" not in sys.argv)
