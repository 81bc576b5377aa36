"""Quantised folders: they open anywhere as they were measured, in every family, and lose what they may."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.families import ENROLLED, batches, flat
from helpers.small_folders import every_digit, learn_digits
from penstock.compress.data import QuantiseData, points, task_data
from penstock.compress.quantise import candidates, quantise_folder, round_weight
from penstock.config.model import PRESETS, ModelConfig, with_stacks
from penstock.config.plan import Plan
from penstock.config.quantise import QuantiseOptions
from penstock.config.run import DataConfig
from penstock.config.stack import Stack
from penstock.errors import CheckpointError, ConfigError
from penstock.infer.load import loaded
from penstock.models import create
from penstock.models.convert import from_pretrained, save_pretrained
from penstock.models.convert.load import load_weights
from penstock.models.convert.pretrained import rounded_weights
from penstock.models.model import Model
from penstock.models.rounded import zero_points
from penstock.products.rounded import RoundedInt8
from penstock.products.stored import Stored, StoredExperts

RELOAD = """
import sys, torch
from pathlib import Path
from penstock.config.plan import Plan
from penstock.infer.load import loaded
torch.set_num_threads(1)
for folder in map(Path, sys.argv[1:]):
    model = loaded(folder, Plan(), weights="auto", tokenizer=None).model
    given = torch.load(folder / "given.pt", weights_only=True)
    with torch.inference_mode():
        torch.save(model(*given), folder / "found.pt")
