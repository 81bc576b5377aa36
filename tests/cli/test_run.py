"""`penstock run`: a script's own world is as plain Python makes it, and errors are shown as Python shows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from penstock.cli import app, before_script, main


def _python(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=300,
        env={**os.environ, **environment},
    )  # fmt: skip


# No torch: what a script's world looks like takes no seconds to import.
LOOK = """\
import json, os, sys
import beside
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "main": sys.modules["__main__"].__dict__ is globals(),
    "path": sys.path[0], "cached": __cached__, "loader": type(__loader__).__name__,
    "package": __package__, "beside": beside.x, "optimized": __debug__, "torch": "torch" in sys.modules,
}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inner = tmp_path / "project"
    inner.mkdir()
    (inner / "look.py").write_text(LOOK, encoding="utf-8")
    (inner / "beside.py").write_text("x = 1\n", encoding="utf-8")
    return tmp_path


def test_a_file_sees_what_plain_python_shows_it(folder: Path) -> None:
    line = ("project/look.py", "--precision", "16", "-m", "--", "x y", "--help")
    plain = _python(*line, folder=folder)
    run = _python("-m", "penstock", "run", "--precision", "O2", *line, folder=folder)
    assert plain.returncode == run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == json.loads(plain.stdout)
    assert run.stderr.startswith("penstock: nothing was accelerated: the script did not import torch;")


def test_a_module_sees_what_plain_python_shows_it(folder: Path) -> None:
    line = ("-m", "look", "--lr", "3")
    plain = _python(*line, folder=folder / "project")
    run = _python("-m", "penstock", "run", *line, folder=folder / "project")
    assert plain.returncode == run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == json.loads(plain.stdout)


def test_an_archive_runs_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = tmp_path / "app.pyz"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", "import sys; print(__name__, len(sys.argv))")
    assert main(["run", str(archive), "a"]) == 0
    assert capsys.readouterr().out == "__main__ 2\n"


def test_this_process_is_as_before(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = list(sys.argv), list(sys.path), list(sys.meta_path), sys.modules["__main__"]
    assert main(["run", str(folder / "project" / "look.py")]) == 0
    assert (list(sys.argv), list(sys.path), list(sys.meta_path), sys.modules["__main__"]) == before
    sys.modules.pop("beside", None)


@pytest.mark.parametrize(
    ("body", "code"),
    [("", 0), ("import sys; sys.exit(7)", 7), ("raise SystemExit", 0), ("import sys; sys.exit('no')", 1)],
)
def test_the_exit_code_is_the_scripts(tmp_path: Path, body: str, code: int) -> None:
    (tmp_path / "s.py").write_text(body, encoding="utf-8")
    run = _python("-m", "penstock", "run", "s.py", folder=tmp_path)
    assert run.returncode == code
    told, *others = run.stderr.splitlines()
    assert told.startswith("penstock: nothing was accelerated: the script did not import torch;")
    assert others == ["no"] * ("no" in body)


@pytest.mark.parametrize("body", ["def f():\n    1 / 0\nf()\n", "x = (\n", "import nothing_of_this_name\n"])
def test_tracebacks_are_pythons_own(tmp_path: Path, body: str) -> None:
    (tmp_path / "s.py").write_text(body, encoding="utf-8")
    plain = _python("s.py", folder=tmp_path)
    run = _python("-m", "penstock", "run", "s.py", folder=tmp_path)
    assert (run.returncode, run.stderr) == (plain.returncode, plain.stderr)


def test_the_environment_that_a_script_sets_before_torch_counts(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\nprint(torch.get_num_threads())\n",
        encoding="utf-8",
    )
    run = _python(
        "-m", "penstock", "run", "s.py", folder=tmp_path, OMP_NUM_THREADS="2", PENSTOCK_PRECISION="O2"
    )
    assert run.stdout == "1\n"
    assert run.stderr.startswith("penstock: nothing was accelerated: the script made no optimizer")


def test_the_level_may_come_from_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "s.py"
    script.write_text("import torch\n", encoding="utf-8")
    monkeypatch.setenv("PENSTOCK_PRECISION", "01")
    assert main(["run", str(script)]) == 2
    told = capsys.readouterr().err
    assert "begins with a zero" in told
    assert str(script) not in told  # not the script's mistake
    assert main(["run", "--precision", "O0", str(script)]) == 0  # what is typed goes first
    monkeypatch.setenv("PENSTOCK_PRECISION", "O0")
    assert main(["run", str(script)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([], "Say what to run"),
        (["nowhere.py"], "no script 'nowhere.py'"),
        (["--option", "loss_scale", "s.py"], "--option 'loss_scale' is not a setting"),
        (["--option", "nonsense=1", "s.py"], "nonsense is no property"),
        (["--option", "norms=half", "s.py"], "contradicts weights='fp32'"),
        (["--option", "loss_scale=-1", "s.py"], "finite number above 0"),
    ],
)
def test_mistakes_end_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: list[str], words: str
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("s.py").write_text("import torch\n", encoding="utf-8")
    assert main(["run", *line]) == 2
    assert words in capsys.readouterr().err


def test_options_reach_the_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "s.py"
    script.write_text(
        "import torch\nm = torch.nn.Linear(2, 1)\no = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "m(torch.ones(1, 2)).sum().backward()\no.step()\n",
        encoding="utf-8",
    )
    options = ["--option", "loss_scale=512", "--option", "norms=half", "--option", "autocast=false"]
    assert main(["run", "--precision", "O2", *options, str(script)]) == 0
    told = capsys.readouterr().err
    assert (
        told.count("penstock: O2 in bf16: weights bf16, compute bf16, norms bf16, fp32 master weights") == 1
    )
    assert "loss scale 512.0" in told


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (["run", "a.py", "--dtype", "x"], ["run", "--", "a.py", "--dtype", "x"]),
        (["run", "--dtype", "bf16", "a.py", "b"], ["run", "--dtype", "bf16", "--", "a.py", "b"]),
        (["run", "--dtype=bf16", "-m", "a.b", "-x"], ["run", "--dtype=bf16", "-m", "--", "a.b", "-x"]),
        (["tune", "--round_seconds", "1", "a.py"], ["tune", "--round_seconds", "1", "--", "a.py"]),
        (["run", "--", "a.py"], ["run", "--", "a.py"]),
        (["run", "--help"], ["run", "--help"]),
        (["run"], ["run"]), (["train", "vit-s16"], ["train", "vit-s16"]), ([], []),
    ],
)  # fmt: skip
def test_what_follows_the_script_is_the_scripts(tokens: list[str], found: list[str]) -> None:
    assert before_script(tokens) == found


def test_options_with_values_are_known() -> None:
    """The list by which the script's name is found must not fall behind the verb."""
    from dataclasses import fields
    from inspect import signature

    from penstock.cli import _WITH_VALUE
    from penstock.cli.run import run
    from penstock.cli.tune import tune
    from penstock.ladder.settings import TuneConfig

    for verb, name in ((run, "run"), (tune, "tune")):
        keywords = {n for n, p in signature(verb).parameters.items() if p.kind is p.KEYWORD_ONLY}
        if "config" in keywords:
            keywords |= {field.name for field in fields(TuneConfig)}
        named = {f"--{word.replace('_', '-')}" for word in keywords - {"config", "module", "all_", "strict"}}
        assert named == set(_WITH_VALUE[name])


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    out = capsys.readouterr().out
    assert "PENSTOCK_PRECISION" in out
    assert app["run"].name == ("run",)
