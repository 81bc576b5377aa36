"""What the loss of hosts and links does to runs of several nodes, on hosts with names, addresses and links of their own
(`helpers.hosts`). Figures of the whole suite go to benchmarks/results/faults_hosts.json.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.agents import Agent, no_orphans
from helpers.doomed_runs import PLANS, config_in, written
from helpers.hosts import PORT, Host, Network, why_not
from helpers.rows import record
from penstock import checkpoint

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "faults_hosts.json"
LOST = 6.0
REASON = why_not()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON), pytest.mark.timeout(600)]
whole = pytest.mark.faults
DEBIAN = (
    {"localhost": "127.0.0.1", "node-1": "127.0.1.1", "node-2": "10.231.77.2"},
    {"localhost": "127.0.0.1", "node-1": "10.231.77.1", "node-2": "127.0.1.1"},
)
"""Each host's own name is an address of its own, as Debian and Ubuntu set it."""


def note(row: str, **figures: Any) -> None:
    record(RESULTS, row, figures, command="make test-faults PYTEST=tests/faults/test_several_hosts.py")


class Run:
    """A run of the toy of `helpers.toy_run`, or of `penstock train`, by agents on several hosts that share `folder`."""

    def __init__(self, folder: Path, nodes: str, rendezvous: str, *program: str) -> None:
        self.folder = folder
        self._options = (
            *(
                "--procs",
                "1",
                "--nnodes",
                nodes,
                "--rdzv",
                f"{rendezvous}:{PORT}",
                "--lost-seconds",
                str(LOST),
            ),
            *("--settle-seconds", "3", "--join-seconds", "90"),
        )
        self._program = program or ("-m", "helpers.toy_run", str(folder), "100000", "slow:50")

    def on(self, host: Host, *options: str) -> Agent:
        log = self.folder / f"{host.name}.{time.monotonic_ns()}.log"
        return Agent(*self._options, *options, "--", *self._program, log=log, prefix=host.prefix)

    @property
    def steps(self) -> list[list[int]]:
        """Step, world and life of every step of the toy."""
        file = self.folder / "steps"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [[int(word) for word in line.split()] for line in lines]

    def goes_on(self, agent: Agent, world: int) -> float:
        """Wait until a step is taken that was not yet, by `world` ranks; returns the seconds that it took."""
        begun, known = time.monotonic(), len(self.steps)
        agent.until(lambda: self.steps[known:] != [] and self.steps[-1][1] == world)
        return time.monotonic() - begun


def stopped(agent: Agent) -> None:
    agent.send(signal.SIGTERM)
    assert agent.wait(60) == 75, agent.said


# -- a host that is lost, with rank 0 and without


def test_the_host_of_rank_0_is_lost_and_the_other_goes_on(tmp_path: Path) -> None:
    """The lock of the run is its. Each host's own name is a loopback address there."""
    config = config_in(tmp_path, PLANS["ddp"], steps=100_000)
    run = Run(tmp_path, "1:2", "node-2", "-m", "helpers.doomed", str(written(config)))
    output = Path(config.output)

    def newest() -> int:
        return max(checkpoint.steps(output / "checkpoints"), default=0)

    with Network(2, DEBIAN) as network:
        lost, kept = network.hosts
        with run.on(kept) as b, run.on(lost):
            b.until(lambda: newest() > 0 and '"host": "node-1"' in (output / "lock").read_text())
            before = newest()
            network.lose(lost)
            begun = time.monotonic()
            b.until(lambda: newest() > before + 20)
            seconds = time.monotonic() - begun
            assert '"host": "node-2"' in (output / "lock").read_text()
            stopped(b)
    assert seconds < 120
    no_orphans(tmp_path)
    assert "node 1 of 2: its ranks talk over eth0." in b.said
    assert "Node 0 (node-1) is lost" in b.said
    assert "in use" not in b.said
