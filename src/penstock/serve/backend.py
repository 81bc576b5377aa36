"""The server's side of its worker: starts it, counts its requests, and restarts it if it dies.

A request whose worker died is sent to the next worker, once: its tokens are generated again, and an event tells the
reader that earlier tokens are void.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from penstock.errors import EnvironmentProblem, ExitCode, PenstockError
from penstock.launch.local import MOST_BYTES, packed
from penstock.planner.loads import LoadRecord
from penstock.serve.scheduler import QueueFull

log = logging.getLogger(__name__)
MOST_ATTEMPTS = 2
"""Most workers that a request is sent to, because a request might kill every worker."""
SLOWEST_RESTART = 10.0
"""Longest pause in seconds between two starts, when workers fail one after the other."""


class Refused(PenstockError):
    """The worker refuses a request; the message says why."""


class Lost(PenstockError):
    """The worker died, and the request is not sent again."""


class Event(NamedTuple):
    """An event of a request."""

    tokens: tuple[int, ...] = ()
    finished: str = ""
    """`stop` or `length` with the last tokens."""
    end: int | None = None
    """The token that ended the text, with `stop`."""
    again: bool = False
    """Whether all tokens so far are void, because another worker generates them again."""
    answer: list[Any] | None = None
    """Vectors of texts, or a text's `penstock.infer.score.TextScores` as lists."""


class Ticket:
    """A request in progress. Read its events with `async for`; leaving early cancels it."""

    def __init__(self, backend: Backend, number: int, message: dict[str, Any]) -> None:
        self._backend, self.number, self.message = backend, number, message
        self.attempts = 0
        self.news: asyncio.Queue[Event | PenstockError] = asyncio.Queue()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield all events up to the last. Raises Refused and Lost."""
        try:
            while True:
                event = await self.news.get()
                if isinstance(event, PenstockError):
                    raise event
                yield event
                if event.finished or event.answer is not None:
                    return
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the request, if it has not ended."""
        self._backend.forget(self)

    async def answer(self) -> list[Any]:
        """The answer to a request for something other than tokens. Raises the errors of `events`."""
        answer: list[Any] = []
        async for event in self.events():
            answer = event.answer or answer
        return answer


