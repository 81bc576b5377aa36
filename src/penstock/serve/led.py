"""An engine on several ranks that split each layer, or host experts: one leads, and the others run the same steps.

The leader is the worker of `penstock serve`. It starts the other ranks as child processes, each of which opens its part
of the model. Before each step it sends them the requests that were admitted and the slots that were freed since the
last. Ranks that split layers all choose the same tokens: see `penstock.infer.ranks`. Ranks that host experts generate
different texts, and report their tokens after each step. If one process ends, all end, and the server starts a new
worker.
"""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from penstock.config.plan import Plan
from penstock.decode.engine import Engine, Finished, Request, SlotResult
from penstock.errors import EnvironmentProblem, ExitCode
from penstock.infer.encode import Embedder
from penstock.infer.ranks import from_rank_zero, together
from penstock.launch.local import JsonLink, LocalRanks
from penstock.parallel import ParallelDims, local_device
from penstock.parallel.dims import DATA
from penstock.parallel.hosts import attend, rounds_of
from penstock.parallel.moving import Mover
from penstock.serve.balance import Balance

_OPENER = "penstock.serve.worker:opened"
_FOLLOWS = "PENSTOCK_FOLLOWS"
"""Environment variable that marks ranks started by the leader."""
_FOREVER = 1e8
"""Seconds that ranks wait for the next step: a server may be idle for long."""
_LAST_WORDS = 3.0
"""Seconds for the leader to report why it ends, after another rank has ended."""
_ENDS: tuple[Finished, ...] = ("", "stop", "length")
_HELD = ExitStack()
"""Holds the group of ranks for the lifetime of this process."""


class Ranks(ABC):
    """Ranks led by the first: it sends each of its steps to the others, which repeat it."""

    dims: ParallelDims

    @abstractmethod
    def obey(self, news: Any) -> None:
        """Repeat the leader's step; `news` describes it."""

    def dismiss(self) -> None:
        """If this rank leads, let the others end."""
        if self.dims.main:
            from_rank_zero(None, self.dims)

    def follow(self) -> None:
        """Repeat the leader's steps until it ends."""
        nothing: Any = None
        while True:
            try:
                news = from_rank_zero(nothing, self.dims)
            except RuntimeError:  # the leader has ended without a message
                return
            if news is None:
                return
            self.obey(news)


