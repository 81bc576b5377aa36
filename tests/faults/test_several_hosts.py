"""What the loss of hosts and links does to runs of several nodes, on hosts with names, addresses and links of their own
of this machine. Figures of the whole suite go to benchmarks/results/faults_hosts.json.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest

from helpers.agents import Agent, no_orphans
from helpers.doomed import PLANS, TOY, config_in, program, steps_in
from helpers.rows import Note
from penstock import checkpoint

# -- Hosts with names, addresses and links of their own, on this machine: namespaces of Linux, which share its disk

PORT = 29433
_KINDS = ("--net", "--uts", "--mount")


def why_not() -> str:
    """Why there can be no such hosts here; empty where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if missing := [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} (packages iproute2 and util-linux) are missing"
    tried = subprocess.run(
        ["unshare", *_KINDS, "ip", "link", "add", "name", "bridge0", "type", "bridge"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"this machine lets nobody make namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """One host, until closed. `address` is that of its only link, by which the others reach it."""

    def __init__(self, number: int, names: dict[str, str]) -> None:
        """`names` are what its /etc/hosts says of addresses; without any it is this machine's."""
        self.name, self.address = f"node-{number}", f"10.231.77.{number}"
        self._holder = subprocess.Popen(
            ["unshare", *_KINDS, "sh", "-c", 'hostname "$1"; echo; read end', "-", self.name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._holder.stdout is not None
        self._holder.stdout.readline()  # the namespaces are there
        pid = self._holder.pid
        self._net = os.readlink(f"/proc/{pid}/ns/net")
        assert self._net != os.readlink("/proc/self/ns/net")
        self.prefix = ("nsenter", "--target", str(pid), *_KINDS, "--")
        """What a command on this host begins with."""
        self.run("ip", "link", "set", "lo", "up")
        if names:
            lines = "".join(f"{address} {name}\n" for name, address in names.items())
            self.run("sh", "-c", 'mount -t tmpfs none /mnt; printf "$1" > /mnt/hosts', "-", lines)
            self.run("mount", "--bind", "/mnt/hosts", "/etc/hosts")

    def run(self, *command: str) -> None:
        """Run a command there to its end."""
        subprocess.run([*self.prefix, *command], check=True)

    def close(self) -> None:
        """End it, with all that runs there."""
        if self._holder.returncode is not None:
            return
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "ns" / "net") == self._net and int(entry.name) != self._holder.pid:
                    os.kill(int(entry.name), 9)
            except OSError:
                continue  # it has ended
        self._holder.kill()  # the last: until then no other namespace has its number
        self._holder.communicate()


class Network:
    """Hosts on one network while entered, numbered from 1. `names` are entries of each one's /etc/hosts."""

    def __init__(self, count: int, names: tuple[dict[str, str], ...] = ()) -> None:
        self._names = names or ({},) * count
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._switch = self._add(stack, Host(0, {}))
            self._switch.run("ip", "link", "add", "name", "bridge0", "type", "bridge")
            self._switch.run("ip", "link", "set", "bridge0", "up")
            self._stack, self._made = stack, 0
            self.hosts = [self.add(names) for names in self._names]
            self._stack = stack.pop_all()
        return self

    def add(self, names: dict[str, str] | None = None) -> Host:
        """One more host."""
        self._made += 1
        host = self._add(self._stack, Host(self._made, names or {}))
        words = ("type", "veth", "peer", "name", "eth0", "netns", host.prefix[2])
        self._switch.run("ip", "link", "add", "name", f"port{self._made}", *words)
        self._switch.run("ip", "link", "set", f"port{self._made}", "master", "bridge0", "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        return host

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def silence(self, host: Host) -> None:
        """Let packets from and to a host vanish, without a sign of it at either end."""
        self._switch.run("ip", "link", "set", f"port{host.name[5:]}", "nomaster")

    def lose(self, host: Host) -> None:
        """End a host as a power cut does: nothing that it has sent tells the others."""
        self.silence(host)
        host.close()

    @staticmethod
    def _add(stack: ExitStack, host: Host) -> Host:
        stack.callback(host.close)
        return host


LOST = 12.0
DOWN = 2.0
"""TCP sends again after 3.0 s, and then only after 6.2 s."""
LONG = 600.0
REASON = why_not()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON), pytest.mark.timeout(1800)]
whole = pytest.mark.faults
DEBIAN = (
    {"localhost": "127.0.0.1", "node-1": "127.0.1.1", "node-2": "10.231.77.2"},
    {"localhost": "127.0.0.1", "node-1": "10.231.77.1", "node-2": "127.0.1.1"},
)
"""Each host's own name is an address of its own, as Debian and Ubuntu set it."""


class Run:
    """A run of the toy of `helpers.doomed`, or of `penstock train`, by agents on several hosts that share `folder`."""

    def __init__(self, folder: Path, nodes: str, host: str, *program: str, **options: float) -> None:
        """`host` is that of the rendezvous."""
        self.folder = folder
        words = {
            "procs": 1, "nnodes": nodes, "rdzv": f"{host}:{PORT}", "lost_seconds": LOST, "settle_seconds": 3,
        }  # fmt: skip
        words |= {"join_seconds": 90, "max_restarts": 99, **options}
        self._options = [f"--{name.replace('_', '-')}={value}" for name, value in words.items()]
        self._program = program or (*TOY, str(folder), "100000", "slow:50")

    def on(self, host: Host) -> Agent:
        log = self.folder / f"{host.name}.{time.monotonic_ns()}.log"
        return Agent(*self._options, "--", *self._program, log=log, prefix=host.prefix)

    @property
    def steps(self) -> list[list[int]]:
        """Step, world and life of every step of the toy."""
        return steps_in(self.folder)

    def goes_on(self, agent: Agent, world: int) -> float:
        """Wait until a step is taken that was not yet, by `world` ranks; returns the seconds that it took."""
        begun, known = time.monotonic(), len(self.steps)
        agent.until(lambda: self.steps[known:] != [] and self.steps[-1][1] == world, LONG)
        return time.monotonic() - begun


def stopped(agent: Agent) -> None:
    agent.send(signal.SIGTERM)
    assert agent.wait(60) == 75, agent.said


def _rank_0_lost(folder: Path, lost_seconds: float) -> float:
    """Seconds until the other has saved twice more."""
    config = config_in(folder, PLANS["ddp"], steps=100_000)
    run = Run(folder, "1:2", "node-2", *program(config), lost_seconds=lost_seconds)
    lock, checkpoints = Path(config.output) / "lock", Path(config.output) / "checkpoints"
    with Network(2, DEBIAN) as network:
        lost, kept = network.hosts
        with run.on(kept) as b, run.on(lost):
            b.until(lambda: len(checkpoint.steps(checkpoints)) > 1 and '"node-1"' in lock.read_text(), LONG)
            before = checkpoint.steps(checkpoints)[-1]
            network.lose(lost)
            begun = time.monotonic()
            b.until(lambda: checkpoint.steps(checkpoints)[-1] > before + 8, LONG)
            seconds = time.monotonic() - begun
            assert '"host": "node-2"' in lock.read_text()
            stopped(b)
    assert "node 1 of 2: its ranks talk over eth0." in b.said
    assert "Node 0 (node-1) is lost" in b.said
    assert "in use" not in b.said
    assert "lapse" not in b.said, "it did not wait"
    no_orphans(folder)
    return seconds


@pytest.mark.parametrize("times", [pytest.param(0, marks=pytest.mark.sweep), pytest.param(1, marks=whole)])
def test_the_host_of_rank_0_is_lost_and_the_other_goes_on(note: Note, tmp_path: Path, times: int) -> None:
    """The lock of the run is its. Each host's own name is a loopback address there."""
    seconds = _rank_0_lost(tmp_path, LOST if times else 5.0)
    note("the node with rank 0 is lost", hosts=2, times=times, seconds_until_two_more_saves=seconds)


@whole
def test_a_run_that_is_started_again_on_another_host_waits_for_the_lock(note: Note, tmp_path: Path) -> None:
    config = config_in(tmp_path, replace(PLANS["ddp"], dp=1), steps=100_000)
    command = ("--procs", "1", "--", *program(config))
    checkpoints = Path(config.output) / "checkpoints"
    with Network(2) as network:
        first, second = network.hosts
        with Agent(*command, log=tmp_path / "first", prefix=first.prefix) as a:
            a.until(lambda: len(checkpoint.steps(checkpoints)) > 1, LONG)
            network.lose(first)
        before, begun = checkpoint.steps(checkpoints)[-1], time.monotonic()
        with Agent(*command, log=tmp_path / "second", prefix=second.prefix) as b:
            b.until(lambda: "on node-1" in b.said and "for its lock to lapse" in b.said, LONG)
            b.until(lambda: checkpoint.steps(checkpoints)[-1] > before, LONG)
            seconds = time.monotonic() - begun
            stopped(b)
    note("a run whose host is lost is started again on another", hosts=2, times=1, says_that_it_waits=True,
         seconds_until_the_next_save=seconds)  # fmt: skip


@pytest.mark.parametrize("times", [pytest.param(0, marks=pytest.mark.slow), pytest.param(3, marks=whole)])
def test_a_link_comes_back_in_time_or_falls_silent(note: Note, tmp_path: Path, times: int) -> None:
    lost = LOST if times else 5.0
    run = Run(tmp_path, "2", "10.231.77.1", lost_seconds=lost)
    with Network(2) as network:
        near, far = network.hosts
        with run.on(near) as a, run.on(far) as b:
            a.until(lambda: len(run.steps) > 20, LONG)
            for _ in range(times):
                far.run("ip", "link", "set", "eth0", "down")
                time.sleep(DOWN)
                far.run("ip", "link", "set", "eth0", "up")
                run.goes_on(a, 2)
                time.sleep(5.0)  # the agents' connections come back at other times than the ranks'
            assert {life for _, _, life in run.steps} == {0}, "nothing was started again"
            network.silence(far)
            begun = time.monotonic()
            assert b.wait(LONG) == 3, b.said
            seconds = time.monotonic() - begun
            assert "does not answer (it has been silent for" in b.said
            assert "This host is 10.231.77.2 (eth0) on the way to 10.231.77.1." in b.said
            a.until(lambda: "is lost: its agent has not been heard of" in a.said, LONG)
            stopped(a)
    assert seconds < lost + 20
    no_orphans(tmp_path)
    note("a link goes down and comes up again", hosts=2, times=times, seconds_down=DOWN, restarts=0)
    note("the network falls silent: the node away from the rendezvous", hosts=2, times=1, code=3,
         lost_seconds=LOST, seconds=seconds)  # fmt: skip


@whole
def test_nodes_come_late_are_lost_and_come_back(note: Note, tmp_path: Path) -> None:
    run, times = Run(tmp_path, "1:2", "10.231.77.1"), 1
    slowest = dict.fromkeys(("joined", "killed", "lost"), 0.0)

    def took(what: str, world: int) -> None:
        slowest[what] = max(slowest[what], run.goes_on(a, world))

    with Network(1) as network, run.on(network.hosts[0]) as a:
        a.until(lambda: len(run.steps) > 5, LONG)
        for _ in range(times):
            host = network.add()
            for kind in ("killed", "lost"):  # the second time the host comes back
                with run.on(host) as b:
                    took("joined", 2)
                    first = (
                        next(place for place, step in reversed([*enumerate(run.steps)]) if step[1] == 1) + 1
                    )
                    assert run.steps[first][0] == run.steps[first - 1][0] + 1, "no step was lost to make room"
                    if kind == "killed":
                        b.send(signal.SIGKILL)
                    else:
                        network.lose(host)
                    took(kind, 1)
        stopped(a)
    no_orphans(tmp_path)
    note(
        "a node comes late, or comes back",
        hosts=2,
        times=2 * times,
        steps_lost=0,
        slowest_seconds=slowest["joined"],
    )
    note(
        "the agent of a node is killed",
        hosts=2,
        times=times,
        slowest_seconds_until_going_on=slowest["killed"],
    )
    note(
        "a node is lost, not that with rank 0",
        hosts=2,
        times=times,
        slowest_seconds_until_going_on=slowest["lost"],
    )


@whole
def test_the_host_of_the_rendezvous_is_lost(note: Note, tmp_path: Path) -> None:
    run = Run(tmp_path, "2:3", "10.231.77.3")
    with Network(3) as network:
        one, two, third = network.hosts
        with run.on(third), run.on(one) as a, run.on(two) as b:
            a.until(lambda: run.steps[-1:] != [] and run.steps[-1][1] == 3, LONG)
            network.lose(third)
            begun = time.monotonic()
            assert (a.wait(LONG), b.wait(LONG)) == (3, 3), a.said + b.said
            seconds = time.monotonic() - begun
    for agent in (a, b):
        assert "The rendezvous at 10.231.77.3:29433 does not answer" in agent.said
    assert seconds < LOST + 20
    no_orphans(tmp_path)
    note("the host of the rendezvous is lost", hosts=3, times=1, code=3, lost_seconds=LOST, seconds=seconds)


@whole
def test_ctrl_c_works_while_the_network_is_silent(note: Note, tmp_path: Path) -> None:
    run = Run(tmp_path, "2", "10.231.77.1", lost_seconds=300)
    with Network(2) as network:
        near, far = network.hosts
        with run.on(near), run.on(far) as b:
            b.until(lambda: len(run.steps) > 5, LONG)
            network.silence(far)
            time.sleep(2.0)
            b.send(signal.SIGINT)
            b.until(lambda: "SIGINT" in b.said or "Ctrl-C" in b.said)
            b.send(signal.SIGINT)
            begun = time.monotonic()
            assert b.wait(LONG) == 130, b.said
            seconds = time.monotonic() - begun
    assert seconds < 25
    no_orphans(tmp_path)
    note("Ctrl-C while the network is silent", hosts=2, times=1, code=130, seconds=seconds)


@whole
def test_a_name_that_is_a_loopback_address_everywhere_is_named(tmp_path: Path) -> None:
    alone = {"localhost": "127.0.0.1", "gpu": "127.0.1.1"}
    run = Run(tmp_path, "2", "gpu", join_seconds=5)
    with Network(2, (alone, alone)) as network:
        agents = [run.on(host) for host in network.hosts]
        for agent in agents:
            with agent:
                assert agent.wait(LONG) == 3
    for agent, host in zip(agents, network.hosts, strict=True):
        assert "Here gpu is 127.0.1.1, at which no other host can reach this one" in agent.said
        assert f"such as {host.address}" in agent.said
