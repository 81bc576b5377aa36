from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from penstock.report import record


def test_environment_is_json_and_names_what_decides_a_result() -> None:
    found = json.loads(json.dumps(record.environment()))
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["processor"]
    assert {"torch", "python"} <= found["versions"].keys()
    assert found["time"].endswith("+00:00")


@pytest.mark.parametrize(
    ("module", "argv", "line"),
    [
        (None, ["/usr/local/bin/penstock", "ladder", "vit-s16"], "penstock ladder vit-s16"),
        (None, ["benchmarks/x.py", "--plan", "a=1 b=2"], "python benchmarks/x.py --plan 'a=1 b=2'"),
        (SimpleNamespace(name="penstock.__main__"), ["/x/__main__.py", "train"], "python -m penstock train"),
    ],
)
def test_command_can_be_typed_again(
    module: object, argv: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", module, raising=False)
    assert record.command() == line
