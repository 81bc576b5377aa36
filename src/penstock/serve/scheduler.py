"""Decides which request is served next: a bounded queue, and admission to the slots and the cache of one engine.

There are no tensors here and no clock; the caller removes requests whose time is over. The server's worker calls this
scheduler between two steps of the engine, and the queueing simulation between two simulated steps. Requests are served
in order of arrival. A request that does not fit yet holds up those after it, so that none waits forever (continuous
batching: Yu et al., OSDI 2022, "Orca", section 3; prompts in pieces: Agrawal et al., OSDI 2024, "Sarathi-Serve",
section 4).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.config.convert import Checked, Count, Natural
from penstock.errors import PenstockError


class QueueFull(PenstockError):
    """The queue is full; the request was refused and has changed nothing."""


class TooLong(PenstockError):
    """A request that is too large for the engine even if it is the only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Checked):
    """The limits of one engine."""

    slots: Count = 16
    """Sequences that are generated together."""
    waiting: Natural = 64
    """Requests that may wait for a slot; more are refused."""
    context: Count = 2048
    """Tokens of one sequence, its prompt and what is generated."""
    cache: Count = 1 << 30
    """Tokens of all sequences together, in whole blocks."""
    block: Count = 16
    """Tokens of one block of the cache."""
    chunk: Count = 512
    """Tokens of prompts that are read between two steps, in pieces, so that running sequences do not stall."""

    @property
    def room(self) -> int:
        """Maximum number of requests that are served or wait."""
        return self.slots + self.waiting

    def blocks(self, tokens: int) -> int:
        """Cache space of a sequence of `tokens` tokens, rounded up to whole blocks."""
        return -(-tokens // self.block) * self.block


@dataclass(slots=True, eq=False)
class Job:
    """One sequence to be generated."""

    number: int
    prompt: int
    """Tokens to read."""
    max_tokens: int
    """Maximum number of tokens to generate."""
    request: Any = None
    """The engine's request, if there is one."""
    slot: int | None = None
    """The engine's slot, once the job has one."""
    uncached: int = 0
    """Tokens of the prompt that take no space in the cache, because they belong to a source."""
    read: int = 0
    """Number of the prompt's tokens that are in the cache."""
    generated: int = 0
    """Tokens generated so far."""

    @property
    def tokens(self) -> int:
        """Tokens in the cache at the sequence's maximum length."""
        return self.prompt - self.uncached + self.max_tokens


class Read(NamedTuple):
    """Tokens `start` to `stop` of a job's prompt, to be read now. The last piece of a prompt also generates a token."""

    job: Job
    start: int
    stop: int


@dataclass(slots=True)
class Turn:
    """The work of one turn: pieces of prompts first, then one token for each job of `decode`."""

    reads: list[Read] = field(default_factory=list)
    decode: list[Job] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reads or self.decode)


class Scheduler:
    """The queue and the slots of one engine. The caller reports the result of each turn."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._held = 0
        """Tokens of the cache that are reserved for running jobs at their maximum length."""

    @property
    def waiting(self) -> int:
        """Jobs without a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Jobs with a slot."""
        return len(self._running)

    def submit(self, job: Job) -> None:
        """Queue a job. Raises TooLong for a job that can never run, QueueFull if too many wait."""
        limits = self.limits
        if job.prompt < 1 or job.max_tokens < 1:
            raise TooLong("A request needs at least one token of a prompt, and one to generate.")
        if job.tokens > limits.context or limits.blocks(job.tokens) > limits.cache:
            most = min(limits.context, limits.cache // limits.block * limits.block)
            raise TooLong(
                f"The prompt has {job.prompt:,} tokens and {job.max_tokens:,} are to be generated, but a sequence may "
                f"have {most:,} in all. Shorten the prompt, or ask for fewer."
            )
        # A queue of length 0 still accepts a job for a free slot.
        if self.running + self.waiting >= limits.room:
            raise QueueFull(
                f"{self.running + self.waiting} requests are served or wait, and at most {limits.room} may. "
                "Try again later."
            )
        self._waiting.append(job)

    def remove(self, number: int) -> Job | None:
        """Remove a job, finished or not, and return it; None if it is no longer here."""
        job = self._running.pop(number, None)
        if job is not None:
            self._held -= self.limits.blocks(job.tokens)
            return job
        job = next((waiting for waiting in self._waiting if waiting.number == number), None)
        if job is not None:
            self._waiting.remove(job)
        return job

    def turn(self) -> Turn:
        """The work of the next turn; empty if there is no job. Jobs that are admitted have a slot from now on."""
        turn = Turn()
        left = self.limits.chunk
        for job in self._running.values():
            if job.read >= job.prompt:
                turn.decode.append(job)
            elif left > 0:
                left -= self._read(job, left, turn)
        while left > 0 and self._waiting and self._fits(self._waiting[0]):
            job = self._waiting.popleft()
            self._running[job.number] = job
            self._held += self.limits.blocks(job.tokens)
            left -= self._read(job, left, turn)
        return turn

    def _fits(self, job: Job) -> bool:
        limits = self.limits
        return self.running < limits.slots and self._held + limits.blocks(job.tokens) <= limits.cache

    def _read(self, job: Job, left: int, turn: Turn) -> int:
        """Add a piece of the job's prompt to the turn; return its number of tokens."""
        size = min(job.prompt - job.read, left)
        turn.reads.append(Read(job, job.read, job.read + size))
        return size

    def has_read(self, read: Read) -> None:
        """Report that a piece of a prompt is in the cache; the last piece has generated a token."""
        read.job.read = read.stop
        if read.stop >= read.job.prompt:
            read.job.generated = 1

    def has_made(self, job: Job, tokens: int = 1) -> bool:
        """Report generated tokens; return whether the job has reached its maximum. The caller removes finished jobs."""
        job.generated += tokens
        return job.generated >= job.max_tokens
