"""Every door, against broken inputs and the inputs that once got through."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from urllib.parse import unquote

import pytest

from fuzz.doors import DOORS, Door, load
from fuzz.judge import Outcome, fuzz, opened
from helpers.caches import new_cache
from helpers.rows import record
from helpers.sweeps import sweep
from penstock.errors import DataError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "faults_fuzz.json"
KEPT = sorted((Path(__file__).parent / "kept").glob("*/*.bin"))

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory and time are read from /proc")


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is not there yet, beside a cache of its own."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(new_cache(tmp_path / "cache")))
    return tmp_path / "room"


@pytest.mark.parametrize("door", sweep(DOORS, ["images", "plan_line"], slow=["tar", "messages"]))
def test_200_broken_inputs_end_in_a_sentence(door: str, room: Path) -> None:
    outcome = fuzz(door, 200, room)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert outcome.cases >= 190
    assert len(outcome.ended) > 1, "a door that refuses nothing, or everything, is not being tried"


@pytest.mark.faults
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("door", DOORS)
def test_20_000_broken_inputs_end_in_a_sentence(door: str, room: Path) -> None:
    outcome = fuzz(door, 20_000, room)
    assert not outcome.failures, "\n".join(outcome.failures)
    record(RESULTS, f"door: {door}", outcome.figures(), command="make test-faults PYTEST=tests/fuzz")


@pytest.mark.parametrize("file", KEPT, ids=lambda file: f"{file.parent.name}/{file.stem.partition('--')[2]}")
def test_what_once_got_through(file: Path, room: Path) -> None:
    door, outcome = load(file.parent.name), Outcome()
    with opened(door, room):
        outcome.run(door, (unquote(file.stem.partition("--")[0]), file.read_bytes()))
    assert not outcome.failures, "\n".join(outcome.failures)


def _enter_badly(name: str, data: bytes) -> None:
    """Fails in every way."""
    match data:
        case b"traceback":
            raise KeyError("x")
        case b"mumble":
            raise DataError("bad")
        case b"escape":
            raise DataError("The name \x1b[2J is not allowed.")
        case b"slow":
            start = time.process_time()
            while time.process_time() < start + 0.3:
                pass
        case b"flood":
            len(b"x" * int(7e8))
        case b"deluge":
            bytes(2_000_000_000)
        case b"good":
            return
    raise DataError("This is a sentence that says what to do.")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"traceback", "KeyError and its traceback"), (b"mumble", "no sentence"),
        (b"escape", "control characters"), (b"slow", "s of processor time"),
        pytest.param(b"flood", "bytes of memory", marks=pytest.mark.sweep),
        (b"deluge", "MemoryError"), (b"other", None), (b"good", None),
    ],
)  # fmt: skip
def test_the_room_notices(data: bytes, words: str | None, room: Path) -> None:
    door, outcome = Door(seeds=lambda: {"good": b"good"}, enter=_enter_badly), Outcome()
    with opened(door, room):
        outcome.run(door, ("good", data), 0.2 if data == b"slow" else 2.0)
    assert outcome.cases == sum(outcome.ended.values()) == 1
    assert bool(outcome.failures) == (words is not None)
    for failure in outcome.failures:
        assert str(words) in failure
        assert data.hex() in failure
