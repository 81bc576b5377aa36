"""An engine on several ranks that split each layer: one leads, and the others take the same steps.

The leader is the worker of `penstock serve`. It starts the others as processes of its own, which open the same model,
each with its part. Before a step it tells them which requests were admitted and which slots were freed since the last
one. Tokens are not told, for all ranks choose the same: see `penstock.infer.ranks`. If one process ends, all end, and
the server starts a new worker.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from penstock.config.plan import Plan
from penstock.decode.engine import Engine, Made, Request
from penstock.errors import EnvironmentProblem, ExitCode
from penstock.infer.ranks import together, told
from penstock.parallel import ParallelDims, local_device
from penstock.serve.link import packed

_OPENER = "penstock.serve.worker:opened"
_FOLLOWS = "PENSTOCK_FOLLOWS"
"""Environment variable of the ranks that the leader starts."""
_FOREVER = 1e8
"""Seconds that ranks wait for the next step: a server may have nothing to do for long."""
_LAST_WORDS = 3.0
"""Seconds in which the leader may say itself why it ends, once another rank has."""
_HELD = ExitStack()
"""The group of ranks, which lives as long as this process."""


class Led:
    """An engine on several ranks, for the worker on the first: each step passes on to the others what was admitted and
    released.
    """

    def __init__(self, engine: Engine, dims: ParallelDims) -> None:
        self.engine, self.dims = engine, dims
        self._news: list[Request | int] = []

    @property
    def context(self) -> int:
        """The engine's context. The methods below call the engine's, too."""
        return self.engine.context

    def require(self, request: Request) -> None:
        self.engine.require(request)

    def admit(self, request: Request) -> int | None:
        decoding = request.decoding
        if decoding.draws and decoding.seed is None:
            seed = random.SystemRandom().randrange(1 << 31)
            request = replace(request, decoding=replace(decoding, seed=seed))
        self._news.append(request)
        return self.engine.admit(request)

    def release(self, slot: int) -> None:
        self._news.append(slot)
        self.engine.release(slot)

    def step(self, chunk: int | None = None) -> Sequence[Made]:
        told((self._news, chunk), self.dims)
        self._news = []
        return self.engine.step(chunk)

    def dismiss(self) -> None:
        """Let the others end, if this one leads."""
        if self.dims.main:
            told(None, self.dims)

    def follow(self) -> None:
        """Do what the leader does until it ends."""
        nothing: Any = None
        while True:
            try:
                news = told(nothing, self.dims)
            except RuntimeError:  # it has gone without a word
                return
            if news is None:
                return
            for each in news[0]:
                if isinstance(each, int):
                    self.engine.release(each)
                else:
                    self.engine.admit(each)
            self.engine.step(news[1])


def join(settings: dict[str, Any]) -> tuple[ParallelDims, torch.device]:
    """This rank's place among `settings["tp"]`, and its device. The leader, which is no rank yet, starts the others.

    Raises EnvironmentProblem where there are too few GPUs.
    """
    device, count = torch.device(settings["device"]), settings["tp"]
    if device.type == "cuda" and torch.cuda.device_count() < count:
        raise EnvironmentProblem(
            f"tp is {count}, but this machine has {torch.cuda.device_count()} GPUs; use a smaller tp."
        )
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    if _FOLLOWS not in os.environ:
        _start(settings, count)
    device = local_device(device)
    return _HELD.enter_context(together(Plan(tp=count), device, timeout=_FOREVER)), device


def _start(settings: dict[str, Any], count: int) -> None:
    """Start the other ranks; this process is the first of them from now on."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _HELD.callback(lambda: store)
    shared = {
        "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, and rank 0 need not serve another
    }  # fmt: skip
    for rank in range(1, count):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), _FOLLOWS: "1"}
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock.serve.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **shared, **own},
            )
        ours.sendall(packed({"opener": _OPENER, "settings": settings}))
        threading.Thread(target=_end_with, args=(process, ours), daemon=True).start()
    os.environ.update({**shared, "RANK": "0", "LOCAL_RANK": "0"})


def _end_with(process: subprocess.Popen[bytes], link: socket.socket) -> None:
    """End this process once another rank has ended: its part of each layer is gone."""
    process.wait()
    time.sleep(_LAST_WORDS)
    link.close()
    os._exit(ExitCode.ENVIRONMENT)
