"""How this host is reached, which interface its ranks talk over, and a store that falls silent."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

from penstock.errors import EnvironmentProblem
from penstock.launch import meeting
from penstock.launch.addresses import describe_route, interface_of, is_loopback, route_to
from penstock.launch.meeting import Meeting, Member, TimedStore, seen_from_outside
from penstock.launch.ranks import Assignment, _environment
from penstock.launch.report import Outcome
from penstock.launch.settings import LaunchSettings
from penstock.launch.signals import Requests, StopRequested


def test_the_way_to_a_host_has_an_address_and_an_interface() -> None:
    assert route_to("127.0.0.1") == ("127.0.0.1", "127.0.0.1")
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    assert interface_of("192.0.2.77") == ""
    assert describe_route("127.0.0.1").startswith(
        "Here 127.0.0.1 is 127.0.0.1, at which no other host can reach this one"
    )
    addresses = ("127.0.1.1", "::1", "10.0.0.1", "fe80::1%eth0")
    assert [is_loopback(address) for address in addresses] == [True, True, False, False]
    assert describe_route("no-such-host.invalid").startswith(
        "This host knows no way to no-such-host.invalid: "
    )


def member(address: str, rendezvous: str) -> Member:
    return Member(
        place=None, procs=1, address=address, port=1, round=0, restarts=0, host="h", rendezvous=rendezvous
    )


def test_the_host_of_the_rendezvous_has_the_address_that_others_reach_it_by() -> None:
    server, other = member("127.0.1.1", "127.0.1.1"), member("10.0.0.2", "10.0.0.1")
    assert [one.address for one in seen_from_outside([server, other])] == ["10.0.0.1", "10.0.0.2"]
    assert seen_from_outside([server, server]) == [server, server], "both are on this machine"


def test_ranks_of_several_nodes_use_the_interface_unless_the_user_chose_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    there = Assignment(0, 2, 0, 2, ("10.0.0.1", 1), interface="eth7")
    both = _environment(there, 0, 1)
    assert (both["GLOO_SOCKET_IFNAME"], both["NCCL_SOCKET_IFNAME"]) == ("eth7", "=eth7")
    assert "GLOO_SOCKET_IFNAME" not in _environment(Assignment(0, 1, 0, 1, ("127.0.0.1", 1)), 0, 1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert _environment(there, 0, 1)["GLOO_SOCKET_IFNAME"] == "ib0"


class Silent:
    """A store whose host has vanished: every call waits until the test ends."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.over.wait(60)


def test_a_silent_store_counts_as_lost_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_PATIENCE", 0.2)
    node = Meeting(LaunchSettings(nnodes="2", rdzv="127.0.0.1:1", lost_seconds=0.5))
    silent = Silent()
    node._store = TimedStore(silent, node._begun)  # type: ignore[arg-type]
    begun = time.monotonic()
    node.report(Outcome(1))

    def listen() -> None:
        while time.monotonic() < begun + 30:
            node.heard()

    with pytest.raises(EnvironmentProblem, match=r"127\.0\.0\.1:1 does not answer \(it has been silent for"):
        listen()
    node.__exit__(None, None, None)
    silent.over.set()


def test_a_signal_ends_the_wait_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Meeting(LaunchSettings(nnodes="2", rdzv="127.0.0.1:1", lost_seconds=60.0))
    over = threading.Event()
    monkeypatch.setattr(node, "_meet", lambda restarts: over.wait(60))
    main = threading.get_ident()

    def wait() -> None:
        with Requests((signal.SIGTERM,)) as requests, requests.interrupting():
            threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGTERM)).start()
            node.meet(0)

    with pytest.raises(StopRequested):
        wait()
    over.set()
