"""Agents of several nodes. torch.distributed's c10d rendezvous decides which nodes take part in each life of the ranks,
and the agents exchange messages through its store.

Only torchrun's rendezvous is used, not its agent; docs/decisions/0018 says why. Its store outlives the ranks' lives, so
that gloo in a new life finds the addresses of the last and waits for ever; here rank 0 serves a new store in each life.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, TypeVar

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
from penstock.launch.addresses import call, describe_route, interface_of, is_loopback, route_to
from penstock.launch.nodes import Nodes
from penstock.launch.ranks import Assignment
from penstock.launch.report import Failure, Outcome
from penstock.launch.settings import LaunchSettings

T = TypeVar("T")
_LOOK = 0.5
"""Seconds between two reads of the store."""
_BOUNDS = Bounds(bytes=64_000_000)
"""Limits of a message, which holds the traceback of every rank."""
_REMEDY = "Start the same version of Penstock on all nodes."
_TICK = 0.1
"""Seconds between two checks of a call of the store."""
_PATIENCE = 3.0
"""After this many seconds of silence the agent stops writing to the store at the end."""
_handlers: list[DynamicRendezvousHandler] = []
"""Kept for ever: destroying a handler waits for its thread, which may wait for a silent store."""
_GOODBYE = 10.0
"""Seconds for which the agent that serves the store stays, so that the others learn of the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An agent's description of itself for the others."""

    place: Natural | None
    """The number set by its --node-rank."""
    procs: Count
    address: FilledText
    """Address of the ranks' store, if rank 0 runs here."""
    port: Annotated[int, Range(1, 65535)]
    round: Natural
    restarts: Natural
    host: str
    rendezvous: FilledText
    """Address of the rendezvous, as this node reaches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The end of a life on one node."""

    node: Natural
    outcome: Outcome


def understood(cls: type[T], raw: bytes) -> T:
    """Parse another agent's message. Raises EnvironmentProblem for anything else, such as another version's."""
    where = "What another node's agent says"
    tree = parse_json(raw, where, error=EnvironmentProblem, bounds=_BOUNDS, remedy=_REMEDY)
    return from_dict(
        cls, tree, origin=f"what another node's agent says ({_REMEDY})", error=EnvironmentProblem
    )


class TimedStore:
    """A store that records in `begun` when each waiting thread began to wait for it."""

    def __init__(self, store: Store, begun: dict[int, float]) -> None:
        self._store, self._begun = store, begun

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            self._begun[threading.get_ident()] = time.monotonic()
            try:
                return getattr(self._store, name)(*arguments)
            finally:
                del self._begun[threading.get_ident()]

        return ask


def seen_from_outside(members: list[Member]) -> list[Member]:
    """The agents with addresses that all can reach. An agent that reaches the rendezvous by a loopback address is on
    the host that serves it, and gets the address by which agents of other hosts know that host."""
    outside = [member.rendezvous for member in members if not is_loopback(member.address)]
    return [
        replace(member, address=outside[0]) if outside and is_loopback(member.address) else member
        for member in members
    ]


