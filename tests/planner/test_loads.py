"""What uneven loads of experts cost under expert parallelism."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.config.machine import load_machine
from penstock.config.model import preset
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.planner import predict
from penstock.planner.loads import EVEN, LoadRecord, unevenness

RECORD = LoadRecord(("a", "b"), (), (((4, 0, 0, 0, 0, 0, 0, 4),), ((1, 1, 1, 1, 1, 1, 1, 1),)))


def test_the_busiest_device_is_that_with_most_visits() -> None:
    assert unevenness(RECORD, 8) == {1: 1.0, 2: 1.0, 4: (2 + 1) / 2, 8: (4 + 1) / 2}
    with pytest.raises(ConfigError, match="8 experts in a, but the model 4"):
        unevenness(RECORD, 4)


def test_uneven_loads_cost_time_and_memory_where_experts_are_split() -> None:
    model, machine = preset("mixtral-8x7b"), load_machine("h100")
    uneven = unevenness(RECORD, 8)
    for ep, grows in ((1, False), (8, True)):
        plan = Plan.parse(f"precision=O2 dtype=bf16 micro_batch=2 dp=8 sharding=fsdp ep={ep}")
        even, record = predict(model, machine, plan), predict(model, machine, plan, uneven=uneven)
        assert even == predict(model, machine, plan, uneven=EVEN)
        assert (record.iteration_seconds > 1.1 * even.iteration_seconds) == grows
        assert (record.memory["activations"] > 1.02 * even.memory["activations"]) == grows
        assert (record == even) != grows
        assert record.mfu <= even.mfu, "visits are as many as before"


def test_plan_takes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "loads.json"
    file.write_text(RECORD.to_json())
    line = "precision=O2 dtype=bf16 micro_batch=1 dp=8 sharding=fsdp ep=8"
    words = ["plan", "mixtral-8x7b", "--machine", "h100", "--explain", line]
    assert main(words) == 0
    assert "assumed to be visited evenly" in capsys.readouterr().out
    assert main([*words, "--loads", str(file)]) == 0
    assert "the busiest of ep=8 devices has 2.50 times the mean" in capsys.readouterr().out
    assert main([*words, "--loads", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["expert_load"]["8"] == 2.5
    assert main(["plan", "gpt2", "--explain", "micro_batch=1", "--loads", str(file)]) != 0
    assert "--loads is for mixtures" in capsys.readouterr().err
