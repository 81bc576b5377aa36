"""Vectors, captions and translations of a model of images and texts, and the commands that show them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from helpers.images import encoded, photo
from penstock.cli import main
from penstock.config.model import MultimodalConfig
from penstock.config.run import DataConfig
from penstock.config.stack import Stack
from penstock.data.text.tokenizers import Bytes
from penstock.errors import ConfigError, ExitCode
from penstock.infer.captions import Captioner
from penstock.infer.encode import Embedder, read_images
from penstock.models import create
from penstock.models.convert import save_pretrained
from penstock.tasks import Captioning
from penstock.train.prepare import write_beside

SIZES: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 32}
CONFIG = MultimodalConfig(
    image_size=8, patch_size=4, channels=1, features=8, vocabulary=Bytes.size, sequence=16, writer_sequence=16,
    contrast="sigmoid", vision=Stack(**SIZES), text=Stack(**SIZES), writer=Stack(**SIZES),
)  # fmt: skip
TEXTS = ["sieben", "ei", "./七"]
_NOT_LETTERS = tuple(f"{n}=-10000" for n in range(Bytes.size) if not (97 <= n < 123 or n == Bytes.end))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    torch.manual_seed(2)
    model = create(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5)
        letters = torch.zeros(Bytes.size, 1).index_fill_(0, torch.arange(97, 123), 1.0)
        model.tokens.weight.mul_(0.05 + letters)  # what is written are letters
    save_pretrained(model, made)
    Bytes().save(made)
    (made / "images").mkdir()
    for seed in range(4):
        (made / "images" / f"{seed}.png").write_bytes(encoded(photo(8, 8, seed), "PNG"))
    return made


def _greedy(model: Any, given: dict[str, Any], language: str, steps: int) -> str:
    said = [Bytes.begin, *f"{language}: ".encode()]
    opened = len(said)
    with torch.no_grad():
        while len(said) - opened < steps:
            logits = model(target=torch.tensor([said]), **given)["head"]
            newest = int(logits[0, -1].argmax())
            if newest == Bytes.end:
                break
            said.append(newest)
    return Bytes().decode(said[opened:])


def test_captions_and_translations_are_the_likeliest_tokens(folder: Path) -> None:
    captioner = Captioner(folder)
    model, paths = captioner.model, sorted((folder / "images").iterdir())
    images = read_images(model, paths)
    expected = [_greedy(model, {"images": one[None]}, "de", 6) for one in images]
    assert captioner.caption(paths, "de", max_tokens=6) == expected
    assert len(set(expected)) > 1
    rows = [[*Bytes().frame().before, *text.encode(), *Bytes().frame().behind] for text in TEXTS]
    given = [{"source": torch.tensor([row]), "lengths": torch.tensor([len(row)])} for row in rows]
    assert captioner.translate(TEXTS, "fr", max_tokens=6) == [_greedy(model, one, "fr", 6) for one in given]
    with pytest.raises(ConfigError, match="leaves no room for a text"):
        captioner.caption(paths, "a language of many words")
    with pytest.raises(ConfigError, match=r"A text has \d+ tokens, but the model reads 16"):
        captioner.translate(["far too long a text for this"], "fr")


def test_a_language_that_training_did_not_have_is_refused(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("num2words")
    source = Captioning().open(DataConfig(source="captions:en,de"), CONFIG, "val")
    write_beside(CONFIG, source, tmp_path / "beside")
    trained = shutil.copytree(folder, tmp_path / "trained")
    values = [json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "beside")]
    (trained / "config.json").write_text(json.dumps(values[0] | values[1]))
    captioner = Captioner(trained)
    for language in ("de", "en"):
        assert len(captioner.translate(["sieben"], language, max_tokens=2)) == 1
    with pytest.raises(
        ConfigError, match=r"'fr' is not a language of this model\. Its languages are (de, en|en, de)\."
    ):
        captioner.translate(["sieben"], "fr")


def _log_probability(model: Any, given: dict[str, Any], language: str, text: str, steps: int) -> float:
    """That of a text, and of its end where it is shorter than `steps`."""
    opened, said = [Bytes.begin, *f"{language}: ".encode()], [*text.encode()]
    said += [Bytes.end] * (len(said) < steps)
    with torch.no_grad():
        logits = model(target=torch.tensor([[*opened, *said]]), **given)["head"][0, len(opened) - 1 : -1]
    return float(logits.log_softmax(-1)[torch.arange(len(said)), said].sum())


def test_beams_find_likelier_texts(folder: Path) -> None:
    captioner = Captioner(folder)
    paths = sorted((folder / "images").iterdir())
    how: dict[str, Any] = {"max_tokens": 4, "length_penalty": 0.0, "bias": _NOT_LETTERS}
    greedy, searched = (captioner.caption(paths, "de", beams=beams, **how) for beams in (1, 8))
    given = [{"images": one[None]} for one in read_images(captioner.model, paths)]
    scores = [
        [_log_probability(captioner.model, one, "de", text, 4) for one, text in zip(given, texts)]
        for texts in (greedy, searched)
    ]
    assert all(more >= less - 1e-4 for less, more in zip(*scores))
    assert sum(scores[1]) > sum(scores[0]) + 0.01


def test_vectors_of_both_sides_are_those_of_the_heads(folder: Path) -> None:
    with Embedder(folder, batch=2) as embedder:
        paths = sorted((folder / "images").iterdir())
        images = read_images(embedder.model, paths)
        with torch.no_grad():
            made = embedder.model(images=images)["image_vector"]
        torch.testing.assert_close(embedder.embed_images(paths), F.normalize(made[:, :8], dim=1))
        frame = Bytes().frame()
        for text, vector in zip(TEXTS, embedder.embed(TEXTS)):
            row = torch.tensor([[*frame.before, *text.encode(), *frame.behind]])
            with torch.no_grad():
                one = embedder.model(source=row, lengths=torch.tensor([row.shape[1]]))["text_vector"]
            torch.testing.assert_close(vector, one[0, :8])
            assert float(one[0, 8]) == 1.0


def test_the_commands_find_show_and_write(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, images, grid = str(folder), str(folder / "images"), tmp_path / "grid.png"
    assert main(["retrieve", model, "--text", "seven", "--text", "acht", "--images", images, "--best", "3",
                 "--grid", str(grid)]) == 0  # fmt: skip
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["seven"] * 3 + ["acht"] * 3
    assert [float(row[1]) for row in rows[:3]] == sorted((float(row[1]) for row in rows[:3]), reverse=True)
    with Image.open(grid) as drawn, Image.open(rows[0][2]) as best:
        assert drawn.size == (3 * 68 - 4, 2 * 68 - 4)
        grey = best.convert("L")
        assert [drawn.getpixel((8 * x, 0)) for x in range(8)] == [grey.getpixel((x, 0)) for x in range(8)]
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    one = f"{images}/0.png"
    assert (
        main(["retrieve", model, "--image", one, "--texts", str(tmp_path / "texts.txt"), "--best", "9"]) == 0
    )
    assert sorted(line.split("\t")[2] for line in capsys.readouterr().out.splitlines()) == sorted(TEXTS)
    assert main(["retrieve", model, "--image", one, "--images", images, "--best", "1"]) == 0
    assert capsys.readouterr().out == f"{one}\t1.0000\t{one}\n"
    assert main(["embed", model, "--image", one, "--image", f"{images}/1.png"]) == 0
    assert [len(json.loads(line)) for line in capsys.readouterr().out.splitlines()] == [8, 8]
    assert main(["generate", model, "--image", one, "--label", "de", "--max_tokens", "4"]) == 0
    assert len(capsys.readouterr().out) > 2
    assert main(["generate", model, "sieben", "--label", "fr", "--max_tokens", "2"]) == 0
    (short,) = Captioner(folder).translate(["sieben"], "fr", max_tokens=2)
    assert capsys.readouterr().out == f"{short}\n"
    assert short != Captioner(folder).translate(["sieben"], "fr")[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["retrieve", "MODEL", "--text", "seven"], "Say what to find"),
        (["retrieve", "MODEL", "--text", "a", "--image", "b", "--images", "c"], "Say what to find"),
        (["retrieve", "MODEL", "--text", "a", "--images", "b", "--texts", "c"], "Say what to find"),
        (["retrieve", "MODEL", "--text", "a", "--texts", "c", "--grid", "d.png"], "texts are searched here"),
        (["retrieve", "MODEL", "--text", "seven", "--images", "EMPTY"], "There are no images in"),
        (["embed", "MODEL", "text", "--image", "a.png"], "not both"),
        (["generate", "MODEL", "--image", "a.png"], "Say in which language to write"),
        (["generate", "MODEL", "a", "--label", "de", "--temperature", "1"], "leave decoding.temperature out"),
        (["generate", "MODEL", "a", "--label", "de", "--top-k", "5"], "leave decoding.top_k out"),
        (["generate", "MODEL", "a", "--label", "de", "--weights", "int8"], "leave --weights out"),
        (["generate", "MODEL", "a", "--label", "de", "--json"], "leave --chat and --json out"),
        (["export", "MODEL", "EMPTY", "--head", "kind"], "no head 'kind'; its heads are image_vector,"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    given = [{"MODEL": str(folder), "EMPTY": str(tmp_path)}.get(word, word) for word in words]
    assert main(given) == int(ExitCode.CONFIG)
    assert said in " ".join(capsys.readouterr().err.split())
