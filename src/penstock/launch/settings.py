"""The settings of `penstock launch`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.config.convert import Checked
from penstock.errors import ConfigError

_ENDPOINT = re.compile(r"^(?P<host>\[[0-9a-fA-F:]+\]|[^:\s]+):(?P<port>[0-9]+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings(Checked):
    """How many ranks run on how many nodes, and what happens when one fails. Fields are the command's options, and each
    docstring is one line, as `--help` shows it.
    """

    procs: str = "auto"
    """Ranks on this node; `auto` is one per GPU, or one without GPUs."""
    nnodes: str = "1"
    """Nodes, `N` or `MIN:MAX`. With MIN:MAX the run goes on with the nodes that are there."""
    rdzv: str | None = None
    """HOST:PORT at which the agents of all nodes meet; the agent on HOST serves it. Start the same command on each."""
    rdzv_id: str = "penstock"
    """Name of the run at that endpoint."""
    node_rank: int | None = None
    """This node's number. The agents choose one if it is left out."""
    max_restarts: int = 3
    """How often all ranks are restarted after a fault."""
    hang_seconds: float = 600.0
    """A rank that finishes no step for so many seconds hangs: stacks are shown, and it is a fault. 0 turns it off."""
    start_seconds: float = 1800.0
    """The same limit until the first step, which may compile."""
    join_seconds: float = 600.0
    """How long to wait for the fewest nodes."""
    settle_seconds: float = 10.0
    """How long to wait for more nodes once there are enough."""
    lost_seconds: float = 15.0
    """A node that has been silent for so many seconds is lost."""

    def _problems(self) -> Iterator[str]:
        if self.ranks < 1:
            yield f"--procs is {self.procs}, but must be at least 1."
        low, high = self.nodes
        if not 1 <= low <= high:
            yield f"--nnodes is {low}:{high}, but must be N or MIN:MAX with 1 ≤ MIN ≤ MAX."
        if high > 1 and self.rdzv is None:
            yield "Several nodes need a rendezvous: give each the same --rdzv HOST:PORT, where HOST is one of them."
        if self.rdzv is not None:
            match = _ENDPOINT.match(self.rdzv)
            if match is None or not 0 < int(match["port"]) < 65536:
                yield f"--rdzv is {self.rdzv!r}, but must be HOST:PORT, such as node-1:29400."
        if self.node_rank is not None and not 0 <= self.node_rank < high:
            yield f"--node-rank is {self.node_rank}, but must be from 0 to {high - 1}, as --nnodes says."
        if self.max_restarts < 0:
            yield f"--max-restarts is {self.max_restarts}, but must be at least 0."
        for name, value in (("hang", self.hang_seconds), ("start", self.start_seconds)):
            if not value >= 0:
                yield f"--{name}-seconds is {value:g}, but must be at least 0; 0 turns the limit off."

    @property
    def ranks(self) -> int:
        """Ranks on this node. What `auto` means is found without torch and the driver."""
        if self.procs != "auto":
            try:
                return int(self.procs)
            except ValueError:
                raise ConfigError(f"--procs is {self.procs!r}, but must be a number or auto.") from None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return max(1, sum(device.strip() not in ("", "-1") for device in visible.split(",")))
        nvidia = Path("/proc/driver/nvidia/gpus")
        return max(1, len(list(nvidia.iterdir())) if nvidia.is_dir() else 1)

    @property
    def nodes(self) -> tuple[int, int]:
        """The fewest and the most nodes that the run goes on with."""
        low, colon, high = self.nnodes.partition(":")
        try:
            return int(low), int(high if colon else low)
        except ValueError:
            raise ConfigError(
                f"--nnodes is {self.nnodes!r}, but must be N or MIN:MAX, such as 4 or 2:4."
            ) from None

    @property
    def elastic(self) -> bool:
        """Whether the number of nodes may change."""
        return self.nodes[0] < self.nodes[1]

    def endpoint(self) -> tuple[str, int]:
        """Host and port of the rendezvous."""
        assert self.rdzv is not None
        host, _, port = self.rdzv.rpartition(":")
        return host.strip("[]"), int(port)
