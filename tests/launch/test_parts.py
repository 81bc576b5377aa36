"""Heartbeats, reports, settings and ports."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from helpers.pace import pace
from penstock.errors import ConfigError, DataError
from penstock.launch import heartbeat
from penstock.launch.heartbeat import Heartbeat, beat, beating, promise
from penstock.launch.nodes import Nodes
from penstock.launch.report import VARIABLE, read_report, write_report
from penstock.launch.settings import LaunchSettings, own_cores


def test_the_agent_reads_what_the_rank_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Heartbeat.create(tmp_path / "beat")
    assert agent.read().seconds == 0
    monkeypatch.setenv(heartbeat.VARIABLE, str(tmp_path / "beat"))
    promise()
    assert not agent.read().stepping
    before = time.monotonic()
    beat(17)
    found = agent.read()
    assert (found.step, found.stepping) == (17, True)
    assert before <= found.seconds <= time.monotonic()
    assert list(beating("abc", 18)) == ["a", "b", "c"]
    assert (agent.read().seconds > found.seconds, agent.read().step) == (True, 18)


def test_without_an_agent_a_beat_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(heartbeat.VARIABLE, raising=False)
    beat(1)
    promise()


@pytest.mark.alone
def test_a_beat_is_cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Heartbeat.create(tmp_path / "beat")
    monkeypatch.setenv(heartbeat.VARIABLE, str(tmp_path / "beat"))
    started = time.process_time()
    for step in range(10_000):
        beat(step)
    assert (time.process_time() - started) / 10_000 < 20e-6 * pace()


def test_a_report_tells_a_users_error_by_its_message_and_a_bug_by_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not write_report(ValueError("nobody reads this"))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "report"))
    assert write_report(DataError("a.jpg is broken."))
    found = read_report(tmp_path / "report", 3, 4)
    assert found is not None
    assert (found.rank, found.code, found.text, found.consequence) == (3, 4, "a.jpg is broken.", False)
    with pytest.raises(ValueError, match="a bug") as caught:
        raise ValueError("a bug")
    assert write_report(caught.value)
    found = read_report(tmp_path / "report", 3, 4)
    assert found is not None
    assert found.text.startswith("Traceback")
    assert "raise ValueError" in found.text


@pytest.mark.parametrize(
    ("error", "consequence"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (ConnectionResetError("Connection reset by peer"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection closed by peer"), False),
        (DataError("On rank 1: a.jpg is broken."), True),
    ],
)
def test_what_only_says_that_another_rank_is_gone_is_a_consequence(
    error: Exception, consequence: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "report"))
    write_report(error)
    found = read_report(tmp_path / "report", 3, 4)
    assert found is not None
    assert found.consequence is consequence


def test_half_a_report_is_none(tmp_path: Path) -> None:
    assert read_report(tmp_path / "absent", 0, 1) is None
    (tmp_path / "half").write_text('{"seconds": 1')
    assert read_report(tmp_path / "half", 0, 1) is None


def test_numbers_of_nodes_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LaunchSettings(nnodes="4", rdzv="a:1").nodes == (4, 4)
    assert LaunchSettings(nnodes="2:4", rdzv="a:1").nodes == (2, 4)
    assert LaunchSettings(procs="3").ranks == 3
    for visible, ranks in (("0,3,5", 3), ("", 1), ("-1", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert LaunchSettings().ranks == ranks
    for text in ("", "a", "1:b", "1:2:3"):
        with pytest.raises(ConfigError):
            LaunchSettings(nnodes=text, rdzv="a:1")
    assert LaunchSettings(nnodes="1:2", rdzv="[::1]:29400").endpoint() == ("::1", 29400)


def test_a_reserved_port_is_nobody_elses_but_a_rank_can_listen_on_it() -> None:
    with Nodes(1) as node:
        address = node.meet(0).master
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(address)
        with socket.socket() as rank:
            rank.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            rank.bind(address)
            rank.listen()


def test_a_node_alone_has_all_ranks_and_a_new_port_in_each_life() -> None:
    with Nodes(3) as node:
        first, second = node.meet(0), node.meet(1)
    assert (first.first_rank, first.world, first.nodes, first.round) == (0, 3, 1, 0)
    assert (second.round, second.restarts) == (1, 1)
    assert node.heard() is None
    assert not node.waiting()


def test_ranks_share_out_the_cores_and_none_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {7, 1, 2, 3, 6})
    assert [own_cores(rank, 2) for rank in range(2)] == [[1, 2], [3, 6]]
    assert LaunchSettings(procs="5", bind_cores=True).ranks == 5
    with pytest.raises(ConfigError, match="of 6 ranks only 5 can have one"):
        LaunchSettings(procs="6", bind_cores=True)
