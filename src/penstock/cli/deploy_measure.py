"""`penstock deploy --measure`: the choice, started here, and measured with clients' requests."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.cli.deploy_files import SERVED, penstock
from penstock.config.machine import Machine
from penstock.errors import ConfigError, EnvironmentProblem
from penstock.planner.serve import generates
from penstock.serve.deploy import Layout
from penstock.serve.measure import CHUNK, Client, Measured, compare
from penstock.serve.scheduler import Limits
from penstock.serve.settings import DeployConfig
from penstock.serve.traffic import Arrival

WAITING = 10_000
"""Requests that may wait: enough that none is refused, so that waiting shows as time."""
_PORT = re.compile(r":(\d+)/v1")


def measure(config: DeployConfig, machine: Machine, layout: Layout, arrivals: Sequence[Arrival]) -> Measured:
    """Start the choice, time its steps, and send it the traffic.

    Raises ConfigError for a choice that this machine's server does not run, and EnvironmentProblem where it does not
    start.
    """
    assert config.model is not None
    assert config.weights is not None
    if layout.gpus > 1 or layout.type not in SERVED:
        raise ConfigError(
            f"--measure starts one server on one device, but the choice is {layout.words()}; use --gpus 1."
        )
    if not generates(config.model):
        raise ConfigError(
            "--measure sends prompts to be continued, and an encoder makes vectors; leave it out."
        )
    vocabulary: int = getattr(config.model, "vocabulary", 2)
    with server_started(penstock(config, config.weights, machine, layout)[1:]) as port:
        client = Client(host="127.0.0.1", port=port, vocabulary=vocabulary)
        return asyncio.run(compare(client, arrivals, limits_of(layout)))


def limits_of(layout: Layout) -> Limits:
    """The limits of a layout's server."""
    return Limits(
        slots=layout.slots, waiting=WAITING, context=layout.context, chunk=CHUNK, pieces=True,
        cache=min(layout.cache_tokens, layout.slots * Limits().blocks(layout.context)),
    )  # fmt: skip


@contextmanager
def server_started(words: Sequence[str]) -> Iterator[int]:
    """Run `penstock` with the words of our server, and yield the port that it listens on.

    Raises EnvironmentProblem where it does not start.
    """
    words = [*words, "--port", "0", "--waiting", str(WAITING)]
    process = subprocess.Popen([sys.executable, "-m", "penstock", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = _PORT.search(process.stdout.readline())
        if port is None:
            raise EnvironmentProblem(
                f"The server has not started; run it alone to see why: penstock {' '.join(words)}"
            )
        yield int(port[1])
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
