"""Exports, each run by what it is for."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch

import penstock
from penstock.cli import main
from penstock.data.text.tokenizers import Bytes
from penstock.errors import ConfigError, NumericError
from penstock.infer import export as module
from penstock.infer.export import export, exported, inputs_of
from penstock.models.anatomy import set_attention

SMALL = {"width": 32, "depth": 2, "heads": 2, "mlp_width": 64}


def folder(name: str, where: Path) -> Path:
    """A small model of a family with random weights."""
    torch.manual_seed(0)
    model = penstock.PRESETS[name]
    if isinstance(model, penstock.ViTConfig):
        config = dataclasses.replace(model, **SMALL, image_size=32, patch_size=8, classes=5)
    elif isinstance(model, penstock.Seq2SeqConfig):
        sides = {side: dataclasses.replace(getattr(model, side), **SMALL) for side in ("encoder", "decoder")}
        config = dataclasses.replace(model, vocabulary=Bytes.size, sequence=48, decoder_sequence=48, **sides)
    else:
        config = dataclasses.replace(model, **SMALL, kv_heads=None, vocabulary=Bytes.size, sequence=48)
    words = where / "words"
    words.mkdir()
    Bytes().save(words)
    penstock.save_pretrained(penstock.create(config), where / name, beside=words)
    return where / name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-tiny", "bert-tiny", "marian-tiny", "vit-s16"])
def test_onnx_gives_what_the_model_gives(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        path, difference = export(folder(name, tmp_path), tmp_path / "out", "onnx")
    assert difference < 1e-5
    model = penstock.from_pretrained(tmp_path / name).eval()
    session = onnxruntime.InferenceSession(str(path))
    for sizes in ((1, 2, 2), (4, 30, 20)):
        given = inputs_of(model, *sizes)
        found = session.run(["outputs"], {key: value.numpy() for key, value in given.items()})[0]
        with torch.inference_mode():
            torch.testing.assert_close(torch.from_numpy(found), model(*given.values()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama-tiny", "bert-tiny"])
def test_torchs_exported_program_takes_any_size(name: str, tmp_path: Path) -> None:
    model = penstock.from_pretrained(folder(name, tmp_path)).eval()
    set_attention(model, "sdpa")
    program = exported(model).module()
    for sizes in ((1, 2, 2), (5, 40, 3)):
        given = inputs_of(model, *sizes).values()
        torch.testing.assert_close(program(*given), model(*given))


@pytest.mark.slow
def test_the_command_writes_a_program_that_torch_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = folder("vit-s16", tmp_path)
    assert main(["export", str(where), str(tmp_path / "out"), "--to", "torch"]) == 0
    assert "outputs within" in capsys.readouterr().out
    assert torch.export.load(tmp_path / "out" / "model.pt2") is not None


def test_an_export_that_differs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE", -1.0)
    with pytest.raises(NumericError, match="other outputs than the model"):
        export(folder("llama-tiny", tmp_path), tmp_path / "out", "torch")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        export(tmp_path / "empty", tmp_path / "out", "onnx")
