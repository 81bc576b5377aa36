"""Ranks for tests: results by rank, the first failure told first, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, distributed

from helpers.spawn import RankFailed, Ranks, spawn


@dataclass(frozen=True)
class Place:
    """A class of this module, which no import finds."""

    rank: int
    threads: int
    folder: str
    variable: str | None


def _reduced(start: Tensor) -> Tensor:
    total = start + distributed.get_rank()
    distributed.all_reduce(total)
    return total


def _place() -> Place:
    return Place(
        int(os.environ["RANK"]), torch.get_num_threads(), os.getcwd(), os.environ.get("PENSTOCK_HERE")
    )


def _own_group() -> int:
    assert not distributed.is_initialized()
    distributed.init_process_group("gloo")
    return distributed.get_world_size()


def _rank_one(how: str, file: str) -> None:
    Path(f"{file}.{distributed.get_rank()}").write_text(str(os.getpid()))
    if distributed.get_rank() == 1:
        print("about to fail", flush=True)
        if how == "raises":
            raise ValueError("only on rank one")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    distributed.barrier()


def _alive(folder: Path) -> list[int]:
    pids = [int(file.read_text()) for file in folder.glob("pid.*")]
    assert pids
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def test_ranks_compute_in_a_group_and_are_placed_as_this_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [result.tolist() for result in spawn(_reduced, 3, torch.tensor([1.5, 2.0]))] == [[7.5, 9.0]] * 3
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_HERE", "yes")
    assert spawn(_place, 2) == [Place(rank, 1, str(tmp_path), "yes") for rank in range(2)]
    assert spawn(_own_group, 2, group=False) == [2, 2]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", r"(?s)^Rank 1 of 3 failed.\nTraceback.*ValueError: only on rank one.*about to fail"),
        ("dies", r"^Rank 1 of 3 failed.\nIt was killed by SIGKILL"),
        ("sleeps", r"(?s)did not end within 3 s.*in _rank_one"),
    ],
)
def test_the_first_failing_rank_is_told_first_and_none_is_left(how: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=words):
        spawn(_rank_one, 3, how, str(tmp_path / "pid"), timeout=3 if how == "sleeps" else 60)
    assert not _alive(tmp_path)


@pytest.mark.sweep
def test_ranks_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            import os, sys, time
            from pathlib import Path
            from torch import distributed
            from helpers.spawn import pool, spawn

            def sleep(folder, name, seconds):
                Path(folder, f"pid.{name}.{distributed.get_rank()}").write_text(str(os.getpid()))
                time.sleep(seconds)

            if __name__ == "__main__":
                pool(2).run(sleep, sys.argv[1], "still", 0)
                spawn(sleep, 2, sys.argv[1], "asleep", 600)
            """
        )
    )
    parent = subprocess.Popen([sys.executable, str(tmp_path / "program.py"), str(tmp_path)])
    try:
        end = time.monotonic() + 60
        while len(list(tmp_path.glob("pid.*"))) < 4:
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(0.1)
        assert len(_alive(tmp_path)) == 4
    finally:
        parent.kill()
        parent.wait()
    end = time.monotonic() + 10
    while _alive(tmp_path):
        assert time.monotonic() < end
        time.sleep(0.05)


def _pid() -> int:
    return os.getpid()


def _drawn() -> float:
    return float(torch.rand(()))


def test_a_pool_runs_many_cases_in_the_same_ranks_and_starts_anew_after_a_failure(tmp_path: Path) -> None:
    ranks = Ranks(2)
    try:
        first = ranks.run(_pid)
        assert ranks.run(_pid) == first
        assert len(set(first)) == 2
        assert [float(total) for total in ranks.run(_reduced, torch.ones(()))] == [3.0, 3.0]
        assert ranks.run(_drawn) == ranks.run(_drawn)
        with pytest.raises(RankFailed, match="only on rank one"):
            ranks.run(_rank_one, "raises", str(tmp_path / "pid"))
        assert set(ranks.run(_pid)).isdisjoint(first)
    finally:
        ranks.close()
    assert not any(map(psutil.pid_exists, first))
