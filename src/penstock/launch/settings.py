"""The settings of `penstock launch`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.boundary.files import quoted
from penstock.config.convert import (
    BadValue,
    Checked,
    FilledText,
    Natural,
    OutOfRange,
    Ranks,
    Seconds,
    convert,
)
from penstock.errors import ConfigError

_ENDPOINT = re.compile(r"^(?P<host>\[[0-9a-fA-F:]+\]|[^:\s]+):(?P<port>[0-9]{1,5})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings(Checked):
    """The number of ranks and nodes, and what happens when a rank fails. Fields are the command's options; each
    docstring is one line, because `--help` shows it.
    """

    procs: FilledText = "auto"
    """Ranks on this node; `auto` is one per GPU, or one without GPUs."""
    bind_cores: bool = False
    """Bind each rank to its own cores. Ranks that compute on CPUs wait less; two such runs would share cores."""
    nnodes: FilledText = "1"
    """Nodes, `N` or `MIN:MAX`. With MIN:MAX the run continues with the nodes that are present."""
    rdzv: FilledText | None = None
    """HOST:PORT at which the agents of all nodes meet; the agent on HOST serves it. Start the same command on each."""
    rdzv_id: FilledText = "penstock"
    """Name of the run at that endpoint."""
    node_rank: Natural | None = None
    """This node's number. The agents choose one if it is left out."""
    max_restarts: Natural = 3
    """How often all ranks are restarted after a fault."""
    hang_seconds: Seconds = 600.0
    """A rank that finishes no step for this many seconds hangs: stacks are shown, and it is a fault. 0 disables it."""
    start_seconds: Seconds = 1800.0
    """Limit until the first step, which may compile."""
    join_seconds: Seconds = 600.0
    """Longest wait in seconds for the least number of nodes."""
    settle_seconds: Seconds = 10.0
    """Seconds to wait for more nodes once there are enough."""
    lost_seconds: Seconds = 15.0
    """A node that has been silent for this many seconds is lost."""

    def _problems(self) -> Iterator[str]:
        low, high = self.nodes
        ranks = self.ranks
        if self.bind_cores and ranks > len(cores := usable_cores()):
            yield f"--bind-cores gives each rank cores of its own, but of {ranks} ranks only {len(cores)} can have one."
        if low > high:
            yield f"--nnodes is {low}:{high}, but must be N or MIN:MAX with MIN ≤ MAX."
        if high > 1 and self.rdzv is None:
            yield "Several nodes need a rendezvous: give each the same --rdzv HOST:PORT, where HOST is one of them."
        if self.rdzv is not None:
            match = _ENDPOINT.match(self.rdzv)
            if match is None or not 0 < int(match["port"]) < 65536:
                yield f"--rdzv is {quoted(self.rdzv)}, but must be HOST:PORT, such as node-1:29400."
        if self.node_rank is not None and self.node_rank >= high:
            yield f"--node-rank is {self.node_rank}, but must be from 0 to {high - 1}, as --nnodes says."

    @property
    def ranks(self) -> int:
        """Number of ranks on this node. `auto` is resolved without torch or the driver."""
        if self.procs != "auto":
            return _number("--procs", self.procs, "a number or auto")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return max(1, sum(device.strip() not in ("", "-1") for device in visible.split(",")))
        nvidia = Path("/proc/driver/nvidia/gpus")
        return max(1, len(list(nvidia.iterdir())) if nvidia.is_dir() else 1)

    @property
    def nodes(self) -> tuple[int, int]:
        """Least and largest number of nodes with which the run continues."""
        low, colon, high = self.nnodes.partition(":")
        words = "N or MIN:MAX, such as 4 or 2:4"
        return _number("--nnodes", low, words), _number("--nnodes", high if colon else low, words)

    @property
    def elastic(self) -> bool:
        """Whether the number of nodes may change."""
        return self.nodes[0] < self.nodes[1]

    def endpoint(self) -> tuple[str, int]:
        """Host and port of the rendezvous."""
        assert self.rdzv is not None
        host, _, port = self.rdzv.rpartition(":")
        return host.strip("[]"), int(port)


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use; none on systems, such as macOS, that bind no process to cores."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []


def own_cores(rank: int, ranks: int) -> list[int]:
    """The cores that rank `rank` of this machine's `ranks` is bound to: adjacent cores, the same number per rank."""
    cores = usable_cores()
    share = len(cores) // ranks
    return cores[rank * share : (rank + 1) * share]


def _number(option: str, text: str, words: str) -> int:
    """Parse the number of processes or nodes in `text`. Raises ConfigError saying that it must be `words`."""
    try:
        return int(convert(text, Ranks, text=True))
    except BadValue as bad:
        reason = str(bad) if isinstance(bad, OutOfRange) else f"must be {words}."
        raise ConfigError(f"{option} is {quoted(text)}, but {reason}") from None
