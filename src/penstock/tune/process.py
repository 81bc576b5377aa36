"""One process, or several ranks, that runs a script under some settings, takes steps on request and reports facts. Free
of torch."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.formats import Products
from penstock.config.fused import FusedName
from penstock.config.plan import OptimizerForm
from penstock.ladder.contender import ContenderEnded
from penstock.launch.local import Closed, JsonLink

_LOOK = 0.5
"""Seconds between two checks of a process that has not answered."""
_KILL_AFTER = 5.0
_TAIL = 6
"""Number of last lines shown of a failed script's output."""
_QUIET = {"WANDB_MODE": "disabled", "PYTHONHASHSEED": "0"}
"""Environment variables that keep the script from uploading anything, and make its processes behave the same."""

_OVERRULED = ("PENSTOCK_PRECISION", "PENSTOCK_DTYPE")
"""Environment variables that would contradict the settings."""


FORMS: tuple[OptimizerForm, ...] = ("foreach", "fused")
PRODUCTS: tuple[Products, ...] = ("fp8_tensorwise", "int8_all")
SWITCHED: dict[str, tuple[str, ...]] = {
    "attention": ("plain", "flash", "efficient", "cudnn"),
    "loss": ("chunked",),
    "padding": ("remove",),
    "experts": ("loop",),
}
"""Values of the Plan's switches that are tried on a script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a script's model and optimizer, and about the settings that it chose itself."""

    device: str
    model: str = ""
    """Name of the first model's class; empty if no module was called with gradients."""
    parameters: int = 0
    """Number of trained parameters."""
    optimizer: str = ""
    form: str = ""
    """The form that the script chose for its optimizer; empty if it leaves the choice to torch."""
    compiled: bool = False
    """Whether the script calls torch.compile."""
    mixed: str = ""
    """Reason why precision is left to the script; empty if it computes in fp32."""
    eager: bool = False
    """Whether a transformers model computes attention itself instead of calling torch's."""
    padding: float = 0.0
    """Share of the first batch's tokens that its attention mask hides."""
    blocks: int = 0
    no_blocks: str = ""
    """Reason why no repeated blocks were found."""
    switches: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Values that the model supports, by field of the Plan."""
    fused: Mapping[FusedName, int] = field(default_factory=dict)
    """For each fused operator, the number of places in the model where it fits."""
    forms: Mapping[OptimizerForm, str] = field(default_factory=dict)
    """By optimizer form, the reason why the script's optimizer does not have it; empty if it does."""
    products: Mapping[Products, str] = field(default_factory=dict)
    """By form of products, the reason why the device does not support it; empty if it does."""


class ScriptEnded(ContenderEnded):
    """The script has ended, though more steps were requested. `status` says how it ended."""

    def __init__(self, status: str, why: str, steps: int) -> None:
        super().__init__(status, why)
        self.steps = steps


