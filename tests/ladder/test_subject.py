"""What climbs: presets by their shortest words, and models of anybody's own."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.toy import TOY
from penstock.config.model import PRESETS, ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import DataConfig
from penstock.data.transform import load_function
from penstock.errors import ConfigError
from penstock.kernels import bias_activation, residual_norm
from penstock.ladder.own import Own
from penstock.ladder.rung import Setting
from penstock.ladder.rungs import all_rungs
from penstock.ladder.settings import LadderConfig
from penstock.ladder.subject import Configured
from penstock.planner.operators import Op

DEVICE = torch.device("cpu")


def _mse(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def _perceptron() -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, {"x": torch.ones(4, 8), "y": torch.zeros(4, 1), "note": "kept"}, _mse


def _own(factory: Any = _perceptron) -> Own:
    return Own(factory, "mine", LadderConfig(), DEVICE)


def test_the_train_command_is_one_that_train_takes() -> None:
    from penstock.config.load import load
    from penstock.config.run import RunConfig

    subject = Configured(LadderConfig(model=PRESETS["vit-b16"]), DEVICE)
    model = replace(PRESETS["vit-b16"], classifier="pooled", layer_scale=1e-5)
    plan = Plan.parse("precision=O1 optimizer=fused micro_batch=16")
    words = shlex.split(subject.train_command(Setting(model=model, plan=plan)))
    assert words[:3] == ["penstock", "train", "vit-b16"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    overrides = {key.removeprefix("--"): value for key, value in options.items()}
    made = load(RunConfig, overrides={"model": words[2], **overrides})
    assert made.model == model
    assert made.plan == plan


def test_batches_are_real_images_of_the_models_size() -> None:
    config = ViTConfig(image_size=24, patch_size=8, width=32, depth=1, heads=2, mlp_width=64, classes=12)
    subject = Configured(LadderConfig(model=config, batch=4), DEVICE)
    first = next(subject.batches(subject.first, 0))
    again = next(subject.batches(subject.first, 0))
    other = next(subject.batches(subject.first, 1))
    assert first.images.shape == (4, 3, 24, 24)
    assert first.images.std() > 0.1
    torch.testing.assert_close(first.images, again.images)
    assert list(first.ids) != list(other.ids)


def test_a_model_of_ones_own_is_built_from_the_seeds_weights() -> None:
    subject = _own()
    built = subject.build(subject.first, 3)
    again = subject.build(subject.first, 3)
    other = subject.build(subject.first, 4)
    for (name, one), two, three in zip(
        built.model.named_parameters(), again.model.parameters(), other.model.parameters(), strict=True
    ):
        assert one is not two
        assert torch.equal(one, two), name
        assert not torch.equal(one, three), name


def test_a_factory_that_returns_one_model_every_time_is_never_trained_itself() -> None:
    model, batch, loss = _perceptron()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    subject = _own(lambda: (model, batch, loss))
    built = subject.build(subject.first, 0)
    built.step([next(subject.batches(subject.first, 0))])
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_a_batch_grows_where_its_samples_are_known() -> None:
    subject = _own()
    assert subject.situation(TOY).splittable
    larger = replace(subject.first, plan=replace(subject.first.plan, micro_batch=12))
    batch = next(subject.batches(larger, 0))
    assert batch["x"].shape == (12, 8)
    assert batch["y"].shape == (12, 1)
    assert batch["note"] == "kept"
    assert subject.workload(larger).samples == 12
    assert subject.model_flops(larger) == 3 * subject.model_flops(subject.first)


def test_a_loss_that_counts_its_targets_is_traced_and_trained() -> None:
    def summed(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return _mse(model, batch) * len(batch["x"]), len(batch["x"])

    means, sums = _own(), _own(lambda: (*_perceptron()[:2], summed))
    assert sums.model_flops(sums.first) == means.model_flops(means.first)
    losses = []
    for subject in (means, sums):
        torch.manual_seed(0)
        losses.append(subject.build(subject.first, 0).step([next(subject.batches(subject.first, 0))]).loss)
    torch.testing.assert_close(*losses)


def test_a_batch_whose_tensors_disagree_is_left_alone() -> None:
    def factory() -> tuple[nn.Module, Any, Any]:
        model, batch, loss = _perceptron()
        return model, {**batch, "weights": torch.ones(3)}, loss

    assert not _own(factory).situation(TOY).splittable


def test_what_a_factory_must_return_is_said() -> None:
    with pytest.raises(ConfigError, match=r"mine returned Linear, but must return three things"):
        _own(lambda: nn.Linear(1, 1))


def test_a_foreign_transformer_offers_what_its_family_can() -> None:
    transformers = pytest.importorskip("transformers")

    def factory() -> tuple[nn.Module, Any, Any]:
        config = transformers.ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16,
            patch_size=8, num_labels=4,
        )  # fmt: skip
        model = transformers.ViTForImageClassification(config)
        batch = {"pixel_values": torch.zeros(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
        return model, batch, lambda model, batch: model(**batch).loss

    situation = _own(factory).situation(TOY)
    assert {"plain", "sdpa"} <= set(situation.switches["attention"])
    assert situation.switches["token_order"] == ("batch_first",)


def test_a_foreign_encoder_is_forecast_without_what_its_plan_leaves_out() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=400
    )
    mask = (torch.arange(16) < torch.tensor([[16], [4], [6], [6]])).long()
    labels = torch.full((4, 16), -100)
    labels[:, 1:3] = 7

    def factory() -> tuple[nn.Module, Any, Any]:
        batch = {"input_ids": torch.ones(4, 16, dtype=torch.long), "attention_mask": mask, "labels": labels}
        return transformers.BertForMaskedLM(config), batch, lambda model, batch: model(**batch).loss

    subject = _own(factory)
    situation = subject.situation(TOY)
    assert situation.switches["loss"] == ("whole", "chunked")
    assert situation.switches["padding"] == ("keep", "remove")
    assert situation.padding_share == pytest.approx(0.5)

    def products(**changes: str) -> dict[str, int]:
        """Rows that products have: forward, by their columns."""
        setting = replace(subject.first, plan=replace(subject.first.plan, **changes))
        every = [op for _, op in subject.workload(setting).operators() if op.kind == "gemm" and op.forward]
        assert all(op.flops > 0 for op in every)
        return {f"{op.k} to {op.n}": op.m for op in every}

    plain = {"32 to 32": 64, "32 to 64": 64, "64 to 32": 64, "32 to 400": 64}
    assert products() == plain
    assert products(padding="remove")["32 to 64"] == 32
    chunked = products(loss="chunked")
    assert chunked["32 to 64"] == 64
    assert chunked["32 to 400"] == 8  # of the tokens that have labels
    both = replace(subject.first, plan=replace(subject.first.plan, padding="remove", loss="chunked"))
    assert subject.model_flops(both) == subject.model_flops(subject.first)


def test_fused_operators_of_a_foreign_model_are_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """BERT's norms of sums and activations with their biases, each as one operator that moves fewer bytes; a name that
    fits nowhere changes nothing, for a Plan that has it is refused when it is built."""
    for module in (residual_norm, bias_activation):  # nothing needs to be compiled
        monkeypatch.setattr(module, "library", lambda: None)
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
    tokens = torch.ones(4, 16, dtype=torch.long)

    def subject_of_model(name: str, **more: int) -> Own:
        config = getattr(transformers, f"{name}Config")(**sizes, **more)
        model = getattr(transformers, f"{name}Model")(config)
        return _own(lambda: (model, {"input_ids": tokens}, lambda m, b: m(**b).last_hidden_state.mean()))

    def listed(subject: Own, line: str) -> list[Op]:
        setting = replace(subject.first, plan=Plan.parse(f"micro_batch=4 {line}"))
        return [op for _, op in subject.workload(setting).operators()]

    bert = subject_of_model("Bert", hidden_size=32, intermediate_size=64)
    plain = listed(bert, "")
    for line, name, count, elements in (
        ("fuse=residual_norm", "add_norm", 4, 4 * 16 * 32),
        ("fuse=bias_activation", "bias_activation", 2, 4 * 16 * 64),
    ):
        fused = listed(bert, line)
        assert sum(op.read + op.written for op in fused) < sum(op.read + op.written for op in plain)
        for direction in ("", "_gradient"):
            own = [op for op in fused if op.name == f"{name}{direction}"]
            assert [op.elements for op in own] == [elements] * count
            assert {op.kind for op in own} == {"norm" if name == "add_norm" else "activation"}
    assert {op.function for op in own} == {"fused_gelu"}
    gpt2 = subject_of_model("GPT2", n_embd=32, n_layer=2, n_head=2)
    assert listed(gpt2, "fuse=residual_norm") == listed(gpt2, "")


def test_a_factory_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somewhere_mine.py").write_text("def factory():\n    return 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/usr/lib"])
    assert load_function("somewhere_mine:factory", "factory")() == 7
    with pytest.raises(ConfigError, match="has no function 'other'"):
        load_function("somewhere_mine:other", "factory")
    with pytest.raises(ConfigError, match=r"nowhere_at_all of the factory .* cannot be imported"):
        load_function("nowhere_at_all:factory", "factory")


def test_attention_of_any_model_that_calls_torchs_can_be_switched() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            return nn.functional.scaled_dot_product_attention(q, k, v)

    def factory() -> tuple[nn.Module, Any, Any]:
        return Attends(), torch.randn(4, 2, 5, 8), lambda model, batch: model(batch).square().mean()

    subject = _own(factory)
    assert {"plain", "math", "flash", "sdpa"} <= set(subject.switches["attention"])
    assert _own().switches["attention"] == ()
    plain = replace(subject.first, plan=replace(subject.first.plan, attention="plain"))
    losses = [
        subject.build(setting, 0).step([next(subject.batches(setting, 0))]).loss
        for setting in (subject.first, plain)
    ]
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("batch", [None, 2])
def test_text_climbs_at_its_models_task_with_its_own_vocabulary(batch: int | None) -> None:
    model = PRESETS["gpt-tiny"]
    subject = Configured(LadderConfig(model=model, batch=batch), DEVICE)
    assert subject.first.model == model
    assert subject.first.plan.micro_batch == batch or 1024 // 128
    seen = next(subject.batches(subject.first, 0))
    again = next(subject.batches(subject.first, 0))
    tokens = seen.inputs[0]
    assert tokens.shape == (subject.first.plan.micro_batch, 128)
    assert torch.equal(tokens, again.inputs[0])
    assert subject.workload(subject.first).tokens == 128
    built = subject.build(replace(subject.first, plan=replace(subject.first.plan, loss="chunked")), 0)
    assert float(built.step([seen]).loss) == pytest.approx(math.log(model.vocabulary), rel=0.1)


def test_rungs_of_text_say_where_they_do_not_apply() -> None:
    rungs = {rung.name: rung for rung in all_rungs()}
    text = Configured(LadderConfig(model=PRESETS["gpt-tiny"], batch=1), DEVICE)
    here = text.situation(TOY)
    assert rungs["loss-chunked"].refusal(text.first, here) is None
    assert "no token of its batches is padding" in str(rungs["padding"].refusal(text.first, here))
    padded = replace(here, padding_share=0.3)
    assert "does not have" in str(rungs["padding"].refusal(text.first, padded))
    bert = Setting(model=PRESETS["bert-tiny"], plan=Plan())
    assert rungs["padding"].refusal(bert, padded) is None
    assert "reads text" in str(rungs["classifier"].refusal(text.first, here))
    own = _own()
    for name in ("loss-chunked", "padding"):
        assert "the model" in str(rungs[name].refusal(own.first, own.situation(TOY)))


def test_batches_of_similar_lengths_have_less_padding_and_are_predicted_so(tmp_path: Path) -> None:
    rows = [f"{'word ' * (1 + number % 12)}\t{'wort ' * (1 + number % 12)}" for number in range(400)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["source\ttarget", *rows]), encoding="utf-8")
    data = DataConfig(source=f"pairs:{tmp_path / 'pairs.tsv'}")
    model = replace(PRESETS["marian-tiny"], vocabulary=264)
    subject = Configured(LadderConfig(model=model, batch=8, data=data, task="translation"), DEVICE)
    rung = next(rung for rung in all_rungs() if rung.name == "length-groups")
    situation = subject.situation(TOY)
    assert rung.refusal(subject.first, situation) is None
    grouped = rung.apply(subject.first, situation)

    def padding(setting: Setting) -> float:
        batches = [next(subject.batches(setting, seed)).inputs for seed in range(8)]
        return 1 - sum(int(i[2].sum()) for i in batches) / sum(i[0].numel() for i in batches)

    assert padding(grouped) < padding(subject.first) - 0.1
    assert subject.padding_share == pytest.approx(padding(subject.first), abs=0.1)
    assert subject.workload(grouped).model_flops < 0.95 * subject.workload(subject.first).model_flops
    assert subject.train_command(grouped).endswith("--data.group_by_length true")
    data = replace(data, group_by_length=True)
    by_length = Configured(LadderConfig(model=model, batch=8, data=data, task="translation"), DEVICE)
    assert "already" in str(rung.refusal(by_length.first, by_length.situation(TOY)))


def test_the_batch_that_is_timed_is_as_long_as_the_mean(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "word " * (1 + number % 40)}) for number in range(2000)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    data = DataConfig(source=f"text:{tmp_path}", packed=False)
    model = replace(PRESETS["gpt-tiny"], sequence=256, vocabulary=264)  # type: ignore[call-arg]
    subject = Configured(LadderConfig(model=model, batch=2, data=data), DEVICE)
    full = subject._fullness(subject.first)
    mean = full.model.tokens * full.real
    two = replace(subject.first, plan=replace(subject.first.plan, accumulate=2))
    worst = 0.0
    for seed in range(8):
        chosen = subject.typical(two, seed)
        assert len(chosen) == 2
        for batch in chosen:
            assert batch.inputs[0].shape[1] == pytest.approx(full.model.tokens, rel=0.15)
            assert batch.tokens / 2 == pytest.approx(mean, rel=0.25)
        worst = max(worst, abs(next(subject.batches(two, seed)).tokens / 2 / mean - 1))
    assert worst > 0.4
    whole = Configured(LadderConfig(model=PRESETS["vit-digits"], batch=2), DEVICE)
    (chosen,) = whole.typical(whole.first, 0)
    assert chosen.ids.tolist() == next(whole.batches(whole.first, 0)).ids.tolist()


@pytest.mark.parametrize("preset", ["gpt-tiny", "bert-tiny"])
def test_packed_samples_are_worth_the_text_that_they_hold(tmp_path: Path, preset: str) -> None:
    lines = [json.dumps({"text": "word " * (1 + number % 9)}) for number in range(2000)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    data = DataConfig(source=f"text:{tmp_path}", packed=False)
    model = replace(PRESETS[preset], sequence=64, vocabulary=264)  # type: ignore[call-arg]
    subject = Configured(LadderConfig(model=model, batch=16, data=data), DEVICE)
    rung = next(rung for rung in all_rungs() if rung.name == "packed")
    situation = subject.situation(TOY)
    assert rung.refusal(subject.first, situation) is None
    packed = rung.apply(subject.first, situation)

    def real(setting: Setting) -> float:
        batches = subject.batches(setting, 0)
        return sum(next(batches).tokens for _ in range(64)) / 64 / 16

    assert subject.worth(subject.first) == 1.0
    assert subject.worth(packed) == pytest.approx(real(packed) / real(subject.first), rel=0.03)
    assert real(packed) == 64
    assert subject.samples(packed) == 16 * subject.worth(packed)
    assert "--data.packed false" in subject.train_command(subject.first)
    assert "--data.packed" not in subject.train_command(packed)
    by_length = next(rung for rung in all_rungs() if rung.name == "length-groups")
    assert by_length.refusal(subject.first, situation) is None
    assert "equally long" in str(by_length.refusal(packed, situation))
    usual = Configured(LadderConfig(model=model, batch=16, data=replace(data, packed=True)), DEVICE)
    share = 1 - 64 / 64 / subject.worth(packed)
    said = str(rung.refusal(usual.first, usual.situation(TOY)))
    assert re.search(r"packed already; with one document per sample \d\d% would be padding", said)
    assert usual.unpacked_padding == pytest.approx(share, abs=0.05)
    images = Configured(LadderConfig(model=PRESETS["vit-digits"]), DEVICE)
    assert "not continuous text" in str(rung.refusal(images.first, images.situation(TOY)))


@pytest.mark.sweep
def test_a_preset_climbs_at_the_task_of_its_job_or_the_one_asked_for() -> None:
    pytest.importorskip("num2words")
    config = LadderConfig(model=PRESETS["marian-tiny"], batch=2)
    for asked, name in (("auto", "Translation"), ("span_corruption", "SpanCorruption")):
        subject = Configured(replace(config, task=asked), DEVICE)  # type: ignore[arg-type]
        assert type(subject._task).__name__ == name
        assert ("--task" in subject.train_command(subject.first)) == (asked != "auto")
