"""Denoising: noise that depends on samples alone, weights of regions and words, and runs of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.images import photo
from helpers.toy import desk
from penstock.build import build
from penstock.checkpoint import rewrite
from penstock.config.graph import NoiseKind, Target
from penstock.config.model import DiffusionConfig
from penstock.config.plan import Plan
from penstock.config.recipes import load_run, require_startable
from penstock.config.run import Augment, DataConfig, Recipe
from penstock.config.stack import Stack
from penstock.data import Loader
from penstock.data.images import PrepareImages
from penstock.data.source import ImageSource, Split
from penstock.errors import ConfigError, DataError
from penstock.infer.images import ImageGenerator
from penstock.models import Model, create
from penstock.models.block import ZeroLinear
from penstock.models.convert import from_pretrained
from penstock.models.experts import mixtures_of
from penstock.models.inputs import RunInputs
from penstock.tasks import Denoise
from penstock.tasks.denoise import NoisyBatch, texts_of, weights_of
from penstock.tasks.noise import NoiseSchedule
from penstock.train import train

TASK = Denoise()
SMALL = DiffusionConfig(
    image_size=8, patch_size=4, channels=1, width=16, depth=2, heads=2, mlp_width=16, classes=10, experts=2
)
TEXTS = replace(SMALL, experts=0, classes=0, sequence=8, text=Stack(width=16, depth=1, heads=2, mlp_width=16))


def stirred(config: DiffusionConfig) -> Model:
    """A model whose gates and head are not 0, as they are at first."""
    model = create(config).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, ZeroLinear):
                module.weight.normal_(std=0.3)
    return model


def batches(config: DiffusionConfig, count: int, *, training: bool = True, **more: Any) -> list[NoisyBatch]:
    source = TASK.open(DataConfig(source="digits"), config, "train" if training else "val")
    prepare = TASK.prepare(source, config, augment=Augment() if training else None, seed=3)
    with Loader(source, prepare, seed=3, endless=training, **more) as loader:
        return [batch for _, batch in zip(range(count), loader)]


def together(parts: list[NoisyBatch]) -> dict[str, Tensor]:
    names = (*SMALL.graph.arguments, "target")
    rows = [(*part.inputs, part.target) for part in parts]
    return {name: torch.cat([row[at] for row in rows]) for at, name in enumerate(names)}  # type: ignore[misc]


def test_noise_is_the_same_however_a_step_is_cut() -> None:
    whole = together(batches(SMALL, 2, batch=16))
    halves = [batches(SMALL, 4, batch=4, rank=rank, world=2) for rank in (0, 1)]
    dealt = together([part for pair in zip(*halves) for part in pair])
    for name, value in whole.items():
        assert torch.equal(value, dealt[name]), name


def test_noise_is_normal_times_are_even_and_some_classes_are_left_out() -> None:
    found = together(batches(SMALL, 4, batch=256))
    times, schedule = found["times"], NoiseSchedule("cosine")
    noisy, target = found["images"].double(), found["target"].double()
    clean, noise = schedule.to_x0_eps("v", target, noisy, times)
    assert clean.abs().max() < 1.001, "pixels are in [-1, 1]"
    assert abs(noise.mean()) < 0.02
    assert noise.std() == pytest.approx(1.0, abs=0.02)
    assert noise.pow(4).mean() == pytest.approx(3.0, abs=0.15)
    assert noise.flatten(1).corrcoef().fill_diagonal_(0).abs().max() < 0.75
    assert torch.histc(times, 64, 0, 1).max() <= 18, "16 of 1,024 fall into each 64th"
    assert torch.equal(found["routes"], (times >= 0.5).long())
    assert (found["classes"] == SMALL.classes).double().mean() == pytest.approx(0.1, abs=0.03)
    held = [together(batches(SMALL, 2, training=False, batch=size)) for size in (50, 50, 100)]
    assert (held[0]["classes"] < SMALL.classes).all()
    assert torch.equal(held[0]["images"], held[1]["images"])
    assert torch.equal(held[2]["images"][:100], held[0]["images"])


def test_regions_and_signal_weigh_errors() -> None:
    noisy = torch.randn(4, 1, 8, 8)
    plain = NoisyBatch((noisy,), torch.randn(4, 1, 8, 8))
    outputs = torch.randn(4, 1, 8, 8)
    squares = (outputs - plain.target) ** 2
    assert TASK.loss(outputs, plain) == pytest.approx(float(squares.mean()))
    marks = 1.0 + torch.rand(4, 1, 8, 8)
    assert TASK.loss(outputs, replace(plain, weights=marks)) == pytest.approx(float((marks * squares).mean()))
    (batch,) = batches(replace(SMALL, min_snr=5.0), 1, batch=32)
    assert batch.weights is not None
    times = together([batch])["times"]
    expected = NoiseSchedule("cosine").min_snr_weight("v", times, 5.0)
    torch.testing.assert_close(batch.weights[:, 0, 0, 0].double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("schedule", get_args(NoiseKind))
@pytest.mark.parametrize("predicts", get_args(Target))
def test_every_target_of_every_schedule_has_one_loss_of_the_sample(
    predicts: Target, schedule: NoiseKind
) -> None:
    """Whatever is predicted, the weighted loss is min(snr, 5) times the squared error of the sample."""
    config = replace(SMALL, predicts=predicts, schedule=schedule, experts=0, condition_dropout=0.0)
    (plain,), (weighed,) = batches(config, 1, batch=64), batches(replace(config, min_snr=5.0), 1, batch=64)
    assert plain.weights is None
    given: dict[str, Any] = dict(zip(config.graph.arguments, plain.inputs))
    noise = NoiseSchedule(schedule)
    x, times = given["images"].double(), given["times"]
    clean = noise.to_x0_eps(predicts, plain.target.double(), x, times)[0]
    # Times near an end lose digits where one of the factors nearly vanishes.
    middle = (times > 0.1) & (times < 0.9)
    source = TASK.open(DataConfig(source="digits"), config, "train")
    images = PrepareImages(source, image_size=8, classes=10, augment=Augment(crop_scale_min=1.0), seed=3)
    with Loader(source, images, seed=3, batch=64) as loader:
        pixels = next(loader).images
    torch.testing.assert_close(clean[middle].float(), pixels[middle], rtol=0, atol=1e-4)
    error = 0.1 * torch.randn_like(plain.target, dtype=torch.float64)
    output = weighed.target.double() + error
    wrong = noise.to_x0_eps(predicts, output, x, times)[0]
    at = noise.coefficients(times)
    snr = (at.alpha / at.sigma).square().clamp(max=5.0)
    expected = ((wrong - clean).square().flatten(1).mean(1) * snr).mean()
    torch.testing.assert_close(TASK.loss(output, weighed), expected, rtol=1e-5, atol=1e-6)
    assert TASK.loss(output, plain) == pytest.approx(float(error.square().mean()))
    built = build(replace(config, min_snr=5.0), Plan(micro_batch=64), recipe=Recipe(lr=3e-3), loss=TASK)
    losses = [float(built.step([weighed]).loss) for _ in range(8)]
    assert losses[-1] < losses[0]


def test_a_word_of_weight_two_is_seen_as_often_as_two() -> None:
    model = stirred(TEXTS)
    images, tokens, times = torch.randn(2, 1, 8, 8), torch.randint(0, 99, (2, 3)), torch.rand(2).double()
    lengths, weights = torch.tensor([3, 2]), torch.tensor([[1.0, 2.0, 1.0], [1.0, 1.0, 3.0]])
    with torch.no_grad():
        plain = model(images, tokens, times, lengths)
        alike = model(images, tokens, times, lengths, token_weights=torch.ones(2, 3))
        found = model(images, tokens, times, lengths, token_weights=weights)
        memory, x = model.text(model.embed(tokens[:1])), model.embed(images[:1], model.graph.inputs[0])
        condition = model.condition(times[:1])
        again = model.denoiser(x, RunInputs(memory=memory[:, [0, 1, 1, 2]], condition=condition))
        expected = model.pixels(again, model.graph.heads[0], condition)
    torch.testing.assert_close(alike, plain)
    torch.testing.assert_close(found[:1], expected)
    torch.testing.assert_close(found[1:], plain[1:])  # a weight of padding changes nothing
    assert not torch.allclose(found[:1], plain[:1])


def test_classes_and_their_names_are_conditions() -> None:
    model, images = stirred(replace(SMALL, experts=0)), torch.randn(1, 1, 8, 8)
    with torch.no_grad():
        made = [model(images, torch.tensor([t], dtype=torch.float64), torch.tensor([c])) for t, c in
                ((0.3, 1), (0.3, 2), (0.6, 1), (0.3, 10))]  # fmt: skip
        none = model(images, torch.tensor([0.3], dtype=torch.float64))
    assert not any(torch.allclose(made[0], other) for other in made[1:])
    assert torch.equal(made[3], none)
    (batch,) = batches(TEXTS, 1, batch=64)
    tokens, lengths = batch.inputs[1], batch.inputs[3]
    assert tokens is not None
    assert lengths is not None
    assert set(lengths.tolist()) == {1, 2}, "a digit, or nothing, behind a first token"
    assert (tokens[lengths == 2][:, 1] >= ord("0")).all()
    for changes, words in (({"sequence": 1}, "has 2 tokens; use 2"), ({"vocabulary": 99}, "use 362")):
        with pytest.raises(ConfigError, match=words):
            texts_of(replace(TEXTS, **changes).graph, tuple("0123456789"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="takes the time of each sample"):
        model(images)
    with pytest.raises(ConfigError, match="modulates norms before each branch"):
        replace(SMALL, norm_first=False)
    with pytest.raises(ConfigError, match=r"not a multiple of model\.patch_size"):
        replace(SMALL, image_size=9)


def _run(output: Path, **settings: Any) -> Any:
    small = {f"model.{name}": value for name, value in
             {"width": 16, "depth": 2, "heads": 2, "mlp_width": 16, "patch_size": 4}.items()}  # fmt: skip
    given = {
        "recipe.steps": 6, "plan.micro_batch": 16, "log_every": 2,
        "machine": desk(output.parent), **small, **settings,
    }  # fmt: skip
    return train(load_run(overrides={"output": str(output), **given}))


def test_a_run_goes_on_exactly_and_experts_begin_as_copies(tmp_path: Path) -> None:
    through = _run(tmp_path / "through", model="ddigits-tiny", checkpoint_every=3)
    stopped = tmp_path / "stopped"
    _run(stopped, model="ddigits-tiny", checkpoint_every=3)
    newest = sorted((stopped / "checkpoints").glob("step-*"))[-1]
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    again = _run(stopped, model="ddigits-tiny", checkpoint_every=3)
    assert again.resumed_at == 3
    assert again.loss == through.loss
    assert again.evaluation == through.evaluation
    dense = from_pretrained(through.export)
    experts = _run(
        tmp_path / "experts", model="ddigits-moe-tiny", init_from=str(through.export), **{"recipe.steps": 2}
    )
    model = from_pretrained(experts.export)
    assert [mixture.experts for mixture in mixtures_of(model)] == [2, 2]
    for mixture, block in zip(mixtures_of(model), dense.denoiser.blocks, strict=True):
        one, other = mixture.up.weight
        assert not torch.equal(one, other), "each learned from its half of the times"
        torch.testing.assert_close(one, block.mlp.up.weight, rtol=0, atol=0.02)


def _marked(folder: Path, *, classes: tuple[str, ...] = ("red apple", "apple", "blue")) -> tuple[Path, Path]:
    """Grey images, of which every second one has itself as its mark, in another folder."""
    for name in classes:
        (folder / "images" / name).mkdir(parents=True)
        (folder / "marks" / name).mkdir(parents=True)
        for number in range(11):
            photo(30, 24, seed=number).convert("L").save(folder / "images" / name / f"{number}.png")
            if number % 2:
                photo(30, 24, seed=number).convert("L").save(folder / "marks" / name / f"{number}.png")
    return folder / "images", folder / "marks"


@pytest.mark.parametrize("split", ["train", "val"])
def test_regions_that_the_data_marks_weigh_more_wherever_an_image_is_flipped(
    split: Split, tmp_path: Path
) -> None:
    images, marks = _marked(tmp_path)
    config = replace(SMALL, classes=3)
    data = DataConfig(source=f"imagefolder:{images}", regions=str(marks), region_weight=4.0)
    source = TASK.open(data, config, split)
    made: dict[float | None, Any] = {}
    for gamma in (None, 5.0):
        model = replace(config, min_snr=gamma)
        prepare = TASK.prepare(source, model, augment=Augment() if split == "train" else None, seed=3)
        with Loader(source, prepare, seed=3, batch=len(source), endless=False) as loader:
            made[gamma] = next(loader)
    plain, times = made[None], dict(zip(config.graph.arguments, made[None].inputs))["times"]
    clean = NoiseSchedule("cosine").to_x0_eps("v", plain.target, plain.inputs[0], times.float())[0]
    weighed = plain.weights.flatten(1).amax(1) > 1
    assert 0 < weighed.sum() < len(source)
    expected = torch.where(weighed[:, None, None, None], 1 + 3 * (clean + 1) / 2, torch.ones(()))
    torch.testing.assert_close(plain.weights, expected, rtol=0, atol=1e-5)
    assert clean[weighed].std() > 0.1
    ratios = NoiseSchedule("cosine").min_snr_weight("v", times, 5.0).float().view(-1, 1, 1, 1)
    torch.testing.assert_close(made[5.0].weights, plain.weights * ratios)
    output = torch.randn_like(plain.target)
    found = float(((output - plain.target) ** 2 * expected).mean())
    assert TASK.loss(output, plain) == pytest.approx(found, rel=1e-5)


def test_marks_that_are_of_no_use_are_refused(tmp_path: Path) -> None:
    images, marks = _marked(tmp_path)
    data = DataConfig(source=f"imagefolder:{images}", regions=str(marks))
    more = {"data": data, "recipe.steps": 2, "model.classes": 3}
    assert _run(tmp_path / "run", model="ddigits-tiny", **more).evaluation is not None
    with pytest.raises(
        ConfigError, match=r"data\.regions is for models that learn to make images; leave it out"
    ):
        require_startable(replace(load_run(overrides={"model": "vit-digits"}), data=data))
    words = replace(data, regions=None, word_weights=("apple=2",))
    with pytest.raises(
        ConfigError, match=r"data\.word_weights is for models that learn to make images of texts"
    ):
        require_startable(replace(load_run(overrides={"model": "ddigits-tiny"}), data=words))
    with pytest.raises(ConfigError, match=r"marks images of a folder; use imagefolder:PATH, not 'digits'"):
        DataConfig(source="digits", regions=str(marks))
    with pytest.raises(DataError, match=r"nowhere does not exist or is no folder\. Check data\.regions"):
        TASK.open(replace(data, regions=str(tmp_path / "nowhere")), SMALL, "train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"for 'apple/0\.png' it would be 'apple/0\.png'"):
        TASK.open(replace(data, regions=str(tmp_path / "empty")), SMALL, "train")
    photo(24, 30).save(marks / "blue" / "1.png")
    source = TASK.open(data, SMALL, "train")
    assert isinstance(source, ImageSource)
    with pytest.raises(DataError, match=r"marks an image of 30 × 24 pixels, but has 24 × 30"):
        source.read(np.arange(len(source)))


def test_words_that_the_data_marks_get_more_attention() -> None:
    texts = ["red apple", "pineapple", "apple red"]
    graph = replace(TEXTS, sequence=16).graph
    found = weights_of(graph, texts, None, ["apple=3", "red=0.5"])
    first = [1] + [0.5] * 3 + [1] + [3] * 5
    assert found.tolist() == [first, [1] * 10, [1] + [3] * 5 + [1] + [0.5] * 3, [1] * 10]
    with pytest.raises(ConfigError, match=r"word_weights names 'pear=2', but no text has such a word"):
        weights_of(graph, texts, None, ["pear=2"])
    with pytest.raises(ConfigError, match=r"'<end> apple' spells a special token"):
        weights_of(graph, ["<end> apple"], None, ["apple=2"])
    with pytest.raises(ConfigError, match="reads no texts whose words"):
        weights_of(SMALL.graph, texts, None, ["apple=2"])
    with pytest.raises(ConfigError, match=r"must be a word and a factor above 0, as seven=2"):
        DataConfig(word_weights=("apple=0",))
    source = TASK.open(DataConfig(source="digits", word_weights=("7=3", "1=2")), TEXTS, "train")
    with Loader(source, TASK.prepare(source, TEXTS, augment=Augment(), seed=3), seed=3, batch=200) as loader:
        given: dict[str, Any] = dict(zip(TEXTS.graph.arguments, next(loader).inputs))
    tokens, weights = given["tokens"], given["token_weights"]
    expected = torch.where(tokens == ord("7"), 3.0, torch.where(tokens == ord("1"), 2.0, 1.0))
    assert torch.equal(weights, expected)
    assert set(weights.unique().tolist()) == {1.0, 2.0, 3.0}


def test_images_are_made_by_the_averaged_weights_of_a_run(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", model="ddigits-tiny", **{"recipe.ema_decay": 0.5})
    newest = rewrite.open_newest(tmp_path / "run")
    made = {}
    for kind in ("weights", "ema"):
        model = create(from_pretrained(run.export).config)
        model.load_state_dict(rewrite.read_weights(newest, kind))
        made[kind] = ImageGenerator(model.eval()).sample([3, 8], steps=2)
    for folder in (run.export, tmp_path / "run"):
        assert torch.equal(ImageGenerator(folder, weights="plain").sample([3, 8], steps=2), made["ema"])
    assert not torch.allclose(made["weights"], made["ema"], atol=1e-4)


def test_a_run_of_texts_reads_them_in_the_tokenizer_that_is_named(tmp_path: Path) -> None:
    """And so does what it is exported to: the numbers are words, with the token that ends a text behind them."""
    tokenizers, transformers = (pytest.importorskip(name) for name in ("tokenizers", "transformers"))
    names = ["<pad>", "</s>", "<unk>", *"0123456789"]
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: number for number, name in enumerate(names)}, "<unk>")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "words")
    text = {f"model.text.{name}": 16 for name in ("width", "mlp_width")}
    run = _run(
        tmp_path / "run", model="ddigits-tiny",
        **{"recipe.steps": 2, "model.classes": 0, "data.tokenizer": str(tmp_path / "words"), **text,
           "model.text.depth": 1, "model.text.heads": 2, "model.vocabulary": 16, "model.sequence": 4},
    )  # fmt: skip
    generator = ImageGenerator(run.export)
    found = generator._arguments(["7", None, "7 3"])
    assert found["tokens"].tolist() == [[10, 1, 0], [1, 0, 0], [10, 6, 1]]
    assert found["lengths"].tolist() == [2, 1, 3]
    assert generator.sample(["7", "3"], steps=2).shape == (2, 1, 8, 8)
    found = weights_of(generator.graph, ["7", "7 3"], generator._tokenizer, ["3=2"])
    assert found.tolist() == [[1, 1, 1], [1, 2, 1], [1, 1, 1]]
    # Weights to start from bring theirs.
    source = Denoise(str(run.export)).open(
        DataConfig(source="digits"), generator._model(0.5)[0].config, "val"
    )
    assert texts_of(generator.graph, ["7"], source.tokenizer)[0].tolist() == [[10, 1], [1, 0]]  # type: ignore[index,attr-defined]
