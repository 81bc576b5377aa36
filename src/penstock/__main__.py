"""The command `penstock`, and `python -m penstock`, which torchrun uses."""

import atexit
import os
import sys
import threading
from contextlib import nullcontext

from penstock.launch.signals import throughout


def main() -> int:
    """Run the command line. Signals to commands that stop on request are handled from here on, because the imports
    below take seconds.
    """
    script = sys.argv[1:2] == ["run"]  # this replaces sys.argv
    with throughout() if sys.argv[1:2] in (["train"], ["launch"]) else nullcontext():
        from penstock.cli import main as run

        code = run()
        if os.environ.get("WORLD_SIZE", "1") != "1" or "penstock.launch.meeting" in sys.modules:
            # All work is done and files are closed. In an orderly exit gloo's threads may abort, and the launcher would
            # see a signal instead of the code: 4 to 6 of 10 runs of torch 2.13 on a CPU. An agent's threads that wait
            # for a store may abort, too.
            if script:  # its threads and exit functions may still save
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code


if __name__ == "__main__":
    sys.exit(main())
