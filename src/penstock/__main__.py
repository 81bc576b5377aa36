"""`python -m penstock`, which torchrun uses."""

import os
import sys

from penstock.cli import main

if __name__ == "__main__":
    code = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # All is done and closed. In an orderly exit gloo's threads may abort, and the launcher would see a signal
        # instead of the code: 4 to 6 of 10 runs of torch 2.13 on a CPU.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
