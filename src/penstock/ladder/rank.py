"""`python -m penstock.ladder.rank`: one of the processes that a rung of several is measured in.

The climb that started it asks by lines of JSON on standard input, of all ranks the same, and gets one line back from
each on the pipe that was standard output. It ends when the climb does, whatever it is doing: that closes its input.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

PATIENCE = 600.0
"""Seconds that a rank waits for its peers in a collective."""
SMALL, LARGE = 64, 1 << 21
"""Numbers that are reduced to learn what a collective costs by itself, and how fast many bytes are."""
REPEATS = 9


def main() -> None:
    """Serve until the input ends. Leaves by `_exit`: gloo's threads may abort in an orderly one."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints does so beside the answers
    tasks: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(tasks,), daemon=True).start()

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        _serve(json.loads(tasks.get()), tasks, answer)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the climb tells it
        answer(
            {
                "error": type(error).__name__,
                "message": str(error),
                "trace": traceback.format_exc(),
                "time": time.time(),
            }
        )
    sys.stderr.flush()
    os._exit(0)


def _read(tasks: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        tasks.put(line)
    os._exit(0)


def _serve(
    hello: dict[str, Any], tasks: queue.SimpleQueue[str], answer: Callable[[dict[str, Any]], None]
) -> None:
    """Join the others and do what is asked. Anything that fails ends this rank, for others wait for it."""
    sys.path[:] = [*hello["path"], *(entry for entry in sys.path if entry not in hello["path"])]
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch

    from penstock.config.load import from_dict, load
    from penstock.config.machine import Machine
    from penstock.config.plan import Plan
    from penstock.ladder import measure
    from penstock.ladder.settings import LadderConfig
    from penstock.ladder.subject import subject_of
    from penstock.parallel.join import joined, local_device

    torch.set_num_threads(hello["threads"])
    config = load(LadderConfig, overrides=hello["config"], origin="the climb")
    device = local_device(torch.device(hello["device"]))
    subject = subject_of(config, None, device, from_dict(Machine, hello["machine"]))
    with joined(Plan(dp=config.procs), device, timeout=PATIENCE) as dims, measure.side_by_side():
        subject.rank = dims.rank
        rank = _Rank(subject)
        answer({"result": os.getpid()})
        while True:
            task = json.loads(tasks.get())
            answer({"result": getattr(rank, task.pop("do"))(**task)})


class _Rank:
    """What a rank can be asked. Every method is called on all ranks alike."""

    def __init__(self, subject: Any) -> None:
        self.subject = subject
        self.contenders: dict[int, Any] = {}

    def link(self) -> dict[str, float]:
        """Bus bandwidth of a large all-reduce, in bytes per second, and seconds of a small one."""
        large = self._reduced(LARGE)
        size = int(os.environ["WORLD_SIZE"])
        return {"bandwidth": 2.0 * (size - 1) / size * 4.0 * LARGE / large, "seconds": self._reduced(SMALL)}

    def contend(self, key: int, setting: dict[str, Any], seed: int) -> dict[str, float | None]:
        """Build and warm up, to be called `key` from then on."""
        from penstock.ladder import measure

        contender = measure.contend(self.subject, _setting(setting), seed)
        self.contenders[key] = contender
        return {"step": contender.step_seconds, "compile": contender.compile_seconds}

    def timed(self, key: int, steps: int) -> float:
        """Seconds per step."""
        return float(self.contenders[key].timed(steps))

    def memory(self, key: int) -> int:
        """Peak bytes of one step."""
        return int(self.contenders[key].memory()[0])

    def trained(self, setting: dict[str, Any], seed: int, steps: int) -> dict[str, list[float]]:
        """Losses and norms of some steps."""
        from penstock.ladder import measure

        run = measure.trained(self.subject, _setting(setting), seed, steps)
        measure.release(self.subject.device, compiled=False)
        return {"losses": run.losses, "norms": run.norms}

    def drop(self, key: int) -> None:
        """Forget a contender."""
        from penstock.ladder import measure

        self.contenders.pop(key, None)
        compiled = any(c.setting.plan.compile != "none" for c in self.contenders.values())
        measure.release(self.subject.device, compiled=not compiled)

    def _reduced(self, numbers: int) -> float:
        import torch
        from torch import distributed

        values = torch.zeros(numbers, device=self.subject.device)
        taken = []
        for _ in range(REPEATS):
            distributed.barrier()
            start = time.perf_counter()
            distributed.all_reduce(values)
            if values.is_cuda:
                torch.cuda.synchronize(values.device)
            taken.append(time.perf_counter() - start)
        return sorted(taken)[REPEATS // 2]


def _setting(values: dict[str, Any]) -> Any:
    """A Setting as `team.written` wrote it."""
    from penstock.config.load import from_dict
    from penstock.config.model import ModelConfig
    from penstock.config.plan import Plan
    from penstock.ladder.rung import Setting

    model = values["model"]
    return Setting(
        model=None if model is None else from_dict(ModelConfig, model), plan=Plan.parse(values["plan"])
    )


if __name__ == "__main__":
    main()
