"""Every door, against broken inputs and the inputs that once got through."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from fuzz.doors import DOORS
from fuzz.harness import fuzz, run_case
from helpers.rows import record
from helpers.sweeps import sweep

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "faults_fuzz.json"
KEPT = sorted((Path(__file__).parent / "kept").glob("*/*.bin"))

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory and time are read from /proc")


@pytest.mark.parametrize("door", sweep(DOORS, ["images", "plan_line"], slow=["tar", "messages"]))
def test_200_broken_inputs_end_in_a_sentence(door: str) -> None:
    outcome = fuzz(door, 200)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert outcome.cases >= 190  # hypothesis ends a block early where it has made everything
    assert len(outcome.ended) > 1, "a door that refuses nothing, or everything, is not being tried"


@pytest.mark.faults
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("door", DOORS)
def test_20_000_broken_inputs_end_in_a_sentence(door: str) -> None:
    outcome = fuzz(door, 20_000)
    assert not outcome.failures, "\n".join(outcome.failures)
    record(RESULTS, f"door: {door}", outcome.figures(), command="make test-faults PYTEST=tests/fuzz")


@pytest.mark.parametrize("file", KEPT, ids=lambda file: f"{file.parent.name}/{file.stem.partition('--')[2]}")
def test_what_once_got_through(file: Path) -> None:
    name = unquote(file.stem.partition("--")[0])
    outcome = run_case(file.parent.name, name, file)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert outcome.cases == 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"traceback", "KeyError and its traceback"), (b"mumble", "no sentence"),
        (b"escape", "control characters"), (b"slow", "s of processor time"),
        pytest.param(b"flood", "bytes of memory", marks=pytest.mark.sweep),
        (b"deluge", "MemoryError"), (b"hang", "It hangs"), (b"crash", "ended with -11"), (b"other", None),
        (b"good", None),
    ],
)  # fmt: skip
def test_the_room_notices(data: bytes, words: str | None, tmp_path: Path) -> None:
    case = tmp_path / "case.bin"
    case.write_bytes(data)
    outcome = run_case("broken", "good", case, "--seconds", "0.2" if data == b"slow" else "2")
    assert outcome.cases == 1
    if words is None:
        assert not outcome.failures
    else:
        (failure,) = outcome.failures
        assert words in failure
        assert data.hex() in failure


def test_a_process_that_a_case_ends_is_replaced_for_the_next_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_FUZZ_BROKEN", "crash")
    outcome = fuzz("broken", 200)
    assert len(outcome.failures) == 4
    assert [failure.split(",")[0] for failure in outcome.failures] == [f"block {n}" for n in range(4)]
