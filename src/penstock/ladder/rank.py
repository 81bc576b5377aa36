"""`python -m penstock.ladder.rank FD`: one of the processes in which a rung with several processes is measured.

The climb that started them sends every rank the same tasks and gets an answer from each. When the climb ends, the
connection closes, and the rank ends at once, whatever it is doing.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import torch

from penstock.config.plan import Plan
from penstock.ladder.measure import Bench, side_by_side
from penstock.ladder.own import subject_of
from penstock.ladder.team import Hello, RankFailure
from penstock.parallel.join import joined, local_device


def main() -> None:
    """Serve until the connection closes. Exits by `_exit`, because gloo's threads may abort in an orderly exit."""
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)  # else the climb could not notice that this rank has ended
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, tasks), daemon=True).start()
    try:
        _serve(connection, tasks)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the climb reports it
        connection.send(RankFailure.of(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _read(connection: Connection[Any, Any], tasks: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            tasks.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


def _serve(connection: Connection[Any, Any], tasks: queue.SimpleQueue[Any]) -> None:
    """Join the other ranks and answer requests. Any failure ends this rank, because the others wait for it."""
    hello = tasks.get()
    assert isinstance(hello, Hello)
    sys.path[:] = [*hello.path, *(entry for entry in sys.path if entry not in hello.path)]
    torch.set_num_threads(hello.threads)
    device = local_device(torch.device(hello.device))
    subject = subject_of(hello.config, None, device)
    with joined(Plan(dp=hello.config.procs), device) as dims, side_by_side():
        subject.rank = dims.rank
        bench = Bench(subject)
        connection.send(None)
        while True:
            do, arguments = tasks.get()
            connection.send(bench.ask(do, *arguments)[0])


if __name__ == "__main__":
    main()