"""


def opened(folder: Path, **more: Any) -> Any:
    return loaded(folder, Plan(), weights="auto", tokenizer=None, **more).model


def made(config: ModelConfig, folder: Path, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = create(config).eval()
    for parameter in model.parameters():
        if not parameter.any() and parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.05)  # the zeros by which diffusion models begin
    save_pretrained(model, folder)
    return model


WIDE: dict[str, Any] = {"width": 32, "mlp_width": 64}
"""Sizes that suit int4 as well."""


def wider(name: str) -> ModelConfig:
    def widened(stack: Stack) -> Stack:
        turned = stack.rotary and replace(
            stack.rotary, short=2 * stack.rotary.short, long=2 * stack.rotary.long
        )
        return replace(stack, **WIDE, rotary=turned)

    return with_stacks(ENROLLED[name].config, widened)


@pytest.mark.slow
def test_every_family_reopens_in_a_new_process_bit_by_bit(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folders, expected = [], []
    for number, name in enumerate(ENROLLED):
        config = ENROLLED[name].config if name == "pruned" else wider(name)
        form = "int8" if name == "pruned" else ("int8", "int4", "int8_weights")[number % 3]
        if name in ("vit moe", "switch", "marian"):
            form = "int8"
        made(config, tmp_path / name)
        given = [batches(config, step, 4)[:-1] for step in range(2)]
        options = QuantiseOptions(
            format=form,  # type: ignore[arg-type]
            inputs="static" if form == "int8" and number % 2 else "token",
            smooth=0.5 if number % 2 else 0.0,
            weights="gptq" if number % 4 == 0 else "mse",
        )
        folder = tmp_path / f"{name} in few bits"
        result = quantise_folder(tmp_path / name, folder, options, QuantiseData(lambda given=given: given))  # type: ignore[misc]
        model = opened(folder)
        forms = {part: one for part, one in model.named_modules() if isinstance(one, Stored | StoredExperts)}
        assert result.formats.keys() <= forms.keys(), "the others are packed"
        assert all(".blocks." in part and not part.endswith("router") for part in result.formats), name
        experts = any(run.stack.mixes for run in config.graph.runs)
        assert any(isinstance(one, StoredExperts) for one in forms.values()) == experts
        assert result.bytes_after < result.bytes_before
        with torch.inference_mode():
            found = flat(model(*given[0]))
            torch.save(given[0], folder / "given.pt")
            plain = from_pretrained(folder).eval()
            close = flat(plain(*given[0]))
            # Values of weights alone, against weights and inputs in few bits.
            error = float((found - close).float().std() / close.float().std())
        assert error < 0.15, (name, error)
        folders.append(folder)
        expected.append(found)
    subprocess.run([sys.executable, "-c", RELOAD, *map(str, folders)], check=True)
    for folder, found in zip(folders, expected, strict=True):
        assert torch.equal(flat(torch.load(folder / "found.pt", weights_only=True)), found), folder.name


def test_what_is_stored_is_what_was_asked_for(tmp_path: Path) -> None:
    config = wider("llama")
    model = made(config, tmp_path / "whole")
    (tmp_path / "whole" / "tokenizer_config.json").write_text("{}")
    said = json.loads((tmp_path / "whole" / "config.json").read_text())
    (tmp_path / "whole" / "config.json").write_text(json.dumps(said | {"eos_token_id": 3, "bos_token_id": 1}))
    result = quantise_folder(tmp_path / "whole", tmp_path / "small", QuantiseOptions(format="int8"))
    assert (result.before, result.after, result.lost) == (None, None, None)
    values = json.loads((tmp_path / "small" / "config.json").read_text())
    assert values["quantised"]["formats"] == result.formats
    assert values["quantised"]["options"]["format"] == "int8"
    assert (values["eos_token_id"], values["bos_token_id"]) == (3, 1)
    assert (tmp_path / "small" / "tokenizer_config.json").read_text() == "{}"
    assert set(values["quantised"]["kept"]) == {"head"}
    assert "outside the blocks" in values["quantised"]["kept"]["head"]
    weights = rounded_weights(tmp_path / "small")
    name = "decoder.blocks.0.mlp.up"
    whole = model.get_submodule(name).weight
    assert torch.equal(weights[name][1].numbers, round_weight(whole, "int8").numbers)
    # Values are weights like any others: they open, load, train and export.
    values_of = from_pretrained(tmp_path / "small")
    assert torch.equal(values_of.get_submodule(name).weight, weights[name][1].values())
    other = create(config)
    assert load_weights(other, tmp_path / "small").names == "penstock"
    assert torch.equal(other.get_submodule(name).weight, weights[name][1].values())
    assert not any(isinstance(one, RoundedInt8) for one in loaded(
        tmp_path / "small", Plan(), weights="plain", tokenizer=None
    ).model.modules())  # fmt: skip
    half = loaded(tmp_path / "small", Plan(precision="O3"), weights="auto", tokenizer=None).model
    assert isinstance(half.get_submodule(name), RoundedInt8)
    assert half(batches(config, 0, 2)[0]).dtype == torch.bfloat16


def test_least_error_is_less_than_that_of_the_largest() -> None:
    torch.manual_seed(0)
    weight = torch.distributions.StudentT(3.0).sample((16, 256))
    for form in ("int8", "int4"):
        plain, least = (round_weight(weight, form, least=how) for how in (False, True))  # type: ignore[arg-type]
        errors = [(one.values() - weight).square().view(16, -1).sum(1) for one in (plain, least)]
        assert bool((errors[1] <= errors[0] + 1e-6).all())
        # Of 256 inputs to a scale, cutting one off costs more than 8 bits gain.
        assert float(errors[1].sum()) < (1.001 if form == "int8" else 0.97) * float(errors[0].sum())


def test_zero_is_one_of_the_sixteen_numbers() -> None:
    """Also of groups that all lie to one side of it; and what is zero stays zero."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64) + torch.linspace(-3, 3, 64)[:, None]
    weight[:, ::5] = 0.0
    weight[3] = 0.0
    for least in (False, True):
        rounded = round_weight(weight, "int4", least=least)
        zeros = zero_points("linear", rounded)
        assert int(zeros.min()) >= 0
        assert int(zeros.max()) <= 15
        values = rounded.values()
        assert not values[weight == 0].any()
        assert len(zeros.unique()) > 8
        error = (values - weight).square().mean(1).sqrt() / rounded.scales.mean(1)
        # Half a step at most but at the ends: 0.29 of one, and where `least` cuts ends off, more there.
        assert float(error[torch.arange(64) != 3].max()) < (1.0 if least else 0.4)


