"""`penstock generate`: prompts from where they come, texts and JSON where they go."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from helpers.generation import tiny
from penstock.cli import main
from penstock.data.text.tokenizers import Bytes
from penstock.infer.generator import Generator
from penstock.models.convert import save_pretrained

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    save_pretrained(tiny("gpt", words=Bytes.size, dtype=torch.float32), found)
    Bytes().save(found)
    return found


def test_texts_come_from_the_line_a_file_or_a_pipe(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["generate", str(folder), "--max_tokens", "9", "--json"]
    expected = [each.ids for each in Generator(folder).generate(["ab", "c"], max_tokens=9)]
    (tmp_path / "texts").write_text("ab\n\nc\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\nc\n"))
    for more in (["ab", "c"], ["--file", str(tmp_path / "texts"), "--batch", "1"], []):
        assert main([*words, *more]) == 0
        told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [tuple(each["ids"]) for each in told] == expected
        assert [each["prompt"] for each in told] == ["ab", "c"]
    assert main([*words, "ab", "--decoding.beams", "2", "--best", "2", "--dtype", "bf16"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_one_text_is_told_as_it_comes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["generate", str(folder), "ab", "--max_tokens", "20", "--temperature", "1", "--seed", "4"]) == 0
    )
    expected = Generator(folder).generate("ab", max_tokens=20, temperature=1.0, seed=4)[0].text
    assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Say which model"),
        (["MODEL", "a", "--file", "b"], "not both"),
        (["MODEL", "a", "--beams", "0"], "between 1 and 256"),
        (["MODEL"], "no text"),
    ],
)
def test_what_is_missing_is_told(
    words: list[str],
    said: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    given = [str(folder) if word == "MODEL" else word for word in words]
    assert main(["generate", *given]) == 2
    assert said in capsys.readouterr().err