@dataclass(frozen=True, slots=True)
class ScriptCommand:
    """A script with its arguments, as for the command `python`."""

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    procs: int = 1

    def words(self, *options: str) -> list[str]:
        """The words after `python`, with options of `penstock run`."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.procs)]
        named = (["-m"] if self.module else []) + [self.target, *self.arguments]
        return [*(launcher if self.procs > 1 else []), "-m", "penstock", "run", *options, *named]


class ScriptProcess:
    """The script under one line of settings."""

    def __init__(self, command: ScriptCommand, line: str, seed: int, log: Path, timeout: float) -> None:
        """`seed` is added to the seeds that the script sets; `timeout` is the longest wait in seconds for an answer."""
        self.command, self.log, self.timeout = command, log, timeout
        self.losses: list[float | None] = []
        """Loss of each step so far, on the first rank."""
        self.memory: int | None = None
        """Peak bytes on a GPU so far; None on a CPU."""
        self.steps = 0
        self._links: dict[int, JsonLink] = {}
        """Connections by rank."""
        key = secrets.token_hex(8)
        with socket.create_server(("127.0.0.1", 0)) as server, log.open("wb") as output:
            options = ["--plan", line, "--watch", f"{server.getsockname()[1]}:{key}:{seed}"]
            self._process = subprocess.Popen(
                [sys.executable, *command.words(*options)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={name: value for name, value in os.environ.items() if name not in _OVERRULED} | _QUIET,
            )  # fmt: skip
            try:
                self._accept(server, key)
            except BaseException:
                self.close()
                raise

    def first_step(self) -> float:
        """Seconds of the first step, from the import of torch on, including compiling."""
        return self._turn()

    def turn(self, steps: int) -> float:
        """Make `steps` steps and return the seconds per step. Raises ScriptEnded."""
        for link in self._links.values():
            self._tell(link, do="step", steps=steps)
        return self._turn() / steps

    def facts(self) -> tuple[Facts, dict[str, Any]]:
        """The facts of the script, and its machine. Afterwards the process can only be closed."""
        self._tell(self._links[0], do="facts")
        answer = self._hear(self._links[0])
        return Facts(**answer["facts"]), answer["machine"]

    def predicted(self, first: str, plans: list[str]) -> dict[str, float]:
        """Predicted speed of each Plan relative to `first`; call it after `facts`. Empty if the planner cannot tell."""
        self._tell(self._links[0], do="predict", first=first, plans=plans)
        speeds: dict[str, float] = self._hear(self._links[0])["speeds"]
        return speeds

    def close(self) -> None:
        """End the script and all processes that it has started."""
        for link in self._links.values():
            link.close()
        for word in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, word)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_AFTER if word == signal.SIGTERM else None)
                break
        # A process ended by a signal may leave children behind; they are in the same group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _turn(self) -> float:
        answers = [self._hear(link) for link in self._links.values()]
        self.steps = answers[0]["steps"]
        return max(float(answer["seconds"]) for answer in answers)

    def _accept(self, server: socket.socket, key: str) -> None:
        """Wait until all ranks have connected."""
        server.settimeout(_LOOK)
        end = time.monotonic() + self.timeout
        while len(self._links) < self.command.procs:
            try:
                link = JsonLink(server.accept()[0])
            except TimeoutError:
                if self._process.poll() is not None:
                    raise self._end_error() from None
                if time.monotonic() > end:
                    raise self._late("has not imported torch") from None
                continue
            with contextlib.suppress(Closed), contextlib.ExitStack() as stranger:
                stranger.callback(link.close)
                hello = self._next(link, "has imported torch, but not said which rank it is")
                if hello.get("key") == key:
                    stranger.pop_all()
                    self._links[int(hello["rank"]) if self.command.procs > 1 else 0] = (
                        link  # a shell may set RANK
                    )

    def _tell(self, link: JsonLink, **message: Any) -> None:
        with contextlib.suppress(Closed):  # `_hear` reports it
            link.send(**message)

    def _next(self, link: JsonLink, late: str) -> dict[str, Any]:
        """The next message of a rank. Raises Closed, and ScriptEnded if the script has ended or, with the reason
        `late`, does not answer in time."""
        end = time.monotonic() + self.timeout
        while True:
            ended = self._process.poll() is not None  # checked first: a last message may be on its way
            if (message := link.receive(_LOOK)) is not None:
                return message
            if ended:
                raise self._end_error()
            if time.monotonic() > end:
                raise self._late(late)

    def _hear(self, link: JsonLink) -> dict[str, Any]:
        late = f"has made no further step after {self.steps}" if self.steps else "has made no optimizer step"
        try:
            answer = self._next(link, late)
        except Closed:
            raise self._end_error() from None
        if link is self._links[0]:
            self.losses += answer.get("losses", [])
            self.memory = answer.get("memory") or self.memory
        if answer["event"] == "end":
            raise ScriptEnded(answer["status"], answer["why"], answer["steps"])
        return answer

    def _late(self, what: str) -> ScriptEnded:
        return ScriptEnded(
            "late",
            f"it {what} within {self.timeout:.0f} s; --timeout allows it longer, and its output is in {self.log}",
            self.steps,
        )

    def _end_error(self) -> ScriptEnded:
        """The exception for a script that ended without a message."""
        code = self._process.wait()
        last_lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_TAIL:]
        why = f"it ended with code {code}" + ("" if not last_lines else ": " + " | ".join(last_lines))
        # When memory runs out, the kernel kills the largest process.
        status = "out of memory" if code == -signal.SIGKILL else "failed" if code else "ended"
        return ScriptEnded(status, why, self.steps)