def test_wrong_folders_and_options_are_refused_by_name(tmp_path: Path) -> None:
    made(wider("gpt"), tmp_path / "whole")
    quantise_folder(tmp_path / "whole", tmp_path / "small", QuantiseOptions(format="int8"))
    with pytest.raises(ConfigError, match="was quantised before"):
        quantise_folder(tmp_path / "small", tmp_path / "twice", QuantiseOptions(format="int8"))
    with pytest.raises(ConfigError, match="run the model on data"):
        quantise_folder(tmp_path / "whole", tmp_path / "x", QuantiseOptions(format="int8", smooth=0.5))
    with pytest.raises(ConfigError, match=r"quantise\.drop needs a score"):
        quantise_folder(
            tmp_path / "whole", tmp_path / "x", QuantiseOptions(format="int8", drop=0.5), QuantiseData(list)
        )
    with pytest.raises(ConfigError, match="nothing is quantised"):
        quantise_folder(tmp_path / "whole", tmp_path / "x", QuantiseOptions())
    with pytest.raises(ConfigError, match="int4 leaves inputs as they are"):
        QuantiseOptions(format="int4", inputs="static")
    made(replace(PRESETS["gpt-tiny"], width=24, heads=2, mlp_width=40, vocabulary=16), tmp_path / "narrow")
    with pytest.raises(ConfigError, match=r"No linear layer .* int4 .*multiples of 32 and 16"):
        quantise_folder(tmp_path / "narrow", tmp_path / "x", QuantiseOptions(format="int4"))
    file = tmp_path / "small" / "config.json"
    values = json.loads(file.read_text())
    formats: dict[str, Any] = values["quantised"]["formats"]
    name = next(iter(formats))
    for broken, words in (
        ({"formats": formats | {"head": "int8"}}, "names other linear layers"),
        (
            {"formats": {other: form for other, form in formats.items() if other != name}},
            "names other linear layers",
        ),
        ({"formats": formats | {name: "int4"}}, "but its weight has 8 bits"),
        ({"formats": formats | {name: 7}}, "but its weight has 8 bits"),
        ({"formats": list(formats)}, "names other linear layers"),
        ({}, "names other linear layers"),
        ([], "names other linear layers"),
    ):
        file.write_text(json.dumps(values | {"quantised": broken}))
        with pytest.raises(CheckpointError, match=words):
            opened(tmp_path / "small")


def with_outliers(folder: Path, target: Path) -> None:
    """The same function, with some features of every norm 50 times as large."""
    model: Any = from_pretrained(folder)
    with torch.no_grad():
        for block in model.encoder.blocks:
            for norm, linear in ((block.norm1, block.attention.qkv), (block.norm2, block.mlp.up)):
                for parameter in norm.parameters():
                    parameter[:3] *= 50
                linear.weight[:, :3] /= 50
    save_pretrained(model, target)


