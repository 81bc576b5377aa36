"""A mixture of experts behind HTTP, hosted by two processes, with moves while it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.generation import tiny
from helpers.served import served
from penstock.config.load import load, to_dict
from penstock.data.text.tokenizers import Bytes
from penstock.errors import ConfigError
from penstock.infer.generator import Generator
from penstock.models.convert import save_pretrained
from penstock.planner.loads import LoadRecord, read_loads
from penstock.serve.balance import slots_by
from penstock.serve.settings import ServeConfig
from penstock.serve.worker import opened


@pytest.mark.sweep
def test_texts_stay_the_same_while_experts_move(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip("tokenizers")
    folder = tmp_path / "model"
    save_pretrained(tiny("mixtral", words=Bytes.size, dtype=torch.float32), folder)
    Bytes().save(folder)
    prompts = ["ab", "c" * 20, "def", "g", "hi" * 9, "j"]
    made = Generator(folder, ends=())
    expected = [list(one.ids) for one in made.generate(prompts, max_tokens=14)]
    before = LoadRecord(("a", "b"), (), (((9, 9, 1, 1),), ((1, 1, 1, 1),)))
    (tmp_path / "loads.json").write_text(before.to_json())
    words = ("slots=4", "ep=2", "rebalance=3", "spare_experts=1", f"loads={tmp_path / 'loads.json'}")
    with served(folder, *words, opener="penstock.serve.worker:opened") as running:
        assert running.ask("/v1/experts")[0] == 404
        body: dict[str, Any] = {
            "prompt": prompts, "max_tokens": 14, "temperature": 0, "ignore_eos": True, "return_token_ids": True
        }  # fmt: skip
        for _ in range(3):
            status, answer, _ = running.ask("/v1/completions", body)
            assert status == 200, answer
            assert [one["token_ids"] for one in answer["choices"]] == expected
        status, record, _ = running.ask("/v1/experts")
        assert status == 200
        (tmp_path / "now.json").write_text(LoadRecord.of_dict(record).to_json())
        now = read_loads(tmp_path / "now.json")
        assert [len(row) for row in now.totals] == [4, 4]
        # Each token has two experts in each mixture; a prompt is read once, and its text but for the last token.
        once = 2 * sum(len(made.encode(prompt)) + 13 for prompt in prompts)
        assert 2 * once < sum(now.totals[0]) <= 8 * once
        assert len(now.windows) > 3
        assert running.gauge("expert_moves_given_up") == 0
        assert running.gauge("expert_load") >= 1
        assert running.gauge("expert_moves") >= 1


def test_replicas_stand_on_ranks_by_their_loads() -> None:
    record = LoadRecord(("a",), (), (((90, 10, 10, 10),),))
    (slots,) = slots_by(record, [4], 2, 1)
    assert all(0 in held for held in slots)
    assert sorted(expert for held in slots for expert in held) == [0, 0, 1, 2, 3]
    with pytest.raises(ConfigError, match=r"mixtures of \[4\] experts, but the model has \[8\]"):
        slots_by(record, [8], 2, 0)
    with pytest.raises(ConfigError, match="5 spare experts, but 2 devices have room for 4"):
        slots_by(record, [4], 2, 5)


@pytest.mark.parametrize(
    ("words", "said"),
    [({"ep": 3, "tp": 2}, "make ep a multiple of tp"), ({"ep": 2, "tokens": 64}, "each device has its own"),
     ({"rebalance": 8}, "rebalance is for experts on several devices"),
     ({"ep": 2, "compile": "whole", "cache": "slots"}, "the ranks of ep=2 exchange results"),
     ({"ep": 2, "device": "cuda:0"}, "ep=2 needs a GPU for each process")],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(ServeConfig, overrides={name: str(value) for name, value in words.items()})


def test_ranks_are_not_started_where_heads_cannot_be_split(tmp_path: Path) -> None:
    save_pretrained(tiny("llama", dtype=torch.float32), tmp_path)
    settings = {**to_dict(ServeConfig(tp=4)), "model": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"tp=4 does not divide the model's 2 KV heads; use a tp of 1 or 2"):
        opened(settings)
