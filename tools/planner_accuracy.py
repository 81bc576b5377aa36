"""Write docs/reference/planner-accuracy.md: every published row beside its prediction.

    python tools/planner_accuracy.py [--quick]

`--quick` keeps the stored leave-one-out errors, instead of fitting again without each model.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

if __name__ == "__main__":
    # The tables are beside the tests, which compare the page with them.
    sys.path.insert(0, str(ROOT / "tests"))
    from calibration.report import write

    write(ROOT, refit="--quick" not in sys.argv)
