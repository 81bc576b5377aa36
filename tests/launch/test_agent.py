"""Ranks that fail, hang or are asked to stop; agents that do. The program is a toy whose checkpoint is a number."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from helpers.agents import Agent, alive, no_orphans
from helpers.doomed import TOY, steps_in
from penstock.launch.settings import own_cores, usable_cores


def toy(
    folder: Path, *faults: str, total: int = 12, options: tuple[str, ...] = (), forked: bool = True
) -> Agent:
    words = ("--procs", "2", *options, "--", *TOY, str(folder), str(total), *faults)
    return Agent(*words, log=folder / "log", forked=forked)


def test_all_ranks_go_on_from_the_checkpoint_after_one_is_killed(tmp_path: Path) -> None:
    with toy(tmp_path, "kill:1:7", forked=False) as agent:
        assert agent.wait() == 0, agent.said
    assert steps_in(tmp_path) == [[n, 2, 0] for n in range(1, 8)] + [[n, 2, 1] for n in range(6, 13)]
    assert "rank 1 was killed by SIGKILL." in agent.said
    assert "restart 1 of at most 3" in agent.said
    no_orphans(tmp_path)


@pytest.mark.skipif(len(usable_cores()) < 2, reason="binds two ranks to a core each")
def test_each_rank_keeps_to_cores_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "which.py"
    script.write_text("import os\nprint('has', sorted(os.sched_getaffinity(0)), flush=True)\n")
    with Agent("--procs", "2", "--bind-cores", "--", str(script), log=tmp_path / "log") as agent:
        assert agent.wait() == 0, agent.said
    assert sorted(line.partition("has ")[2] for line in agent.said.splitlines()) == [
        str(own_cores(rank, 2)) for rank in range(2)
    ]
    assert not set(own_cores(0, 2)) & set(own_cores(1, 2))


FAULTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], int, int, tuple[str, ...]]] = {
    # faults, options, the code, the number of lives after the first, and what is said, in this order
    "raises in both lives": (
        ("raise:1:3", "raise:1:3"), ("--max-restarts", "1"), 1, 1,
        ("rank 1 ended with code 1:\nTraceback", "ValueError: only on rank 1", "rank 0 then lost it.",
         "ValueError: only on rank 1"),
    ),
    "would fail again": (("code:1:3:6",), (), 6, 0, ()),
    "is told as a shell does": (
        ("kill:0:2",), ("--max-restarts", "0"), 128 + signal.SIGKILL, 0, ("rank 0 was killed by SIGKILL.",),
    ),
    # Ranks of a busy machine may take seconds to begin anew, which is no hang.
    "hangs": (("stop:0:7",), ("--hang-seconds", "8"), 0, 1, ("rank 0 hangs:",)),
}  # fmt: skip


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=pytest.mark.slow if name == "hangs" else ()) for name in FAULTS]
)
def test_a_rank_that_fails_has_the_code_and_the_lives_that_it_is_to_have(fault: str, tmp_path: Path) -> None:
    faults, options, code, lives, words = FAULTS[fault]
    with toy(tmp_path, *faults, options=options) as agent:
        assert agent.wait() == code, agent.said
    rest = agent.said
    for word in words:
        assert word in rest
        rest = rest[rest.index(word) + len(word) :]
    assert ("restarted" in agent.said) == (lives > 0)
    last = steps_in(tmp_path)[-1]
    assert last[1:] == [2, lives]
    assert code != 0 or last[0] == 12
    if words and "Traceback" in words[0]:  # of the program alone
        assert "worker.py" not in agent.said
        assert "runpy" not in agent.said
    no_orphans(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_all_ranks_save_the_same_step_when_the_agent_is_asked_to_stop(
    tmp_path: Path, number: signal.Signals
) -> None:
    with toy(tmp_path, "slow:20", total=100_000) as agent:
        agent.until(lambda: (tmp_path / "checkpoint").exists())
        agent.send(number)
        asked = time.monotonic()
        assert agent.wait() == 75
    assert time.monotonic() - asked < 10
    assert (tmp_path / "checkpoint").read_text() == str(steps_in(tmp_path)[-1][0])
    assert f"{number.name} received" in agent.said
    no_orphans(tmp_path)


def test_being_asked_before_there_is_anything_to_save_asks_for_a_requeue(tmp_path: Path) -> None:
    with toy(tmp_path, forked=False) as agent:
        agent.until(lambda: len(psutil.Process(agent.process.pid).children()) == 2)  # they still import torch
        agent.send(signal.SIGTERM)
        assert agent.wait() == 75


def test_a_stopped_rank_is_named_with_its_stack(tmp_path: Path) -> None:
    options = ("--hang-seconds", "2", "--max-restarts", "0")
    with toy(tmp_path, "stop:1:7", options=options) as agent:
        agent.until(lambda: (tmp_path / "struck.0").exists())
        struck = time.monotonic()
        assert agent.wait() == 8
    assert time.monotonic() - struck < 12
    assert "rank 1 hangs:\nIt has been silent for" in agent.said
    assert "after step 7; the process was stopped" in agent.said
    assert agent.said.index("in _strike") < agent.said.index("Stack of rank 0, step 7:")
    no_orphans(tmp_path)


def test_ranks_die_with_a_killed_agent(tmp_path: Path) -> None:
    with toy(tmp_path, "slow:20", total=100_000, forked=False) as agent:
        agent.until(lambda: (tmp_path / "steps").exists())
        assert len(alive(tmp_path)) == 2
        agent.send(signal.SIGKILL)
        assert agent.wait() == -9
    no_orphans(tmp_path)


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    with toy(tmp_path, "slow:20", total=100_000) as agent:
        agent.until(lambda: (tmp_path / "steps").exists())
        agent.send(signal.SIGINT)
        assert agent.wait() == 130
    no_orphans(tmp_path)


def test_children_of_a_rank_end_with_it(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import subprocess, sys\n"
        "from pathlib import Path\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "Path(sys.argv[1], f'pid.{child.pid}').touch()\n"
        "raise SystemExit(4)\n"
    )
    with Agent("--procs", "1", "--", str(script), str(tmp_path), log=tmp_path / "log") as agent:
        assert agent.wait() == 4
    no_orphans(tmp_path, timeout=1)
