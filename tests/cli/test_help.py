"""Help pages of verbs: each begins with all that the verb's docstring says, and its examples are right."""

from __future__ import annotations

import inspect
import shlex
import subprocess
import sys
from typing import Any

import pytest

from penstock.cli import _CHECKPOINT_VERBS, _VERBS, GREETING, app, before_script, main
from penstock.cli._help import unwrapped

LINES = {(verb,): line for verb, line in _VERBS.items()}
LINES |= {("checkpoint", verb): line for verb, line in _CHECKPOINT_VERBS.items()}


def _flat(text: str) -> str:
    return " ".join(text.split())


def test_the_page_of_each_verb_begins_with_its_docstring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words, line in LINES.items():
        command: Any = app
        for word in words:
            command = command[word]
        text = (inspect.getdoc(command.default_command) or "").partition("\n\nParameters\n")[0]
        assert _flat(text.partition("\n\n")[0]) == line, f"{words}: the list of verbs says something else"
        assert main([*words, "--help"]) == 0
        usage, page = capsys.readouterr().out.split("\n\n", 1)
        assert usage.startswith(f"Usage: penstock {' '.join(words)} ")
        assert _flat(page).startswith(_flat(text)), f"{words}: {page}"
        examples = [shown for shown in text.splitlines() if shown.startswith("    penstock ")]
        assert set(examples) <= set(page.splitlines())
        for example in examples:
            app.parse_args(before_script(shlex.split(example)[1:]), exit_on_error=False, print_error=False)


def test_train_lists_ten_options_and_all_of_them_where_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    pages = []
    for word in ("--help", "--help-all", "--help"):
        assert main(["train", word]) == 0
        pages.append(capsys.readouterr().out)
    short, full, again = pages
    assert short == again
    # After a short page the parser knows all options again.
    app.parse_args(["train", "--recipe.patience", "3"], exit_on_error=False, print_error=False)
    listed = [line for line in short.splitlines() if line.startswith(("│ --", "│ MODEL"))]
    assert len(listed) == 11, listed
    for option in ("--data", "--from", "--epochs", "--steps", "--lr", "--batch-size", "--plan", "--config"):
        assert any(option in line for line in listed), option
    assert "`penstock train --help-all` lists all of them" in _flat(short)
    assert "--recipe.patience" not in short
    assert all(option in full for option in ("--recipe.patience", "--seed", "--no-resume", "--track"))
    assert full.index("Most needed") < full.index("--seed"), "they come first there too"


def test_the_list_of_verbs_has_one_line_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    capsys.readouterr()
    assert main(["--help"]) == 0
    page = _flat(capsys.readouterr().out.replace("│", " "))
    for verb, line in _VERBS.items():
        assert f"{verb} {line}" in page
    assert "tells schedulers" not in page


def test_paragraphs_and_descriptions_are_unwrapped_and_examples_are_not() -> None:
    examples = "\n\n    go far\n    go wide\n\n"
    doc = (
        f"Go.\n\nFar\nand wide:{examples}Parameters\n----------\nfar\n    As far\n    as that.\nwide\n    So."
    )
    plain = f"Go.\n\nFar and wide:{examples}Parameters\n----------\nfar\n    As far as that.\nwide\n    So."
    assert unwrapped(doc) == plain
    assert unwrapped(plain) == plain


# The greeting of the bare command.


def test_the_bare_command_greets_with_four_things_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    assert told == f"{GREETING}\n"
    assert [line.split()[1] for line in told.splitlines() if line.startswith("  penstock ")] == [
        "train", "tune", "ladder", "plan",
    ]  # fmt: skip
    assert all(len(line) <= 80 for line in told.splitlines())


def test_the_greeting_loads_as_little_as_help_does() -> None:
    program = "import sys; from penstock.cli import main; main([]); print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert loaded.isdisjoint({"torch", "numpy"})
