"""Programs forked from a process that has torch are started, read and ended as new interpreters are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from helpers import forked

SHOWN = """
import json, os, signal, sys
link = int(sys.argv[2])
os.write(link, b"through the link")
print(json.dumps([sys.argv[1:], os.getcwd(), sorted(k for k in os.environ if k.startswith("SHOWN")), __name__,
                  sys.stdin.read(), os.getpgid(0) == os.getpid(),
                  sorted(int(n) for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")),
                  signal.getsignal(signal.SIGTERM) is signal.SIG_DFL]))
print("and this", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("start", [forked.Popen, subprocess.Popen], ids=["forked", "new"])
def test_a_program_has_what_it_was_given(start: type, tmp_path: Path) -> None:
    script = tmp_path / "shown.py"
    script.write_text(textwrap.dedent(SHOWN))
    reading, link = os.pipe()
    with (tmp_path / "error").open("wb") as error:
        process = start(
            [sys.executable, str(script), "a word", str(link)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=error, cwd=tmp_path, env={**os.environ, "SHOWN": "1"}, process_group=0, pass_fds=(link,),
        )  # fmt: skip
    os.close(link)
    shown = json.loads(process.stdout.read())
    assert process.wait(60) == 3
    process.stdout.close()
    assert os.read(reading, 100) == b"through the link"
    os.close(reading)
    assert (tmp_path / "error").read_text() == "and this\n"
    assert shown == [
        ["a word", str(link)], str(tmp_path), ["SHOWN"], "__main__", "", True, [0, 1, 2, link], True,
    ]  # fmt: skip


def test_an_agent_forks_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import os, sys\nprint(os.environ['RANK'], 'torch' in sys.modules)\nsys.exit(4)\n")
    words = ["-m", "penstock", "launch", "--procs", "2", "--max-restarts", "0", "--", str(script)]
    code, out, error = forked.run_python(words, tmp_path)
    assert code == 4, error
    assert out == "0 True\n"
    assert "[rank 1] 1 True" in error
