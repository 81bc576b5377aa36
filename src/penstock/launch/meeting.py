"""Agents of several nodes. torch.distributed's c10d rendezvous decides which nodes take part in each life of the ranks,
and the agents exchange messages through its store.

Only torchrun's rendezvous is used. Its agent returns 1 whatever the ranks returned. Its store outlives the ranks'
lives, so that gloo in a new life finds the addresses of the last and waits for ever; here rank 0 serves a new store in
each life.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated, Self, TypeVar

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from penstock.boundary.files import shown
from penstock.boundary.trees import Bounds, parse_json
from penstock.config.convert import Count, FilledText, Natural, Range
from penstock.config.load import from_dict
from penstock.errors import ConfigError, EnvironmentProblem, ExitCode
from penstock.launch.nodes import Nodes
from penstock.launch.ranks import Assignment
from penstock.launch.settings import LaunchSettings
from penstock.launch.verdict import Failure, Outcome

T = TypeVar("T")
_LOOK = 0.5
"""Seconds between two reads of the store."""
_BOUNDS = Bounds(bytes=64_000_000)
"""Limits of a message: it holds the traceback of every rank."""
_REMEDY = "Start the same version of Penstock on all nodes."
_GOODBYE = 10.0
"""Seconds for which the agent that serves the store stays, so that the others hear the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An agent, as it presents itself to the others."""

    place: Natural | None
    """The number that its --node-rank gave it."""
    procs: Count
    address: FilledText
    """Where rank 0 serves the ranks' store, if it runs here."""
    port: Annotated[int, Range(1, 65535)]
    round: Natural
    restarts: Natural
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """How a life ended on one node."""

    node: Natural
    outcome: Outcome


def understood(cls: type[T], raw: bytes) -> T:
    """The message of another agent. Raises EnvironmentProblem for anything else, such as another version's."""
    where = "What another node's agent says"
    tree = parse_json(raw, where, error=EnvironmentProblem, bounds=_BOUNDS, remedy=_REMEDY)
    return from_dict(
        cls, tree, origin=f"what another node's agent says ({_REMEDY})", error=EnvironmentProblem
    )


