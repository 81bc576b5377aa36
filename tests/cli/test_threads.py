"""What the command line tells the OpenMP runtime, before anything has loaded it."""

from __future__ import annotations

import os

import pytest

from penstock.cli import main


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that whatever main sets is undone
        monkeypatch.delenv(name)


def test_threads_sleep_soon() -> None:
    assert main(["--version"]) == 0
    assert os.environ["GOMP_SPINCOUNT"] == "3000"


def test_the_users_own_choice_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    assert main(["--version"]) == 0
    assert os.environ["GOMP_SPINCOUNT"] == "77"


def test_a_chosen_policy_is_not_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert main(["--version"]) == 0
    assert "GOMP_SPINCOUNT" not in os.environ
