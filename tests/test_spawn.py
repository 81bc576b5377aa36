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

from helpers.rank_pool import RankPool
from helpers.spawn import RankFailed, spawn


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


def _rank_one_raises(file: str) -> None:
    _note(file)
    if distributed.get_rank() == 1:
        print("about to fail", flush=True)
        raise ValueError("only on rank one")
    distributed.barrier()


def _rank_one_dies(file: str) -> None:
    _note(file)
    if distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()


def _rank_one_sleeps_in_here(file: str) -> None:
    _note(file)
    if distributed.get_rank() == 1:
        time.sleep(600)
    distributed.barrier()


def _note(file: str) -> None:
    Path(f"{file}.{distributed.get_rank()}").write_text(str(os.getpid()))


def _alive(folder: Path) -> list[int]:
    pids = [int(file.read_text()) for file in folder.glob("pid.*")]
    assert pids
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def test_every_rank_computes_in_one_group() -> None:
    results = spawn(_reduced, 3, torch.tensor([1.5, 2.0]))
    assert [result.tolist() for result in results] == [[7.5, 9.0]] * 3


def test_ranks_are_placed_as_this_process_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_HERE", "yes")
    assert spawn(_place, 2) == [Place(rank, 1, str(tmp_path), "yes") for rank in range(2)]


def test_a_function_may_make_the_group_itself() -> None:
    assert spawn(_own_group, 2, group=False) == [2, 2]


def test_the_first_failing_rank_is_told_first(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        spawn(_rank_one_raises, 3, str(tmp_path / "pid"))
    text = str(caught.value)
    assert text.startswith("Rank 1 of 3 failed.\nTraceback")
    assert text.index("ValueError: only on rank one") < text.index("about to fail")
    assert caught.value.rank == 1
    assert not _alive(tmp_path)


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"^Rank 1 of 2 failed.\nIt was killed by SIGKILL"):
        spawn(_rank_one_dies, 2, str(tmp_path / "pid"))
    assert not _alive(tmp_path)


def test_ranks_that_do_not_end_show_where_they_stand(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="did not end within 3 s") as caught:
        spawn(_rank_one_sleeps_in_here, 2, str(tmp_path / "pid"), timeout=3)
    assert "in _rank_one_sleeps_in_here" in str(caught.value)
    assert not _alive(tmp_path)


@pytest.mark.slow
def test_ranks_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            import os, sys, time
            from pathlib import Path
            from torch import distributed
            from helpers.rank_pool import pool
            from helpers.spawn import spawn

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


def test_a_pool_runs_many_cases_in_the_same_ranks_and_starts_anew_after_a_failure() -> None:
    ranks = RankPool(2)
    try:
        first = ranks.run(_pid)
        assert ranks.run(_pid) == first
        assert len(set(first)) == 2
        assert [float(total) for total in ranks.run(_reduced, torch.ones(()))] == [3.0, 3.0]
        assert ranks.run(_drawn) == ranks.run(_drawn)
        with pytest.raises(RankFailed, match="only on rank one"):
            ranks.run(_rank_one_fails)
        assert set(ranks.run(_pid)).isdisjoint(first)
    finally:
        ranks.close()
    assert not any(map(psutil.pid_exists, first))


def _rank_one_fails() -> None:
    if distributed.get_rank() == 1:
        raise ValueError("only on rank one")
    distributed.barrier()
