"""The settings of `penstock launch`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

_ENDPOINT = re.compile(r"^(?P<host>\[[0-9a-fA-F:]+\]|[^:\s]+):(?P<port>[0-9]+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """How many ranks run on how many nodes, and what happens when one fails."""

    procs: int = 1
    """Ranks on this node."""
    nodes: tuple[int, int] = (1, 1)
    """The fewest and the most nodes that the run goes on with."""
    rendezvous: str | None = None
    """HOST:PORT where the agents of several nodes meet. The agent on HOST serves it."""
    run_id: str = "penstock"
    """Agents with the same endpoint and name belong together."""
    node_rank: int | None = None
    """This node's number. The agents choose one if it is left out."""
    max_restarts: int = 3
    """How often all ranks are restarted after faults."""
    hang_seconds: float = 600.0
    """A rank that finishes no further step for so many seconds hangs; 0 turns this off."""
    start_seconds: float = 1800.0
    """The same limit until the first step."""
    join_seconds: float = 600.0
    """How long agents wait for the fewest nodes to come."""
    settle_seconds: float = 10.0
    """How long they wait for more nodes once there are enough."""
    lost_seconds: float = 15.0
    """An agent that has been silent for so many seconds is lost."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems)

    def _problems(self) -> Iterator[str]:
        if self.procs < 1:
            yield f"--procs is {self.procs}, but must be at least 1."
        low, high = self.nodes
        if not 1 <= low <= high:
            yield f"--nnodes is {low}:{high}, but must be N or MIN:MAX with 1 ≤ MIN ≤ MAX."
        if high > 1 and self.rendezvous is None:
            yield "Several nodes need a rendezvous: give each the same --rdzv HOST:PORT, where HOST is one of them."
        if self.rendezvous is not None:
            match = _ENDPOINT.match(self.rendezvous)
            if match is None or not 0 < int(match["port"]) < 65536:
                yield f"--rdzv is {self.rendezvous!r}, but must be HOST:PORT, such as node-1:29400."
        if self.node_rank is not None and not 0 <= self.node_rank < high:
            yield f"--node-rank is {self.node_rank}, but must be from 0 to {high - 1}, as --nnodes says."
        if self.max_restarts < 0:
            yield f"--max-restarts is {self.max_restarts}, but must be at least 0."
        for name, value in (("hang", self.hang_seconds), ("start", self.start_seconds)):
            if not value >= 0:
                yield f"--{name}-seconds is {value:g}, but must be at least 0; 0 turns the limit off."

    @property
    def several(self) -> bool:
        """Whether agents have to meet: a rendezvous was given."""
        return self.rendezvous is not None

    @property
    def elastic(self) -> bool:
        """Whether the number of nodes may change."""
        return self.nodes[0] < self.nodes[1]

    def endpoint(self) -> tuple[str, int]:
        """Host and port of the rendezvous."""
        assert self.rendezvous is not None
        host, _, port = self.rendezvous.rpartition(":")
        return host.strip("[]"), int(port)


def parse_nodes(text: str) -> tuple[int, int]:
    """`N` or `MIN:MAX`. Raises ConfigError for anything else."""
    low, colon, high = text.partition(":")
    try:
        return int(low), int(high if colon else low)
    except ValueError:
        raise ConfigError(f"--nnodes is {text!r}, but must be N or MIN:MAX, such as 4 or 2:4.") from None


def parse_procs(text: str, environment: Mapping[str, str] | None = None) -> int:
    """A number, or `auto`: one rank per visible GPU, or one without GPUs. Uses neither torch nor the driver."""
    if text != "auto":
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"--procs is {text!r}, but must be a number or auto.") from None
    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return max(
            1, len([device for device in visible.split(",") if device.strip() and device.strip() != "-1"])
        )
    nvidia = Path("/proc/driver/nvidia/gpus")
    return max(1, len(list(nvidia.iterdir())) if nvidia.is_dir() else 1)