@pytest.mark.slow
def test_outliers_collapse_a_scale_for_all_and_smoothing_recovers(tmp_path: Path) -> None:
    """Scored on all 1,797 digits, of which one is 0.06 points."""
    learn_digits(tmp_path / "digits")
    with_outliers(tmp_path / "digits", tmp_path / "outliers")
    images, classes = every_digit()

    def score(model: nn.Module) -> float:
        return 100 * float((logits(model).argmax(1) == classes).double().mean())

    data = replace(task_data(tmp_path / "outliers", DataConfig()), score=score)

    def logits(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return model(images)  # type: ignore[no-any-return]

    plain = logits(from_pretrained(tmp_path / "digits").eval())
    whole = from_pretrained(tmp_path / "outliers").eval()
    torch.testing.assert_close(logits(whole), plain, rtol=1e-4, atol=1e-4)
    before = score(whole)
    assert before > 85

    def quantised(**options: Any) -> tuple[float, float]:
        wanted = QuantiseOptions(format="int8", inputs="static", limit="absmax", **options)
        result = quantise_folder(tmp_path / "outliers", tmp_path / "small", wanted, data)
        model = opened(tmp_path / "small")
        assert result.after is not None
        assert score(model) == result.after
        return before - result.after, float((logits(model) - plain).std() / plain.std())

    lost, error = quantised()
    recovered, small = quantised(smooth=0.5)
    assert recovered <= 0.2, "measured 0.06"
    assert error > 4 * small, "measured 8 times"
    assert lost > 1, "measured 5.2"

    # With a bound, what hurts stays; and where nothing is good enough, the model stays.
    result = quantise_folder(
        tmp_path / "outliers", tmp_path / "bound",
        QuantiseOptions(format="int8", inputs="static", limit="absmax", drop=0.2), data,
    )  # fmt: skip
    assert result.lost is not None
    assert result.lost <= 0.2
    assert 0 < len(result.formats) < 8
    assert any("would lose more than 0.2 points" in reason for reason in result.kept.values())
    assert score(opened(tmp_path / "bound")) == result.after


def test_a_model_that_loses_too_much_whatever_stays_is_written_as_it_was(tmp_path: Path) -> None:
    model = made(wider("gpt"), tmp_path / "whole")
    plain = [one.clone() for one in model.state_dict().values()]

    def score(module: nn.Module) -> float:
        return -100.0 * any(isinstance(one, RoundedInt8) for one in module.modules())

    data = QuantiseData(lambda: [batches(model.config, 0, 2)[:1]], score)
    result = quantise_folder(
        tmp_path / "whole", tmp_path / "same", QuantiseOptions(format="int8", drop=0.5, smooth=0.5), data
    )
    assert not result.formats
    assert result.lost == 0.0
    assert set(candidates(model, "int8")[0]) <= set(result.kept)
    assert not rounded_weights(tmp_path / "same")
    found = from_pretrained(tmp_path / "same").state_dict().values()
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@pytest.mark.parametrize(("timed", "rows"), [(None, 18), (1, 6)])
def test_layers_that_are_slower_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed: int | None, rows: int
) -> None:
    config = wider("llama")
    made(config, tmp_path / "whole")
    asked = []

    def seconds(ways: Any, rows: int, features: int) -> list[float]:
        asked.append((rows, features, ways[1].out_features))
        return [1.0, 1.5 if features == 64 else 0.5]

    monkeypatch.setattr("penstock.compress.quantise.seconds_of", seconds)
    data = QuantiseData(lambda: [(batches(config, 0, 3)[0],)], timed=timed)
    result = quantise_folder(
        tmp_path / "whole", tmp_path / "small", QuantiseOptions(format="int8", speed=True), data
    )
    slow = {
        name for name, reason in result.kept.items() if f"1.50 times as long here for {rows} rows" in reason
    }
    assert slow == {f"decoder.blocks.{number}.mlp.down" for number in (0, 1)}
    assert len(asked) == len(set(asked)) == 4
    assert not slow & set(result.formats)


def test_experts_that_no_calibration_sample_reaches(tmp_path: Path) -> None:
    config = wider("experts of blocks")
    model = made(config, tmp_path / "whole")
    given = dict(zip(model.graph.arguments, batches(config, 0, 4)))
    data = QuantiseData(lambda: [(*(given | {"routes": torch.zeros(4, dtype=torch.int64)}).values(),)])
    names = [f"{model.graph.runs[0].name}.blocks.{number}.mlp.up" for number in (1, 2)]
    static = QuantiseOptions(format="int8", inputs="static")
    result = quantise_folder(tmp_path / "whole", tmp_path / "static", static, data)
    assert [name in result.formats for name in names] == [True, False]
    assert "no calibration sample" in result.kept[names[1]]
    by_error = QuantiseOptions(format="int8_weights", weights="gptq")
    assert names[1] in quantise_folder(tmp_path / "whole", tmp_path / "gptq", by_error, data).formats


def test_points_are_shares_or_percents_of_perplexity() -> None:
    assert points({"top1": 0.75, "loss": 2.0}) == 75.0
    assert points({"accuracy": 0.5, "f1": 0.9}) == 50.0
    assert points({"loss": 2.0, "perplexity": 7.4}) - points({"loss": 2.01}) == pytest.approx(1.0)
