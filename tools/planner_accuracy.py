"""Write docs/reference/planner-accuracy.md: every published row beside its prediction.

python tools/planner_accuracy.py [--quick]
"""

from __future__ import annotations

import argparse
from pathlib import Path

ROOT = Path(__file__).parent.parent

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="keep the stored errors, in place of fitting again without each model",
    )
    quick = parser.parse_args().quick
    from calibration.report import write

    write(ROOT, refit=not quick)
