"""Adapters beside the linears of transformers' own modules. Those of our models: tests/test_every_family.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import foreign
from helpers.families import ENROLLED, batches, loss
from helpers.sweeps import sweep
from penstock import checkpoint
from penstock.build import Built, build
from penstock.cli import main
from penstock.config.load import to_dict
from penstock.config.plan import Plan
from penstock.config.run import Lora, Recipe, RunConfig
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.convert import save_pretrained
from penstock.models.lora import add_adapters, gives_classes, merged, without_adapters

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

RECIPE = Recipe(lr=3e-2, eps=1e-4, lora=Lora(rank=2))


def _adapted(
    name: str, line: str = "", recipe: Recipe = RECIPE
) -> tuple[Built, list[float], dict[str, torch.Tensor]]:
    """After 12 steps on one batch: what was built, the losses, and the weights before."""
    torch.manual_seed(3)
    model = foreign.create(name)
    start = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    built = build(model, Plan.parse(f"micro_batch=4 {line}"), recipe=recipe, loss=foreign.loss)
    batch = foreign.batches(name, 0, 4)
    return built, [float(built.step([batch]).loss) for _ in range(12)], start


@pytest.mark.parametrize("name", sweep(foreign.FOREIGN, list(foreign.FOREIGN)[::3]))
def test_adapters_of_a_foreign_model_learn_alone_and_are_merged(name: str) -> None:
    built, losses, start = _adapted(name)
    assert losses[-1] < losses[0] - 0.02
    heads = ("score.", "classifier.", "bert.pooler.")
    learned = {key for key, tensor in built.model.named_parameters() if tensor.requires_grad}
    assert gives_classes(built.model) == (name == "vit" or "classes" in name)
    assert any(key.startswith(heads) for key in learned) == gives_classes(built.model)
    assert all(".lora_" in key or key.startswith(heads) for key in learned)
    for key, tensor in built.model.state_dict().items():
        if key not in learned:
            assert torch.equal(tensor, start[key.replace(".base_layer.", ".")]), key

    whole = foreign.create(name)
    whole.load_state_dict(merged(built.model.state_dict(), RECIPE.lora, built.model))
    batch = foreign.batches(name, 9, 2)
    with torch.no_grad():
        expected = foreign.loss(built.model.eval(), batch)
        torch.testing.assert_close(foreign.loss(whole.eval(), batch), expected, rtol=1e-5, atol=1e-5)
    # And as peft itself merges them.
    for module in built.model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.merge()
    for key, tensor in built.model.state_dict().items():
        if ".lora_" not in key:
            torch.testing.assert_close(whole.state_dict()[key.replace(".base_layer.", ".")], tensor, msg=key)


def test_what_also_names_learns_in_a_foreign_model_too() -> None:
    recipe = replace(RECIPE, lora=Lora(rank=2, parts="attention", trained_parts=("transformer.wpe",)))
    built, _, start = _adapted("gpt2", recipe=recipe)
    learned = {key for key, tensor in built.model.named_parameters() if tensor.requires_grad}
    assert {key for key in learned if ".lora_" not in key} == {"transformer.wpe.weight"}
    assert all(".attn." in key for key in learned if ".lora_" in key)
    assert not torch.equal(
        built.model.state_dict()["transformer.wpe.weight"], start["transformer.wpe.weight"]
    )


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's own
@pytest.mark.parametrize("name", ["gpt", "llama", "bart"])
def test_adapters_alone_are_read_by_peft_beside_the_weights(name: str, tmp_path: Path) -> None:
    """Beside fused projections, and weights that transformers stores as (in, out)."""
    import transformers

    enrolled = ENROLLED[name]
    recipe = replace(RECIPE, lora=Lora(rank=2, alpha=3.0))
    built = build(enrolled.config, Plan(micro_batch=4), recipe=recipe, loss=loss)
    config = RunConfig(model=enrolled.config, recipe=recipe, init_from="start")
    with without_adapters(built.model):
        save_pretrained(built.model, tmp_path / "start")
    for _ in range(3):
        built.step([batches(enrolled.config, 0, 4)])
    weights = {"weights": built.model.state_dict()}
    checkpoint.save(tmp_path / "checkpoints", checkpoint.Snapshot(3, weights, {}, to_dict(config)))
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "whole")]) == 0
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "adapter"), "--adapter"]) == 0
    auto = getattr(transformers, str(enrolled.reader))
    merged_model, start = (auto.from_pretrained(tmp_path / each).eval() for each in ("whole", "start"))
    words = {"input_ids": torch.arange(1, 9)[None]}
    words |= {"decoder_input_ids": torch.arange(2, 8)[None]} if name == "bart" else {}
    with torch.no_grad():
        before = start(**words).logits
        both = peft.PeftModel.from_pretrained(start, tmp_path / "adapter").eval()(**words).logits
        torch.testing.assert_close(both, merged_model(**words).logits, rtol=1e-4, atol=1e-5)
    assert (both - before).abs().max() > 1e-3


def test_adapters_that_do_not_stand_alone_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ENROLLED["gpt"].config
    for number, lora in enumerate((Lora(), Lora(rank=2, trained_parts=("tokens",)))):
        run = tmp_path / str(number)
        settings = to_dict(RunConfig(model=config, recipe=Recipe(lora=lora)))
        held = {"weights": {"tokens.weight": torch.ones(2)}}
        checkpoint.save(run / "checkpoints", checkpoint.Snapshot(1, held, {}, settings))
        assert main(["checkpoint", "export", str(run), str(tmp_path / "x"), "--adapter"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "recipe.lora.rank was 0" in said
    assert "learned more than its adapters: tokens" in said
    add_adapters(model := create(config), Lora(rank=2))
    with pytest.raises(ConfigError, match="has adapters"):
        save_pretrained(model, tmp_path / "x")
    save_pretrained(model, tmp_path / "x", weights=merged(model.state_dict(), Lora(rank=2), model))