class Led(Ranks):
    """An engine on several ranks, for the worker on the first rank: each step sends the others the requests that were
    admitted and the slots that were released. Each rank of `dp` has its own engine with its own slots; ranks of `tp`
    share the same slots."""

    def __init__(self, engine: Engine, dims: ParallelDims, balance: Balance | None = None) -> None:
        """`balance`, on the leader only, decides when hosted experts move."""
        self.engine, self.dims, self.balance = engine, dims, balance
        self._news: list[tuple[int, Request | int]] = []
        self._texts = [[False] * engine.slots for _ in range(dims.data_world)]
        self.rounds = rounds_of(engine.model)
        self.mover = None if self.rounds is None else Mover(self.rounds)

    def require(self, request: Request) -> None:
        self.engine.require(request)

    def admit(self, request: Request) -> int | None:
        """Admit a request as the engine does. Slots are numbered across all ranks; the rank with the fewest texts gets
        the request."""
        decoding = request.decoding
        if decoding.draws and decoding.seed is None:
            seed = random.SystemRandom().randrange(1 << 31)
            request = replace(request, decoding=replace(decoding, seed=seed))
        rank = min(range(len(self._texts)), key=lambda candidate: sum(self._texts[candidate]))
        if all(self._texts[rank]):
            return None
        slot = self._texts[rank].index(False)
        if rank == self.dims.data_rank and self.engine.admit(request) is None:
            return None
        self._texts[rank][slot] = True
        self._news.append((rank, request))
        return rank * self.engine.slots + slot

    def release(self, slot: int) -> None:
        rank, own_slot = divmod(slot, self.engine.slots)
        self._texts[rank][own_slot] = False
        self._news.append((rank, own_slot))
        if rank == self.dims.data_rank:
            self.engine.release(own_slot)

    def step(self, chunk: int | None = None) -> Sequence[SlotResult]:
        orders: list[tuple[Any, ...]] = []
        if self.balance is not None and self.mover is not None:
            orders = self.balance.orders(self.visits, self.mover.pieces, self.mover.complete())
        from_rank_zero((self._news, chunk, orders), self.dims)
        self._news = []
        return self._step(chunk, orders)

    def visits(self) -> list[list[int]]:
        """Visits of all ranks' tokens to each expert, for each mixture."""
        return [] if self.rounds is None else [hosts.visits.tolist() for hosts in self.rounds.hosts]

    def _step(self, chunk: int | None, orders: Sequence[tuple[Any, ...]]) -> list[SlotResult]:
        """Run one step of this rank's engine; return the results of all ranks."""
        if self.mover is not None:
            for order, *more in orders:
                if order == "begin":
                    self.mover.begin(*more)
                elif order == "switch":
                    self.mover.switch()
                else:
                    self.mover.give_up()
            self.mover.step()
        with torch.inference_mode():
            results = self.engine.step(chunk)
            attend(self.engine.model)
        return results if self.dims.data_world == 1 else self._all(results)

    def _all(self, results: Sequence[SlotResult]) -> list[SlotResult]:
        """The results of all ranks' engines: at most one token in each slot."""
        here = torch.full((self.engine.slots, 2), -1, dtype=torch.int64, device=self.engine.device)
        for slot, tokens, finished, end in results:
            here[slot] = torch.tensor([tokens[0] if tokens else end, _ENDS.index(finished)])
        every = [torch.empty_like(here) for _ in range(self.dims.data_world)]
        distributed.all_gather(every, here, group=self.dims.group(*DATA))
        return [
            SlotResult(slot, (), "stop", token)
            if _ENDS[why] == "stop"
            else SlotResult(slot, (token,), _ENDS[why])
            for slot, (token, why) in enumerate(torch.cat(every).tolist())
            if why >= 0
        ]

    def obey(self, news: tuple[Any, ...]) -> None:
        """See `Ranks`."""
        admitted, chunk, orders = news
        for rank, each in admitted:
            if rank != self.dims.data_rank:
                continue
            if isinstance(each, int):
                self.engine.release(each)
            else:
                self.engine.admit(each)
        self._step(chunk, orders)


class LedVectors(Ranks):
    """An embedder on several ranks, for the worker on the first rank: each call sends the texts to the others."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder, self.dims = embedder, embedder.dims

    def __call__(self, rows: list[list[int]]) -> list[list[float]]:
        return self.embedder.embed(from_rank_zero(rows, self.dims)).tolist()

    def obey(self, news: list[list[int]]) -> None:
        """See `Ranks`."""
        self.embedder.embed(news)


def join(settings: dict[str, Any]) -> tuple[ParallelDims, torch.device]:
    """This rank's place in the settings' degrees, and its device. The leader also starts the other ranks.

    Raises EnvironmentProblem if there are too few GPUs.
    """
    plan = plan_of(settings)
    device, count = torch.device(settings["device"]), plan.gpus
    if device.type == "cuda" and torch.cuda.device_count() < count:
        raise EnvironmentProblem(
            f"tp and ep need {count} GPUs, but this machine has {torch.cuda.device_count()}; use smaller degrees."
        )
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    if _FOLLOWS not in os.environ:
        _start(settings, count)
    device = local_device(device)
    return _HELD.enter_context(together(plan, device, timeout=_FOREVER)), device


def plan_of(settings: dict[str, Any]) -> Plan:
    """The degrees of the settings: `ep` ranks, in groups of `tp` with the same texts."""
    tp, ep = settings["tp"], settings["ep"]
    return Plan(tp=tp, dp=max(1, ep // tp), ep=ep)


def _start(settings: dict[str, Any], count: int) -> None:
    """Start the other ranks; this process becomes the first."""
    ranks = LocalRanks(count)
    _HELD.callback(lambda: ranks)
    for rank in range(1, count):
        process, own_end = ranks.start("penstock.serve.worker", rank, defaults={_FOLLOWS: "1"})
        link = JsonLink(own_end)
        link.send(opener=_OPENER, settings=settings)
        threading.Thread(target=_end_with, args=(process, link), daemon=True).start()
    os.environ.update(ranks.environment(0))


def _end_with(process: subprocess.Popen[bytes], link: JsonLink) -> None:
    """End this process once another rank has ended, because its part of each layer is gone."""
    process.wait()
    time.sleep(_LAST_WORDS)
    link.close()
    os._exit(ExitCode.ENVIRONMENT)
