"""Scores of texts are those of the whole logits."""

from __future__ import annotations

import pytest
import torch

from helpers.generation import tiny
from penstock.errors import ConfigError
from penstock.infer import score
from penstock.infer.score import Scorer


@pytest.mark.parametrize("name", ["gpt", "qwen"])
def test_scores_are_those_of_the_whole_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "ROWS", 4)
    model = tiny(name).eval()
    ids = torch.arange(11) * 5 % 17
    with torch.inference_mode():
        logs = torch.log_softmax(model(ids[None, :-1])[0].float(), -1)
    found = Scorer(model)(ids.tolist(), 3)
    torch.testing.assert_close(torch.tensor(found.logs), logs.gather(1, ids[1:, None])[:, 0])
    assert [[number for number, _ in row] for row in found.likeliest] == logs.topk(3).indices.tolist()
    assert Scorer(model)([3]).logs == []
    with torch.inference_mode():  # the model gives logits as before
        torch.testing.assert_close(torch.log_softmax(model(ids[None, :-1])[0].float(), -1), logs)


def test_a_text_that_is_too_long_and_a_model_that_translates_are_refused() -> None:
    model = tiny("gpt")
    with pytest.raises(ConfigError, match=r"reads [0-9,]+ at most"):
        Scorer(model)([1] * 5000)
    with pytest.raises(ConfigError, match="Only decoders"):
        Scorer(tiny("t5-tiny"))
