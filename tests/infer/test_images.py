"""Images from a model that denoises: the same alone and beside others, guided as the formula says, one expert at a
time."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.toy import TOY
from penstock.cli import main
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.config.stack import Stack
from penstock.errors import ConfigError
from penstock.infer.images import ImageGenerator
from penstock.infer.pictures import grid_of, pixels_of, png
from penstock.infer.samplers import even_times, guide
from penstock.models import create
from penstock.models.convert import save_pretrained
from penstock.planner.describe import totals
from penstock.planner.prediction import predict_pass
from penstock.tasks.noise import ranges_of


def read(file: Path | bytes) -> np.ndarray[Any, Any]:
    with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
        return np.array(image)


SMALL = {"width": 32, "depth": 2, "heads": 2, "mlp_width": 48}


def made(name: str = "ddigits-tiny", **changes: Any) -> Any:
    """A model with weights that are drawn anew, so that none is 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = create(replace(PRESETS[name], **SMALL, **changes))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def noise(seed: int, count: int) -> torch.Tensor:
    """The noise from which images are made."""
    chances = [np.random.default_rng([seed, number]) for number in range(count)]
    return torch.from_numpy(np.stack([each.standard_normal((1, 8, 8), np.float32) for each in chances]))


@pytest.fixture(scope="module", params=["mlp", "block"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model with an expert for each third of the times, and its folder."""
    model = made("ddigits-moe-tiny", experts=3, experts_in=request.param)
    folder = tmp_path_factory.mktemp("mixture")
    save_pretrained(model, folder)
    return model, folder


def test_an_image_depends_on_its_number_and_label_alone() -> None:
    model, labels = made(), ["3", 5, None, 3, "9"]
    for sampler, eta in (("dpm", 0.0), ("ddim", 1.0)):
        how: dict[str, Any] = {"sampler": sampler, "eta": eta, "steps": 4, "guidance": 2.0, "seed": 7}
        together = ImageGenerator(model).sample(labels, **how)
        assert together.shape == (5, 1, 8, 8)
        torch.testing.assert_close(ImageGenerator(model, batch=2).sample(labels, **how), together)
        torch.testing.assert_close(ImageGenerator(model).sample(labels[:2], **how), together[:2])
        assert not torch.equal(together[0], together[3])
        other = ImageGenerator(model).sample(labels, **{**how, "seed": 8})
        assert not torch.equal(other, together)


def test_a_step_is_the_models_own_output_guided(mixture: tuple[Any, Path]) -> None:
    model, _ = mixture
    generator = ImageGenerator(model)
    found = generator.sample([1, 2], sampler="ddim", steps=1, guidance=3.0, clip=0.0, seed=4)
    x, times = noise(4, 2), torch.ones(2, dtype=torch.float64)
    with torch.no_grad():
        own, none = (
            model(x, times, classes, ranges_of(times, 3))
            for classes in (torch.tensor([1, 2]), torch.full((2,), 10))
        )
    expected, _ = generator.schedule.to_x0_eps("v", guide(own, none, 3.0), x, times)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)
    clipped = generator.sample([1, 2], sampler="ddim", steps=1, guidance=3.0, seed=4)
    torch.testing.assert_close(clipped, expected.float().clamp(-1, 1), rtol=1e-4, atol=1e-4)


def test_one_expert_is_loaded_at_a_time_and_images_stay_the_same(mixture: tuple[Any, Path]) -> None:
    model, folder = mixture
    whole, alone = ImageGenerator(model), ImageGenerator(folder, batch=3)
    how: dict[str, Any] = {"steps": 7, "guidance": 1.5}
    expected = whole.sample(list(range(10)), **how)
    torch.testing.assert_close(alone.sample(list(range(10)), **how), expected, rtol=1e-3, atol=1e-3)
    assert alone.opened == 3  # of 7 steps, and four batches in each
    some, every = alone.bytes
    part = ".blocks." if model.config.experts_in == "block" else ".mlp."
    mixed = sum(value.numel() for name, value in model.named_parameters() if part in name)
    assert every - some == pytest.approx(4 * mixed * 2 / 3, rel=0.01)
    # A step runs the model without experts, whose FLOPs the planner's tests hold to torch's.
    dense, one = totals(made().config), totals(alone._model(1.0)[0].config)
    assert (one.model_flops, one.parameters) == (dense.model_flops, dense.parameters)
    assert some == 4 * dense.parameters
    # Each step asks for the range that its time was in at training.
    for t in even_times(7)[:-1]:
        assert whole._model(t)[1] == int(ranges_of(torch.tensor([t]), 3))
    assert whole.opened == 0


def test_the_predicted_time_is_that_of_the_passes_of_one_expert(mixture: tuple[Any, Path]) -> None:
    def passed(batch: int) -> float:
        return predict_pass(made().config, TOY, Plan(micro_batch=batch))

    alone = ImageGenerator(mixture[1], batch=4)
    assert alone.predict_seconds(10, TOY, steps=7) == pytest.approx(7 * (2 * passed(4) + passed(2)))
    guided = alone.predict_seconds(3, TOY, steps=2, guidance=1.5)
    assert guided == pytest.approx(2 * passed(6))  # those with and without a condition together
    assert alone.predict_seconds(4, TOY) == 20 * passed(4)


def test_texts_are_labels_of_a_model_that_reads_them() -> None:
    model = made(classes=0, text=Stack(width=32, depth=1, heads=2, mlp_width=32), sequence=8)
    generator = ImageGenerator(model)
    found = generator.sample(["seven", None, "one"], steps=2)
    torch.testing.assert_close(generator.sample(["seven"], steps=2)[0], found[0], rtol=1e-4, atol=1e-4)
    other = generator.sample(["three", None, "one"], steps=2)
    assert not torch.equal(other[0], found[0])
    torch.testing.assert_close(other[1:], found[1:], rtol=1e-4, atol=1e-4)
    weighed = generator.sample(["seven", None, "one"], steps=2, word_weights=("seven=3",))
    assert not torch.allclose(weighed[0], found[0], atol=1e-4)
    torch.testing.assert_close(weighed[1:], found[1:], rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="reads no texts whose words could have weights"):
        ImageGenerator(made()).sample([3], steps=1, word_weights=("seven=3",))
    # Guided away from the empty text, whose tokens are fewer.
    guided = generator.sample(["seven", "one"], sampler="ddim", steps=1, guidance=3.0, clip=0.0, seed=4)
    x, times = noise(4, 2), torch.ones(2, dtype=torch.float64)
    with torch.no_grad():
        own, none = (
            model(images=x, times=times, **generator._arguments(labels))
            for labels in (["seven", "one"], [None, None])
        )
    expected, _ = generator.schedule.to_x0_eps("v", guide(own, none, 3.0), x, times)
    torch.testing.assert_close(guided, expected.float(), rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="longest"):
        generator.sample(["many letters"], steps=1)


def test_models_that_predict_noise_start_where_it_says_something() -> None:
    for predicts in ("eps", "x0"):
        for schedule in ("cosine", "linear", "flow"):
            found = ImageGenerator(made(predicts=predicts, schedule=schedule)).sample([0], steps=3)
            assert found.isfinite().all()
            assert found.abs().max() <= 1.0 + 1e-6


def test_what_cannot_be_sampled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not denoise; .* `penstock train ddigits-tiny`"):
        ImageGenerator(create(replace(PRESETS["vit-digits"], **SMALL)))
    save_pretrained(create(replace(PRESETS["gpt-tiny"], **SMALL)), tmp_path)
    with pytest.raises(ConfigError, match="does not denoise"):
        ImageGenerator(tmp_path)
    generator = ImageGenerator(made())
    with pytest.raises(ConfigError, match=r"'10' is not a class of this model\. Its classes are 0, 1, 2"):
        generator.sample(["10"])
    with pytest.raises(ConfigError, match="no labels"):
        generator.sample([])
    with pytest.raises(ConfigError, match="only sampler ddim"):
        generator.sample([1], eta=0.5)
    free = ImageGenerator(made(classes=0))
    assert free.sample([None], steps=1).shape == (1, 1, 8, 8)
    with pytest.raises(ConfigError, match="leave label out"):
        free.sample([3])
    with pytest.raises(ConfigError, match="leave guidance at 1"):
        free.sample([None], guidance=2.0)


def test_pixels_go_into_files_as_they_are() -> None:
    images = torch.tensor([-2.0, -1.0, 0.0, 1.0]).view(4, 1, 1, 1).expand(4, 1, 8, 8)
    pixels = pixels_of(images)
    assert pixels[:, 0, 0, 0].tolist() == [0, 0, 128, 255]
    grey = read(png(pixels[3]))
    assert grey.shape == (8, 8)
    assert (grey == 255).all()
    colours = pixels_of(images.expand(4, 3, 8, 8))
    assert read(png(colours[3])).shape == (8, 8, 3)
    sheet = grid_of(pixels[:3], 2)
    assert sheet.shape == (2 * 64 + 4, 2 * 64 + 4, 1)
    assert sheet[:64, :64].max() == 0
    assert (sheet[68:, :64] == 128).all()
    assert (sheet[64:68] == 127).all()
    assert (sheet[68:, 68:] == 127).all()
    with pytest.raises(ConfigError, match="4 channels"):
        pixels_of(images.expand(4, 4, 8, 8))


def test_the_command_line_writes_a_grid_and_a_folder(
    mixture: tuple[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = mixture
    grid, out = tmp_path / "made" / "grid.png", tmp_path / "images"
    words = ["sample", str(folder), "--steps", "3", "--count", "2", "--seed", "5", "--guidance", "2"]
    assert main([*words, "--label", "3,7,3", "--grid", str(grid), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "6 images" in said
    assert f"steps of dpm: {grid} and {out}\n" in said
    assert "3 ranges of timesteps" in said
    expected = pixels_of(ImageGenerator(folder).sample([3, 3, 7, 7, 3, 3], steps=3, seed=5, guidance=2.0))
    assert (read(grid) == grid_of(expected, 2)[..., 0]).all()
    names = sorted(file.relative_to(out).as_posix() for file in out.rglob("*.png"))
    assert names == [*(f"3/0000{number}.png" for number in range(4)), "7/00000.png", "7/00001.png"]
    assert (read(out / "7" / "00000.png") == expected[2, ..., 0]).all()
    assert main([*words, "--grid", str(grid)]) == 0
    assert read(grid).shape == (10 * 64 + 9 * 4, 2 * 64 + 4)
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {str(number): f"digit {number}" for number in range(9)} | {"9": "digit_3"}
    named = tmp_path / "named"
    named.mkdir()
    (named / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (named / "config.json").write_text(json.dumps(config))
    words = ["sample", str(named), "--steps", "1", "--count", "1", "--label", "digit 3,digit_3"]
    assert main([*words, "--out", str(out)]) == 0
    assert (out / "digit_3" / "00000.png").is_file()
    assert (out / "digit_3_2" / "00000.png").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grid", "x.png"], "Say which model"),
        (["MODEL"], "Say where the images go"),
        (["MODEL", "--label", "11", "--grid", "x.png"], "'11' is not a class"),
        (["MODEL", "--steps", "0", "--grid", "x.png"], "at least 1"),
        (["MODEL", "--sampler", "heun", "--grid", "x.png"], "must be 'ddim', 'dpm' or 'euler'"),
    ],
)
def test_what_is_missing_is_named(
    words: list[str], said: str, mixture: tuple[Any, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(mixture[1]) if word == "MODEL" else word for word in words]
    assert main(["sample", *given]) == 2
    assert said in capsys.readouterr().err
