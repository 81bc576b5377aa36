"""`penstock generate`: prompts from where they come, texts and JSON where they go."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch

from helpers.generation import tiny
from penstock.cli import app, main
from penstock.cli.generate import MOST, input_texts
from penstock.data.text.chat import PLAIN
from penstock.data.text.open import found_in
from penstock.data.text.tokenizers import Bytes
from penstock.errors import DataError
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


@pytest.fixture(scope="module")
def chatting(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a chat template."""
    path = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(folder, path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": PLAIN}))
    return path


def _numbers(chatting: Path, *turns: tuple[str, str]) -> list[int]:
    """Tokens of a conversation by the template, up to the assistant's next answer."""
    words = found_in(chatting)
    assert words is not None
    end = words.spelled()["eos_token"]
    text = "".join(f"<|{role}|>\n{said}{end}\n" for role, said in turns) + "<|assistant|>\n"
    return words.encode_marked([text])[0][0].tolist()


def test_a_chat_answers_by_the_template(chatting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = Generator(chatting)
    told = ("system", "Be short.")
    prompts = [_numbers(chatting, told, ("user", text)) for text in ("ab", "c")]
    assert (
        generator.conversation(
            [{"role": "system", "content": "Be short."}, {"role": "user", "content": "ab"}]
        )
        == (prompts[0])
    )
    expected = generator.generate(prompts, max_tokens=9)
    words = ["generate", str(chatting), "--chat", "--system", "Be short.", "--max_tokens", "9"]
    assert main([*words, "ab", "c", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["prompt"], tuple(line["ids"])) for line in lines] == [
        ("ab", expected[0].ids),
        ("c", expected[1].ids),
    ]
    assert main([*words, "ab"]) == 0
    assert capsys.readouterr().out == expected[0].text + "\n"


def test_lines_typed_into_a_terminal_are_one_conversation(
    chatting: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = io.StringIO("ab\n\nc\n")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", typed)
    assert main(["generate", str(chatting), "--chat", "--max_tokens", "9"]) == 0
    generator = Generator(chatting)
    first = generator.generate(_numbers(chatting, ("user", "ab")), max_tokens=9)[0].text
    turns = [("user", "ab"), ("assistant", first), ("user", "c")]
    second = generator.generate(_numbers(chatting, *turns), max_tokens=9)[0].text
    assert capsys.readouterr().out == f"> {first}\n> > {second}\n> \n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["MODEL", "a", "--chat"], "no chat template"),
        (["MODEL", "a", "--system", "b"], "add --chat"),
        ([], "Say which model"),
        (["MODEL", "a", "--file", "b"], "not both"),
        (["MODEL", "a", "--beams", "0"], "between 1 and 256"),
        (["MODEL"], "no text"),
    ],
)
def test_what_is_missing_is_told(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    given = [str(folder) if word == "MODEL" else word for word in words]
    assert main(["generate", *given]) == 2
    assert said in capsys.readouterr().err


def test_a_pipe_is_read_as_a_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In UTF-8 whatever the locale says, and completely; a line ends only where a file's does."""
    raw = "\ufeffone\u2028 line\x0c\r\ntwo – é\n".encode()
    (tmp_path / "texts").write_bytes(raw)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="ascii"))
    assert input_texts((), None) == input_texts((), tmp_path / "texts") == ["one\u2028 line\x0c", "two – é"]
    for wrong, why in ((b"a\xff", "byte 1 is 0xff"), (b"a" * (MOST + 1), "has more than 67,108,864 bytes")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(wrong)))
        with pytest.raises(DataError, match=why):
            input_texts((), None)


def test_stop_texts_are_taken_as_they_are_typed(folder: Path) -> None:
    """Also spaces, commas and ends of lines, and several of them; other lists are cut, and may be given again too."""
    from penstock.cli.generate import generate
    from penstock.cli.train import train

    def stops(*words: str) -> tuple[str, ...]:
        options = [one for word in words for one in ("--stop", word)]
        _, bound, _ = app.parse_args(
            ["generate", str(folder), *options], exit_on_error=False, print_error=False
        )
        return generate.read(bound.args, dict(bound.kwargs)).decoding.stop  # type: ignore[attr-defined, no-any-return]

    assert stops(" x") == (" x",)
    assert stops("b,c", "\n", " ", "--end") == ("b,c", "\n", " ", "--end")
    assert stops() == ()
    _, bound, _ = app.parse_args(
        ["train", "--data.columns", "a, b", "--data.columns", "c"], exit_on_error=False
    )
    assert train.read(bound.args, dict(bound.kwargs)).data.columns == ("a", "b", "c")  # type: ignore[attr-defined]