class Meeting(Nodes):
    """This node among the others."""

    def __init__(self, settings: LaunchSettings) -> None:
        super().__init__(settings.ranks)
        self._settings = settings
        self._handler: DynamicRendezvousHandler | None = None
        self._serves = False
        self._store: Store | None = None
        self._members: list[Member] = []
        self._node = 0
        self._looked = 0.0
        self._seen: dict[int, tuple[int, float]] = {}
        self._heard: Outcome | None = None
        self._waiting = False
        self._goes_on = False
        """Whether the others will have another life."""

    def __enter__(self) -> Self:
        # Without this the handler would serve one store for all lives of the ranks; see the first lines of this file.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        # The agent says what it means.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
        settings = self._settings
        alive = max(1, round(settings.lost_seconds / 3))
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=settings.rdzv or "",
            run_id=settings.rdzv_id,
            min_nodes=settings.nodes[0],
            max_nodes=settings.nodes[1],
            local_addr=_address_towards(settings.endpoint()[0]),
            join_timeout=str(int(settings.join_seconds)),
            last_call_timeout=str(int(settings.settle_seconds)),
            keep_alive_interval=str(alive),
            keep_alive_max_attempt="3",
        )
        with self._explained():
            store, self._serves = _open_store(settings)
            backend = C10dRendezvousBackend(store, settings.rdzv_id)
            self._handler = create_handler(store, backend, parameters)
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._goes_on or error[0] is not None:
            return  # the others go on, and this node's silence tells them that it is gone
        # The end has been reported already; what fails here does not change it.
        with contextlib.suppress(DistError, RendezvousError, EnvironmentProblem):
            if self._handler is not None:
                self._handler.shutdown()
            self._say_goodbye()

    def meet(self, restarts: int) -> Assignment:
        """As for one node. Raises EnvironmentProblem if too few come, or the run has ended elsewhere."""
        assert self._handler is not None
        self._round += 1
        self._heard, self._waiting, self._goes_on, self._seen = None, False, False, {}
        with self._explained():
            info = self._handler.next_rendezvous()
            self._store = PrefixStore("penstock", info.store)
            address, port = self._reserve(_address_towards(self._settings.endpoint()[0]))
            member = Member(
                place=self._settings.node_rank,
                procs=self._procs,
                address=address,
                port=port,
                round=self._round,
                restarts=restarts,
                host=socket.gethostname(),
            )
            self._store.set(f"member/{info.rank}", json.dumps(asdict(member)))
            keys = [f"member/{node}" for node in range(info.world_size)]
            self._store.wait(keys, timedelta(seconds=self._settings.lost_seconds))
            members = [understood(Member, value) for value in self._store.multi_get(keys)]
        return self._assignment(members, info.rank)

    def report(self, outcome: Outcome) -> None:
        if self._store is None:
            return
        self._goes_on = not outcome.final
        with self._explained():
            number = self._store.add("reports", 1)
            self._store.set(f"report/{number}", json.dumps(asdict(Message(node=self._node, outcome=outcome))))

    def heard(self) -> Outcome | None:
        if time.monotonic() - self._looked >= _LOOK:
            self._looked = time.monotonic()
            with self._explained():
                self._heard = self._reported() or self._lost()
                assert self._handler is not None
                self._waiting = self._handler.num_nodes_waiting() > 0
        return self._heard

    def waiting(self) -> bool:
        return self._waiting or (self._heard is not None and self._heard.regroup)

    def _assignment(self, members: list[Member], rank: int) -> Assignment:
        """Order the nodes by --node-rank if all were given one, else as the rendezvous did."""
        places = [member.place for member in members if member.place is not None]
        order = list(range(len(members)))
        if len(places) == len(members):
            if len(set(places)) < len(places):
                raise ConfigError(
                    f"Two nodes were given the same --node-rank: {sorted(places)}. Number them 0, 1, …."
                )
            order.sort(key=lambda index: places[index])
        self._members = [members[index] for index in order]
        self._node = order.index(rank)
        procs = [member.procs for member in self._members]
        master = (self._members[0].address, self._members[0].port)
        # A node that joins late takes over the others' counts.
        self._round = max(member.round for member in members)
        restarts = max(member.restarts for member in members)
        first, world = sum(procs[: self._node]), sum(procs)
        return Assignment(self._node, len(procs), first, world, master, self._round, restarts)

    def _reported(self) -> Outcome | None:
        """The first report of another node in this life. One that ends the run comes before one that makes room."""
        assert self._store is not None
        outcomes: list[Outcome] = []
        number = 1
        while self._store.check([f"report/{number}"]):
            message = understood(Message, self._store.get(f"report/{number}"))
            if message.node != self._node:
                outcomes.append(message.outcome)
            number += 1
        return next((o for o in outcomes if not o.regroup), outcomes[0] if outcomes else None)

    def _lost(self) -> Outcome | None:
        """Raise this agent's count, and check that every other agent's count has risen too."""
        assert self._store is not None
        self._store.add(f"alive/{self._node}", 1)
        now = time.monotonic()
        for node, member in enumerate(self._members):
            if node == self._node:
                continue
            count = self._store.add(f"alive/{node}", 0)
            before, since = self._seen.get(node, (-1, now))
            self._seen[node] = (count, since if count == before else now)
            silent = now - self._seen[node][1]
            if silent > self._settings.lost_seconds:
                first = sum(other.procs for other in self._members[:node])
                name = f"Node {node} ({shown(member.host)})"
                text = f"{name} is lost: its agent has not been heard of for {silent:.0f} s."
                code = int(ExitCode.ENVIRONMENT)
                return Outcome(code, (Failure(first, code, text, seconds=time.time()),), final=False)
        return None

    def _say_goodbye(self) -> None:
        """Wait until the others no longer need the store, if this agent serves it."""
        if self._store is None:
            return
        self._store.add("left", 1)
        end = time.monotonic() + _GOODBYE
        while self._serves and time.monotonic() < end:
            if self._store.add("left", 0) >= len(self._members):
                return
            time.sleep(0.1)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn torch's errors into ours."""
        where = self._settings.rdzv
        try:
            yield
        except RendezvousClosedError as error:
            raise EnvironmentProblem(
                f"The run {self._settings.rdzv_id!r} at {where} has ended. Start it again on all nodes."
            ) from error
        except RendezvousTimeoutError as error:
            raise EnvironmentProblem(
                f"Fewer than {self._settings.nodes[0]} nodes came to {where} within {self._settings.join_seconds:g} s. "
                "Start `penstock launch` with the same --rdzv and --nnodes on every node, or raise --join-seconds."
            ) from error
        except (DistError, RendezvousConnectionError, RendezvousError) as error:
            raise EnvironmentProblem(
                f"The rendezvous at {where} does not answer ({_first_line(error)}). The agent on that host serves it: "
                "check that the host is up, the agent runs there and the port is open. Then start again."
            ) from error


def _open_store(settings: LaunchSettings) -> tuple[Store, bool]:
    """The agents' store, and whether this agent serves it. It does if HOST is this machine and nobody serves it yet."""
    host, port = settings.endpoint()
    timeout = timedelta(seconds=settings.join_seconds)
    serves = _is_here(host) if settings.node_rank is None else settings.node_rank == 0
    if serves:
        try:
            return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False), True
        except DistError:
            if settings.node_rank == 0:
                raise
    return TCPStore(host, port, is_master=False, timeout=timeout), False


def _is_here(host: str) -> bool:
    """Whether `host` is an address of this machine: a socket can be bound to no other."""
    for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
            probe.bind(address)
            return True
    return False


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return str(cause).partition("\n")[0][:200]


def _address_towards(host: str) -> str:
    """This node's address on the way to `host`, by which the others can reach it. Sends nothing."""
    family, _, _, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