class Meeting(Nodes):
    """This node among the others.

    The store is called in separate threads (`call`), so that a host that falls silent blocks neither the agent nor
    signals. A silent store counts as a silent node.
    """

    def __init__(self, settings: LaunchSettings) -> None:
        super().__init__(settings.ranks)
        self._settings = settings
        self._handler: DynamicRendezvousHandler | None = None
        self._serves = False
        self._store: Any = None
        self._members: list[Member] = []
        self._node = 0
        self._looked = 0.0
        self._look: Future[tuple[Outcome | None, bool]] | None = None
        self._begun: dict[int, float] = {}
        self._seen: dict[int, tuple[int, float]] = {}
        self._heard: Outcome | None = None
        self._waiting = False
        self._goes_on = False
        """Whether the other nodes will have another life."""

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._goes_on or error[0] is not None:
            return  # the others go on, and learn from this node's silence that it is gone
        # The end has already been reported; errors here do not change it.
        self._wait(call(self._leave), _PATIENCE)

    def meet(self, restarts: int) -> Assignment:
        """See `Nodes.meet`. Raises EnvironmentProblem if too few nodes come, or the run has ended elsewhere."""
        if self._look is not None:
            self._result(self._look)
            self._look = None
        self._round += 1
        self._heard, self._waiting, self._goes_on, self._seen = None, False, False, {}
        return self._result(call(partial(self._meet, restarts)))

    def report(self, outcome: Outcome) -> None:
        if self._store is None:
            return
        self._goes_on = not outcome.final
        reported = call(partial(self._report, Message(node=self._node, outcome=outcome)))
        if self._wait(reported, _PATIENCE):
            self._result(reported)

    def heard(self) -> Outcome | None:
        now = time.monotonic()
        if self._look is None and now - self._looked >= _LOOK:
            self._looked = now
            self._look = call(lambda: (self._reported() or self._lost(), self._others_wait()))
        if self._look is not None and (self._look.done() or self._silence() > self._settings.lost_seconds):
            self._heard, self._waiting = self._result(self._look)
            self._look = None
        return self._heard

    def waiting(self) -> bool:
        return self._waiting or (self._heard is not None and self._heard.regroup)

    def _assignment(self, members: list[Member], rank: int) -> Assignment:
        """Order the nodes by --node-rank if all set it, else as the rendezvous did."""
        places = [member.place for member in members if member.place is not None]
        order = list(range(len(members)))
        if len(places) == len(members):
            if len(set(places)) < len(places):
                raise ConfigError(
                    f"Two nodes were given the same --node-rank: {sorted(places)}. Number them 0, 1, …."
                )
            order.sort(key=lambda index: places[index])
        self._members = seen_from_outside([members[index] for index in order])
        self._node = order.index(rank)
        procs = [member.procs for member in self._members]
        master = (self._members[0].address, self._members[0].port)
        # A node that joins late takes over the others' counts.
        self._round = max(member.round for member in members)
        restarts = max(member.restarts for member in members)
        first, world = sum(procs[: self._node]), sum(procs)
        interface = interface_of(self._members[self._node].address) if len(procs) > 1 else ""
        return Assignment(
            self._node, len(procs), first, world, master, self._round, restarts, self._launch, interface
        )

    def _open(self) -> DynamicRendezvousHandler:
        # Else the handler would serve one store for all lives of the ranks; see the beginning of this file.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        # The agent reports errors in its own words.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
        settings = self._settings
        alive = max(1, round(settings.lost_seconds / 3))
        parameters = RendezvousParameters(
            backend="c10d", endpoint=settings.rdzv or "", run_id=settings.rdzv_id, min_nodes=settings.nodes[0],
            max_nodes=settings.nodes[1], local_addr=route_to(settings.endpoint()[0]).own,
            join_timeout=str(int(settings.join_seconds)), last_call_timeout=str(int(settings.settle_seconds)),
            keep_alive_interval=str(alive), keep_alive_max_attempt="3",
        )  # fmt: skip
        store, self._serves = _open_store(settings)
        timed: Any = TimedStore(store, self._begun)
        backend = C10dRendezvousBackend(timed, settings.rdzv_id)
        self._launch = timed.compare_set(f"launch/{settings.rdzv_id}", "", self._launch).decode()
        handler = create_handler(store, backend, parameters)
        _handlers.append(handler)
        return handler

    def _meet(self, restarts: int) -> Assignment:
        self._handler = self._handler or self._open()
        while True:
            info = self._handler.next_rendezvous()
            self._store = store = TimedStore(PrefixStore("penstock", info.store), self._begun)
            route = route_to(self._settings.endpoint()[0])
            _, port = self._reserve(route.own)
            member = Member(
                place=self._settings.node_rank, procs=self._procs, address=route.own, port=port, round=self._round,
                restarts=restarts, host=socket.gethostname(), rendezvous=route.target,
            )  # fmt: skip
            keys = [f"member/{node}" for node in range(info.world_size)]
            end = time.monotonic() + self._settings.lost_seconds
            store.set(f"member/{info.rank}", json.dumps(asdict(member)))
            while True:
                if store.check(keys):
                    members = [understood(Member, value) for value in store.multi_get(keys)]
                    return self._assignment(members, info.rank)
                if time.monotonic() > end:
                    break  # a node was lost before it described itself: meet again
                time.sleep(_TICK)

    def _report(self, message: Message) -> None:
        number = self._store.add("reports", 1)
        self._store.set(f"report/{number}", json.dumps(asdict(message)))

    def _others_wait(self) -> bool:
        assert self._handler is not None
        return self._handler.num_nodes_waiting() > 0

    def _reported(self) -> Outcome | None:
        """First report of another node in this life; reports that end the run precede those that let a node join."""
        outcomes: list[Outcome] = []
        number = 1
        while self._store.check([f"report/{number}"]):
            message = understood(Message, self._store.get(f"report/{number}"))
            if message.node != self._node:
                outcomes.append(message.outcome)
            number += 1
        return next((o for o in outcomes if not o.regroup), outcomes[0] if outcomes else None)

    def _lost(self) -> Outcome | None:
        """Raise this agent's count, and check that the counts of all other agents have risen too."""
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
                first = sum(earlier.procs for earlier in self._members[:node])
                name = f"Node {node} ({shown(member.host)})"
                text = f"{name} is lost: its agent has not been heard of for {silent:.0f} s."
                code = int(ExitCode.ENVIRONMENT)
                return Outcome(code, (Failure(first, code, text, seconds=time.time()),), final=False)
        return None

    def _leave(self) -> None:
        """Close the rendezvous. If this agent serves the store, wait until the others no longer need it."""
        if self._handler is not None:
            self._handler.shutdown()
        if self._store is None:
            return
        departed = self._store.add("left", 1)
        end = time.monotonic() + _GOODBYE
        while self._serves and departed < len(self._members) and time.monotonic() < end:
            time.sleep(_TICK)
            departed = self._store.add("left", 0)

    def _silence(self) -> float:
        """Longest time in seconds for which a call has waited for the store."""
        return time.monotonic() - min(list(self._begun.values()), default=math.inf)

    def _wait(self, answer: Future[T], seconds: float) -> bool:
        """Wait for an answer of the store. Returns False once the store has been silent for `seconds`."""
        while not wait_for([answer], _TICK).done:
            if self._silence() > seconds:
                return False
        return True

    def _result(self, answer: Future[T]) -> T:
        """The store's answer. Raises EnvironmentProblem if the store fails, or has been silent for too long."""
        with self._explained():
            if not self._wait(answer, self._settings.lost_seconds):
                raise RendezvousConnectionError(f"it has been silent for {self._silence():.0f} s")
            return answer.result()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert torch's errors into Penstock's."""
        where, host = self._settings.rdzv, self._settings.endpoint()[0]
        try:
            yield
        except RendezvousClosedError as error:
            raise EnvironmentProblem(
                f"The run {self._settings.rdzv_id!r} at {where} has ended. Start it again on all nodes."
            ) from error
        except RendezvousTimeoutError as error:
            raise EnvironmentProblem(
                f"Fewer than {self._settings.nodes[0]} nodes came to {where} within {self._settings.join_seconds:g} s. "
                "Start `penstock launch` with the same --rdzv and --nnodes on every node, or raise --join-seconds. "
                + describe_route(host)
            ) from error
        except OSError as error:
            raise EnvironmentProblem(describe_route(host)) from error
        except (DistError, RendezvousConnectionError, RendezvousError) as error:
            reason = str(error.__cause__ or error).partition("\n")[0][:200]
            raise EnvironmentProblem(
                f"The rendezvous at {where} does not answer ({reason}). The agent on that host serves it: check that "
                "the host is up, the agent runs there and the port is open. Then start again. "
                + describe_route(host)
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
    """Whether `host` is an address of this machine: a socket can only be bound to such an address."""
    for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
            probe.bind(address)
            return True
    return False
