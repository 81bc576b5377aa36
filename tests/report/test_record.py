from __future__ import annotations

import json
import subprocess
import sys

import pytest

from penstock.report import record


def test_environment_is_json_and_names_what_decides_a_result() -> None:
    found = json.loads(json.dumps(record.environment()))
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["processor"]
    assert {"torch", "python"} <= found["versions"].keys()
    assert found["time"].endswith("+00:00")


def test_environment_never_imports_torch() -> None:
    code = (
        "import sys; from penstock.report import record; record.environment(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["/usr/local/bin/penstock", "ladder", "vit-s16"], "penstock ladder vit-s16"),
        (["benchmarks/x.py", "--plan", "a=1 b=2"], "python benchmarks/x.py --plan 'a=1 b=2'"),
    ],
)
def test_command_can_be_typed_again(argv: list[str], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)
    assert record.command() == line


def test_command_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spec:
        name = "penstock.__main__"

    monkeypatch.setattr(sys, "argv", ["/x/__main__.py", "train"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", Spec(), raising=False)
    assert record.command() == "python -m penstock train"