class Backend:
    """One worker, and its requests."""

    def __init__(self, settings: dict[str, Any], *, opener: str, stall_seconds: float = 300.0) -> None:
        """`settings` are passed to the worker; `opener` is the function that opens the model there."""
        self.settings, self.opener, self.stall_seconds = settings, opener, stall_seconds
        self.room = settings["slots"] + settings["waiting"]
        self.about: dict[str, Any] = {}
        self.experts: dict[str, Any] = {}
        """State of hosted experts, from `penstock.serve.balance.Balance.state`; empty if there are none."""
        self.loads: LoadRecord | None = None
        """Visits to hosted experts since this worker started, in one window per check of the loads."""
        self.ready = asyncio.Event()
        self.restarts = -1
        self._tickets: dict[int, Ticket] = {}
        self._held: dict[int, Ticket] = {}
        """Tickets of a large request, by number, that wait until the worker has room."""
        self._number = 0
        self._heard = 0.0
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._care: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def usual(self) -> dict[str, Any]:
        """Fields of `Decoding` that the model's folder sets."""
        return dict(self.about.get("usual", {}))

    @property
    def open(self) -> int:
        """Number of requests in progress or waiting."""
        return len(self._tickets)

    def gauges(self) -> dict[str, float]:
        """Current figures, by name."""
        state_keys = {"expert_load": "load", "expert_moves": "moves", "expert_moves_given_up": "given_up"}
        return {
            "open_requests": float(self.open), "worker_restarts": float(max(0, self.restarts)),
            "worker_ready": float(self.ready.is_set()), "room_requests": float(self.room),
            **{name: float(self.experts[key]) for name, key in state_keys.items() if self.experts},
        }  # fmt: skip

    async def start(self) -> None:
        """Start the worker, and wait until it is ready. Raises the worker's error if it cannot open the model."""
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._care = asyncio.create_task(self._keep(first))
        await first

    async def stop(self) -> None:
        """End the worker."""
        self._stopping = True
        if self._care is not None:
            self._care.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._care
        await self._end()

    def require_room(self, count: int) -> None:
        """Raise QueueFull if the queue has no room for `count` requests. If `count` is more than the queue can ever
        hold, they are accepted while it is not full, and run in turn."""
        if self.open + min(count, self.room) > self.room and not (count > self.room > self.open):
            raise QueueFull(f"{self.open} requests are served or wait, of at most {self.room}.")

    def submit(self, message: dict[str, Any]) -> Ticket:
        """Queue a request; it is sent once there is room. Callers check a new request with `require_room` first."""
        self._number += 1
        ticket = self._tickets[self._number] = Ticket(self, self._number, message)
        self._held[ticket.number] = ticket
        self._fill()
        return ticket

    def forget(self, ticket: Ticket) -> None:
        """Drop a ticket that nobody waits for; if it is in progress, the worker stops it."""
        if self._tickets.pop(ticket.number, None) is None:
            return
        if self._held.pop(ticket.number, None) is None and self.ready.is_set():
            self._write({"cancel": ticket.number})
        self._fill()

    def _fill(self) -> None:
        """Send waiting tickets while the worker has room."""
        while self._held and self.ready.is_set() and self.open - len(self._held) < self.room:
            self._send(self._held.pop(next(iter(self._held))))

    def _send(self, ticket: Ticket) -> None:
        ticket.attempts += 1
        self._heard = time.monotonic() if self.open == 1 else self._heard
        self._write({"job": ticket.number, **ticket.message})

    def _write(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(packed(message))

    async def _keep(self, first: asyncio.Future[None]) -> None:
        """Run workers, one after the other."""
        pause = 0.1
        while True:
            begun = time.monotonic()
            self.restarts += 1
            problem = await self._run(first)
            self.ready.clear()
            await self._end()
            if not first.done():
                first.set_exception(problem)
                return
            log.warning("The worker has ended (%s) and is restarted.", problem)
            self._retry()
            pause = 0.1 if time.monotonic() - begun > 60 else min(SLOWEST_RESTART, 2 * pause)
            await asyncio.sleep(pause)

    async def _run(self, first: asyncio.Future[None]) -> PenstockError:
        """Run one worker from start to end; return why it ended."""
        own_end, worker_end = socket.socketpair()
        command = [sys.executable, "-m", "penstock.serve.worker", str(worker_end.fileno())]
        try:
            self._process = await asyncio.create_subprocess_exec(*command, pass_fds=(worker_end.fileno(),))
        finally:
            worker_end.close()
        reader, self._writer = await asyncio.open_connection(sock=own_end, limit=MOST_BYTES)
        self._write({"opener": self.opener, "settings": self.settings})
        self._heard = time.monotonic()
        while True:
            try:
                line = await asyncio.wait_for(reader.readline(), 1.0)
            except TimeoutError:
                if self.ready.is_set() and self.open and time.monotonic() - self._heard > self.stall_seconds:
                    return EnvironmentProblem(f"it has generated no token for {self.stall_seconds:.0f} s")
                continue
            except (OSError, ValueError):
                line = b""
            if not line:
                code = await self._process.wait()
                return EnvironmentProblem(f"exit code {code}" if code >= 0 else f"signal {-code}")
            self._heard = time.monotonic()
            message = json.loads(line)
            if "fatal" in message:
                words, code = message["fatal"]
                problem = PenstockError(words)
                problem.exit_code = ExitCode(code)
                return problem
            self._take(message)
            if "ready" in message and not first.done():
                first.set_result(None)

    def _take(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.about = message["ready"]
            self.loads = None  # a new worker counts from zero
            self.ready.set()
            self._held = dict(self._tickets)
            self._fill()
        for number, tokens, finished, end in message.get("pieces", ()):
            self._tell(number, Event(tuple(tokens), finished, end), last=bool(finished))
        if "experts" in message:
            self._count(message["experts"])
        if "answer" in message:
            number, answer = message["answer"]
            self._tell(number, Event(answer=answer), last=True)
        if "failed" in message:
            number, text = message["failed"]
            self._tell(number, Refused(text), last=True)

    def _count(self, experts: dict[str, Any]) -> None:
        """Store the state of hosted experts, and close a window of their loads if the loads were checked."""
        self.experts, before = experts, self.loads
        if before is None or before.windows[-1].until < experts["until"]:
            counts = tuple((tuple(row),) for row in experts["visits"])
            windows = () if before is None else before.windows
            record = LoadRecord(tuple(self.about["mixtures"]), (), counts, windows)
            self.loads = record.closed(experts["until"])

    def _tell(self, number: int, event: Event | PenstockError, *, last: bool) -> None:
        ticket = self._tickets.pop(number, None) if last else self._tickets.get(number)
        if ticket is not None:
            ticket.news.put_nowait(event)
        self._fill()

    def _retry(self) -> None:
        """Keep the dead worker's requests for the next one, or report them as lost."""
        for number, ticket in list(self._tickets.items()):
            if ticket.attempts >= MOST_ATTEMPTS:
                self._tell(number, Lost("The worker died twice while it served this request."), last=True)
            elif ticket.attempts:
                ticket.news.put_nowait(Event(again=True))

    async def _end(self) -> None:
        """End the process, if there is one."""
        if self._writer is not None:
            self._write({"stop": True})
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None
        if self._process is not None and self._process.returncode is None:
            try:
                await asyncio.wait_for(self._process.wait(), 5.0 if self._stopping else 0.5)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._process.pid, 9)
                await self._process.wait()
