"""`penstock doctor` prints what was found, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import penstock.doctor
from penstock.cli import main
from penstock.doctor import Finding

GOOD = Finding(area="versions", name="torch", status="ok", detail="2.13", required=True)
BAD = Finding(
    area="versions", name="numpy", status="broken", detail="is [not] there", remedy="pip install 'numpy[x]'"
)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    findings = [GOOD, BAD]
    monkeypatch.setattr(penstock.doctor, "findings", lambda: findings)
    return findings


def test_findings_are_shown_as_they_are_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow() -> Iterator[Finding]:
        yield GOOD
        assert "torch" in capsys.readouterr().out

    monkeypatch.setattr(penstock.doctor, "findings", slow)
    assert main(["doctor"]) == 0


def test_each_problem_with_its_remedy(found: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0, "nothing required is broken"
    told = capsys.readouterr().out
    assert "is [not] there" in told, "brackets are text and no markup"
    assert "broken: numpy: pip install 'numpy[x]'" in told


def test_json_is_whole(found: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    found.append(Finding(area="versions", name="torch", status="broken", detail="gone", required=True))
    assert main(["doctor", "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in told] == ["torch", "numpy", "torch"]
    assert told[1]["remedy"] == BAD.remedy


def test_what_is_slow_has_a_mark_of_its_own(found: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    found.append(Finding("types on cpu", "fp8", "slow", "works, but emulated"))
    assert main(["doctor"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "fp8" in line]
    assert line.startswith("~")


def test_all_well(found: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    found.remove(BAD)
    assert main(["doctor"]) == 0
    assert "Everything that is installed works." in capsys.readouterr().out
