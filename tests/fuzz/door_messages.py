"""What processes of a run say to each other: a rank's report, agents' messages, the lock, and the run's records."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.door import Case, Door
from fuzz.mutate import altered_tree
from fuzz.text import as_json
from penstock.errors import EnvironmentProblem

_LOCK = {"pid": 17, "host": "elsewhere", "since": 1.7e9}
_RECORD = {"event": "step", "step": 3, "loss": 2.5, "grad_norm": None}


def _trees() -> dict[str, Any]:
    from penstock.launch.meeting import Member, Message
    from penstock.launch.report import Report
    from penstock.launch.verdict import Failure, Outcome

    member = Member(
        place=None, procs=8, address="10.0.0.1", port=29400, round=0, restarts=1, host="node-1",
        rendezvous="10.0.0.1",
    )  # fmt: skip
    failures = (Failure(3, 1, "Traceback: it failed", False, 12.5), Failure(4, -9, consequence=True))
    return {
        "report": asdict(Report(1.7e9, "RuntimeError: it failed\n", False)),
        "member": asdict(member),
        "message": asdict(Message(node=1, outcome=Outcome(1, failures, final=False))),
        "lock": _LOCK,
        "records": _RECORD,
    }


def _enter(name: str, data: bytes) -> None:
    from penstock.launch.meeting import Member, Message, understood
    from penstock.launch.report import read_report
    from penstock.launch.verdict import judge, tell
    from penstock.train.lock import RunLock
    from penstock.train.metrics import Records

    if name == "report":
        Path("report").write_bytes(data)
        if (found := read_report(Path("report"))) is None:
            raise EnvironmentProblem("There is no report that can be read.")
        assert all(character.isprintable() or character in "\n\t" for character in found.text)
    elif name == "member":
        understood(Member, data)
    elif name == "message":
        outcome = understood(Message, data).outcome
        tell(judge(outcome.failures, stopping=False).failures)
    elif name == "lock":
        Path("lock").write_bytes(data)
        lock = RunLock(Path())
        if not lock.hold():
            raise EnvironmentProblem("Another host may hold the lock.")
        lock.__exit__()
    else:
        Path("metrics.jsonl").write_bytes(data + b"\n")
        Records(Path(), None).rewind(3)


def _made() -> st.SearchStrategy[Case]:
    return st.one_of(
        altered_tree(tree).map(lambda tree, name=name: (name, as_json(tree)))
        for name, tree in _trees().items()
    )


DOOR = Door(
    seeds=lambda: (
        {name: json.dumps(tree).encode() for name, tree in _trees().items() if name != "lock"} | {"lock": b""}
    ),
    enter=_enter,
    made=_made,
    tokens=(b"[", b"{", b"\\u001b[2J", b"NaN", b"1e400", b'"node": '),
)
