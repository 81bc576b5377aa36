"""Agents of two nodes, both on this machine."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from helpers.agents import Agent, free_port, no_orphans
from helpers.doomed import TOY, steps_in


class Nodes:
    """Two agents that share an endpoint and a run's folder."""

    def __init__(
        self, folder: Path, nodes: str, *program: str, options: tuple[str, ...] = (), forked: bool = True
    ) -> None:
        self.folder, self.forked = folder, forked
        self._common = (
            *("--nnodes", nodes, "--rdzv", f"127.0.0.1:{free_port()}"),
            *("--settle-seconds", "1", "--lost-seconds", "3", *options),
        )
        self._program = ("--", *TOY, str(folder), *program)

    def start(self, name: str, procs: int, *options: str) -> Agent:
        log = self.folder / f"{name}.log"
        return Agent(
            "--procs", str(procs), *self._common, *options, *self._program, log=log, forked=self.forked
        )


@pytest.mark.sweep
def test_ranks_of_both_nodes_are_one_world_and_restart_together(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "2", "12", "kill:2:7", forked=False)
    with nodes.start("a", 1, "--node-rank", "0") as a, nodes.start("b", 2, "--node-rank", "1") as b:
        assert (a.wait(), b.wait()) == (0, 0), a.said + b.said
    assert steps_in(tmp_path) == [[n, 3, 0] for n in range(1, 8)] + [[n, 3, 1] for n in range(6, 13)]
    assert "rank 2 was killed by SIGKILL." in a.said, "told on the other node too"
    assert "rank 2 was killed by SIGKILL." in b.said
    no_orphans(tmp_path)


@pytest.mark.slow
def test_a_code_reaches_all_nodes(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "2", "12", "code:1:7:4")
    with nodes.start("a", 1, "--node-rank", "0") as a, nodes.start("b", 1, "--node-rank", "1") as b:
        assert (a.wait(), b.wait()) == (4, 4), a.said + b.said
    no_orphans(tmp_path)


@pytest.mark.slow
def test_a_killed_node_is_gone_on_without_and_with_again(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "1:2", "100000", "slow:20")
    with nodes.start("a", 1, "--node-rank", "0") as a:
        a.until(lambda: (tmp_path / "steps").exists())
        with nodes.start("b", 1, "--node-rank", "1") as b:
            b.until(lambda: steps_in(tmp_path)[-1][1] == 2)
            joined = steps_in(tmp_path)
            single = [step for step, world, _ in joined if world == 1]
            assert joined[len(single)][:2] == [single[-1] + 1, 2], "no step was lost to make room"
            b.send(signal.SIGKILL)
            assert b.wait() == -9
        a.until(lambda: steps_in(tmp_path)[-1][1] == 1)
        with nodes.start("c", 2, "--node-rank", "1") as c:
            c.until(lambda: steps_in(tmp_path)[-1][1] == 3)
            c.send(signal.SIGTERM)
            assert c.wait() == 75
        a.until(lambda: steps_in(tmp_path)[-1][1] == 1)
        a.send(signal.SIGTERM)
        assert a.wait() == 75, a.said
    assert "is lost: its agent has not been heard of for" in a.said
    assert (tmp_path / "checkpoint").read_text() == str(steps_in(tmp_path)[-1][0])
    no_orphans(tmp_path)


@pytest.mark.slow
def test_one_asked_node_stops_all(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "2", "100000", "slow:20")
    with nodes.start("a", 1, "--node-rank", "0") as a, nodes.start("b", 1, "--node-rank", "1") as b:
        a.until(lambda: (tmp_path / "steps").exists())
        b.send(signal.SIGTERM)
        assert (a.wait(), b.wait()) == (75, 75), a.said + b.said
    no_orphans(tmp_path)


@pytest.mark.slow
def test_nodes_that_do_not_come_are_waited_for_in_vain(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "2", "12", options=("--join-seconds", "2"))
    with nodes.start("a", 1) as a:
        assert a.wait() == 3
    assert "Fewer than 2 nodes came to 127.0.0.1:" in a.said


@pytest.mark.slow
def test_waiting_for_nodes_can_be_ended(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "2", "12")
    with nodes.start("a", 1) as a:
        with pytest.raises(AssertionError, match="did not end"):
            a.wait(4)
        a.send(signal.SIGTERM)
        assert a.wait(10) == 75
