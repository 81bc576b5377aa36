"""What is published: wheel and source archive, the citation, and the container's recipe.

Where no container can be built, the recipe is read word for word: its instructions, and that what it copies and
installs is there. Its commands for Python run in an environment of their own, without a network. The wheel is built of
the files that it copies, and of no others.
"""

from __future__ import annotations

import email
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import penstock
from penstock.cli import app

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert str(citation["version"]) == penstock.__version__
    assert citation["license"] == PROJECT["license"]


def _instructions() -> list[tuple[str, str]]:
    """Each instruction of the Dockerfile with its words; comments left out, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)
    ]


def test_the_dockerfile_names_only_what_is_there() -> None:
    found = _instructions()
    assert {word for word, _ in found} <= {
        "ARG", "FROM", "ENV", "RUN", "COPY", "USER", "WORKDIR", "ENTRYPOINT",
    }  # fmt: skip
    names = [word for word, _ in found]
    assert names.index("FROM") == 1, "only ARG may come before FROM"
    arguments = {rest.partition("=")[0] for word, rest in found if word == "ARG"}
    set_here = {word.partition("=")[0] for name, rest in found if name == "ENV" for word in rest.split()}
    for word, rest in found:
        assert set(re.findall(r"\$\{?(\w+)", rest)) <= arguments | set_here | {"PATH"}, f"{word} {rest}"
        if word == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)
    verbs = {*app}
    for command in re.findall(
        r"^# *(docker .*)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
    ):
        words = shlex.split(command, comments=True)
        for name in (words[at + 1] for at, word in enumerate(words) if word == "--build-arg"):
            assert name.partition("=")[0] in arguments, command
        image = next(
            (at for at, word in enumerate(words) if word == "penstock" and words[1] == "run"), len(words)
        )
        assert {*words[image + 1 : image + 2]} <= verbs, command
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for rest in (rest for word, rest in found if word == "COPY"):
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored, f"the builder does not see {source}"


def test_the_dockerfile_runs_as_a_user_that_it_made() -> None:
    steps = " ".join(rest for word, rest in _instructions() if word == "RUN")
    made = re.search(r"useradd (.*?) (\w+) &&", steps)
    assert made is not None
    # The images of Ubuntu, unlike Debian's, have a user 1000.
    assert {"--create-home", "--non-unique"} <= {*made[1].split()}
    said = dict(_instructions())
    assert said["USER"] == made[2]
    assert f"chown {made[2]} {said['WORKDIR']}" in steps
    extras = re.search(r"/src\[([\w,]+)\]", steps)
    assert extras is not None
    assert {*extras[1].split(",")} <= PROJECT["optional-dependencies"].keys()
    assert "pypi.org" in steps, "the index of torch's builds has not every version that is pinned"
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert re.search(r"^torch==[\d.]+$", pinned, re.MULTILINE), (
        "a suffix would name one build for all machines"
    )


@pytest.mark.parametrize("fails", ["", "pull", "build", "run"])
def test_the_image_is_built_where_docker_reaches_a_registry(fails: str, tmp_path: Path) -> None:
    make = shutil.which("make")
    assert make is not None
    script = f'#!/bin/sh\necho "$@" >> {tmp_path}/called\ntest "$1" != "{fails}"\n'
    (tmp_path / "docker").write_text(script, encoding="utf-8")
    (tmp_path / "docker").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([make, "image"], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    base = next(rest for word, rest in _instructions() if word == "ARG").partition("=")[2]
    called = [f"pull --quiet {base}", "build -t penstock .", "run --rm penstock --version"]
    names = [line.partition(" ")[0] for line in called]
    assert (tmp_path / "called").read_text().splitlines() == called[: names.index(fails) + 1 if fails else 3]
    assert (done.returncode == 0) == (fails in ("", "pull"))
    assert ("the image is not built" in done.stdout) == (fails == "pull")


def _copy(names: str, source: Path) -> None:
    """What one COPY puts into /src, here into `source`."""
    for name in names.split()[:-1]:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)


def _beside_installed(folder: Path, *options: str) -> Path:
    """A new environment that finds the packages of this one behind its own."""
    subprocess.run([sys.executable, "-m", "venv", *options, str(folder)], check=True)
    if (pip := folder / "bin" / "pip").exists():  # Python before 3.12 puts an old setuptools there
        subprocess.run([str(pip), "uninstall", "--quiet", "--yes", "setuptools"], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    return folder / "bin"


@pytest.mark.sweep
def test_the_commands_of_the_dockerfile_install_it(tmp_path: Path) -> None:
    """In its order, with packages that are installed here in place of those of an index."""
    (tmp_path / "src").mkdir()
    source, programs = tmp_path / "src", _beside_installed(tmp_path / "venv")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PATH": f"{programs}:{os.environ['PATH']}", "PIP_NO_INDEX": "1", "TORCH": "cpu"}
    for word, rest in _instructions():
        if word == "COPY":
            _copy(rest, source)
        if word != "RUN" or not rest.startswith("pip install "):
            continue
        here = re.sub(r"/src(?=[/\[])", str(source), rest)
        here = here.replace("pip install", "pip install --no-build-isolation", 1)
        done = subprocess.run(
            ["sh", "-c", here], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
    (entry,) = (json.loads(rest) for word, rest in _instructions() if word == "ENTRYPOINT")
    told = subprocess.run(
        [*entry, "--version"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == penstock.__version__
    which = subprocess.run(
        ["sh", "-c", f"command -v {entry[0]}"], env=env, capture_output=True, text=True, check=True
    )
    assert which.stdout.strip() == str(programs / "penstock")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive, which are built without a network: the wheel of what the
    Dockerfile copies alone."""
    folder, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("src")
    for word, rest in _instructions():
        if word == "COPY":
            _copy(rest, source)
    for place, form in ((source, "wheel"), (ROOT, "sdist")):
        command = [sys.executable, "-m", "hatchling", "build", "-t", form, "-d", str(folder)]
        subprocess.run(command, cwd=place, check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_the_wheel_says_what_an_index_asks_for(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"penstock-{penstock.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(archive.read(name))
        assert "penstock/py.typed" in archive.namelist()
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in archive.namelist())
    assert said["Version"] == penstock.__version__
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Python"] == PROJECT["requires-python"]
    assert said["Description-Content-Type"] == "text/markdown"
    assert said.get_payload().startswith("# Penstock")  # type: ignore[union-attr]
    assert len(said["Summary"]) <= 512
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (Unreleased|\d+\.\d+\.\d+)", changes, re.MULTILINE)


@pytest.mark.slow
def test_the_archives_hold_what_they_should(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert all(name.startswith(("penstock/", "penstock-")) for name in names)
    for path in (ROOT / "src").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert path.relative_to(ROOT / "src").as_posix() in names, f"the wheel lacks {path}"
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt", "tests/test_packaging.py",
    } <= inside  # fmt: skip
    assert not any(name.startswith(("runs/", ".venv/", "dist/")) for name in inside)


@pytest.mark.slow
@pytest.mark.usefixtures("known_machine")
def test_the_wheel_installs_into_an_empty_environment_and_works(built: Path, tmp_path: Path) -> None:
    python = _beside_installed(tmp_path / "venv", "--without-pip") / "python"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    (wheel,) = built.glob("*.whl")
    install = [str(python), "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", str(wheel)]
    subprocess.run(install, check=True, env=env)

    def told(*words: str) -> str:
        command = [str(tmp_path / "venv" / "bin" / "penstock"), *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    where = subprocess.run(
        [str(python), "-c", "import penstock; print(penstock.__file__)"],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(tmp_path)
    assert told("--version").strip() == penstock.__version__
    assert "penstock tune train.py" in told()
    assert "tokens/s/GPU" in told("plan", "gpt2", "--gpus", "8", "--machine", "h100")
    small = ["--model.depth", "1", "--recipe.steps", "2", "--recipe.warmup_steps", "1", "--output", "run"]
    assert "done: top-1" in told("train", "vit-digits", *small)
