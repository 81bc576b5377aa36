"""The experts of some labels alone: fewer weights are read, and texts of these labels have the same logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open

from helpers.generation import tiny
from penstock.errors import ConfigError
from penstock.infer.generator import Generator
from penstock.models import create
from penstock.models.convert import from_pretrained, read_state_dict, save_pretrained
from penstock.models.convert.upcycle import gated
from penstock.models.experts import mixtures_of
from penstock.models.model import Model

KINDS: dict[str, dict[str, Any]] = {
    "an expert for each": {"experts": 4, "labels": 4, "expert_of": (3, 1, 3, 0)},
    "by number": {"experts": 4, "labels": 4, "expert_width": 24, "expert_every": 2},
    "shared": {"experts": 4, "labels": 4, "shared_experts": 1},
    "groups": {"experts": 8, "labels": 4, "router_groups": 4, "experts_per_token": 2, "expert_of": (3, 1, 3, 0)},
    "capacity": {"experts": 4, "labels": 4, "sample_capacity": 3},
}  # fmt: skip


def routed(name: str, kind: str) -> Model:
    given = {"router": "given", **KINDS[kind]}
    config: Any = tiny(name).config
    if name == "gpt":
        config = replace(config, **given)
    else:
        # The other side chooses by itself, and counts visits by label.
        own = {"experts": 4, "experts_per_token": 2, "labels": 4}
        config = replace(
            config, encoder=replace(config.encoder, **own), decoder=replace(config.decoder, **given)
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = create(config, dtype=torch.float64)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def _logits(model: Model, label: int) -> torch.Tensor:
    tokens, routes = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]), torch.tensor([label, label])
    given = {"routes": routes} if model.graph.labelled else {}
    with torch.no_grad():
        if model.graph.remembered:
            return model(tokens, tokens[:, :3], **given)  # type: ignore[no-any-return]
        return model(tokens, **given)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gpt", "marian-tiny"])
def test_one_labels_experts_make_the_same_logits(name: str, kind: str, tmp_path: Path) -> None:
    model = routed(name, kind)
    save_pretrained(model, tmp_path)
    whole = sum(value.numel() for value in model.state_dict().values())
    for label in (0, 1):
        alone = from_pretrained(tmp_path, dtype=torch.float64, labels=[label]).eval()
        torch.testing.assert_close(_logits(alone, 0), _logits(model, label), rtol=1e-10, atol=1e-10)
        assert sum(value.numel() for value in alone.state_dict().values()) < whole
        dense = kind in ("an expert for each", "by number")
        assert len(mixtures_of(alone)) == len(mixtures_of(model)) * (not dense) + dense * 2 * (name != "gpt")
    several = from_pretrained(tmp_path, dtype=torch.float64, labels=[1, 2]).eval()
    for number, label in enumerate((1, 2)):
        torch.testing.assert_close(_logits(several, number), _logits(model, label), rtol=1e-10, atol=1e-10)


def test_no_other_experts_are_read(tmp_path: Path) -> None:
    model = routed("gpt", "an expert for each")
    save_pretrained(model, tmp_path)
    asked: list[Any] = []

    class Slice:
        def __init__(self, part: Any) -> None:
            self.part = part

        def __getitem__(self, rows: slice) -> torch.Tensor:
            asked.append(rows)
            return self.part[rows]  # type: ignore[no-any-return]

    class Opened:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = safe_open(*args, **kwargs)

        def __enter__(self) -> Any:
            self.opened = self.file.__enter__()
            return self

        def __exit__(self, *problem: Any) -> None:
            self.file.__exit__(*problem)

        def get_slice(self, name: str) -> Slice:
            return Slice(self.opened.get_slice(name))

        def get_tensor(self, name: str) -> torch.Tensor:
            assert ".mlp." not in name
            return self.opened.get_tensor(name)  # type: ignore[no-any-return]

    with mock.patch("penstock.models.convert.files.safe_open", Opened):
        from_pretrained(tmp_path, dtype=torch.float64, labels=[0])
    assert set(map(str, asked)) == {"slice(3, 4, None)"}
    name = next(name for name in read_state_dict(tmp_path) if name.endswith(".up.weight"))
    part = read_state_dict(tmp_path, {name: [2, 0]})
    assert torch.equal(part[name], read_state_dict(tmp_path)[name][[2, 0]])


def test_texts_of_a_label_come_from_its_experts_alone(tmp_path: Path) -> None:
    model = routed("gpt", "an expert for each")
    save_pretrained(model, tmp_path)
    whole, alone = Generator(tmp_path, ends=()), Generator(tmp_path, ends=(), only=["1"])
    assert whole.bytes == whole.whole_bytes
    assert alone.bytes < 0.75 * alone.whole_bytes
    expected = whole.generate([[1, 2], [3]], label="1", max_tokens=6)
    assert alone.generate([[1, 2], [3]], label="1", max_tokens=6) == expected
    assert alone.generate([[1, 2], [3]], max_tokens=6) == expected
    with pytest.raises(ConfigError, match=r"'0' is not a label of this model\. Its labels are 1"):
        alone.generate([1], label="0")
    with pytest.raises(ConfigError, match=r"'7' is not a label .* 0, 1, 2, 3"):
        Generator(tmp_path, only=["7"])
    with pytest.raises(ConfigError, match="give the folder of its export"):
        Generator(model, only=["1"])
    both = Generator(tmp_path, ends=(), only=["2", "1"])
    assert both.labels.names == ("1", "2")
    assert both.generate([1], label="2", max_tokens=6) == whole.generate([1], label="2", max_tokens=6)


def test_a_perceptron_is_as_wide_as_the_expert() -> None:
    config = gated(routed("gpt", "by number").config, [2])
    assert not config.graph.routed
    assert [(layer.sizes.mixture, layer.sizes.hidden) for layer in config.graph.runs[0].stack.layers] == [
        (False, 32),
        (False, 24),
    ]
