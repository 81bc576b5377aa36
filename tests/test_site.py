"""The site of docs/: built, complete, and readable without a network."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

import penstock
from helpers.modules import loaded
from penstock import PRESETS, load_machine, search
from penstock.cli import main
from penstock.report.units import money

ROOT = Path(__file__).parent.parent
FUNCTIONS = [
    "penstock.build.build",
    "penstock.ladder.climb.ladder",
    "penstock.probe.probe",
    "penstock.train.train",
]


def _tool(name: str) -> ModuleType:
    return loaded(ROOT / "tools" / f"{name}.py")


def test_the_api_page_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    wanted = [f"penstock.{name}" for name in penstock.__all__ if name != "__version__"]
    assert sorted(listed) == sorted([*wanted, *FUNCTIONS])


@pytest.fixture(scope="module")
def planner() -> ModuleType:
    """What the planner's page runs."""
    return loaded(ROOT / "docs" / "assets" / "planner.py")


def test_the_planners_page_answers_as_the_planner_does(planner: ModuleType) -> None:
    asked = {
        "model": "vit-h14", "machine": "h100", "gpus": "8", "global_batch": "1024", "images": "1e8", "price": "2",
    }  # fmt: skip
    found = json.loads(planner.answer(json.dumps(asked)))
    best = search(PRESETS["vit-h14"], load_machine("h100"), 8, global_batch=1024)[0]
    rows = dict(found["rows"])
    assert found["plan"] == best.plan.line()
    assert rows["images per second"] == f"{best.samples_per_second:,.0f}"
    assert money(2 * best.gpu_hours(1e8)) in rows["the whole run"]
    assert found["command"] == (
        "penstock plan vit-h14 --machine h100 --gpus 8 --global-batch 1024 --images 1e8 --price 2"
    )
    assert [figure["svg"][:4] for figure in found["figures"]] == ["<svg"] * 3
    points = [json.loads(planner.point(json.dumps(asked), gpus)) for gpus in (8, 16)]
    assert points[0]["seconds"] == best.iteration_seconds > points[1]["seconds"]
    assert [one["title"] for one in json.loads(planner.curves(json.dumps(points), 2.0))] == [
        "More devices, less time",
        "More devices, more cost",
    ]
    assert "device" in json.loads(planner.curves(json.dumps(points), 2.0))[0]["words"]


def test_the_planners_page_compares_and_gives_the_terminals_reasons(
    planner: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {
        "model": "vit-s16", "gpus": "4", "global_batch": "64", "beside": "tp=2 | pp=2", "base": "sharding=ddp",
    }  # fmt: skip
    found = json.loads(planner.answer(json.dumps(asked)))
    search_command, compare_command = found["command"].splitlines()
    assert main(shlex.split(search_command)[1:]) == 0
    out = capsys.readouterr().out
    assert found["why"] == [one[2:] for one in out.partition("why the others are slower:\n")[2].splitlines()]
    assert main(shlex.split(compare_command)[1:]) == 0
    out = capsys.readouterr().out
    assert found["beside"][0] == ["", "best of all", "tp=2", "pp=2"]
    for row in found["beside"][1:]:
        assert " ".join(row) in re.sub(" +", " ", out)
    for line in found["others"]:
        assert all(part in out for part in line.split(". ", 1))


QWEN = {
    "model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 5000,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip


def test_the_planners_page_takes_a_config_of_transformers(planner: ModuleType) -> None:
    text = json.dumps(QWEN)
    asked = {
        "model": "gpt2", "config": text, "name": "Mine-1B", "gpus": "2", "model.depth": "6", "beside": "tp=2",
    }  # fmt: skip
    found = json.loads(planner.answer(json.dumps(asked)))
    assert found["title"].startswith("Mine-1B on 2 h100"), found
    assert "--model.depth 6" in found["command"]
    described = json.loads(planner.sizes("gpt2", text))
    assert (described["sizes"]["kv_heads"], described["called"]) == (4, "your qwen2 model")
    del asked["name"]
    assert json.loads(planner.answer(json.dumps(asked), 340.0))["title"].startswith(
        "your qwen2 model on 2 h100"
    )
    named = json.dumps({**QWEN, "_name_or_path": "owner/Mine-2B"})
    answered = json.loads(planner.answer(json.dumps(asked | {"config": named}), 340.0))
    assert answered["title"].startswith("Mine-2B on 2 h100")
    assert all('viewBox="0 0 340 ' in figure["svg"] for figure in answered["figures"])
    for wrong, reason in (("{}", "model_type"), ("{", "JSON"), ('{"model_type": "mamba"}', "mamba")):
        assert reason in json.loads(planner.answer(json.dumps({"config": wrong})))["refused"]
        assert reason in json.loads(planner.sizes("gpt2", wrong))["refused"]


def test_the_planners_page_takes_sizes_of_the_readers_own(planner: ModuleType) -> None:
    sizes = json.loads(planner.sizes("t5-base"))["sizes"]
    assert sizes["encoder.width"] == 768
    own = {"model": "vit-s16", "model.depth": "24", "machine.memory_bytes": "2", "gpus": "1"}
    assert "--model.depth 24" in json.loads(planner.answer(json.dumps(own)))["command"]
    for asked, reason in (
        ({"model": "llama3-8b", "model.heads": "31"}, "cannot be split over model.heads 31"),
        ({"model": "gpt-175b", "gpus": "1"}, "fits in no layout on 1 h100"),
        ({"model": "gpt-175b", "gpus": "many"}, "gpus"),
        ({"machine": "h1000"}, "There is no machine"),
        ({"machine.memory_bytes": "much"}, "machine.memory_bytes"),
    ):
        assert reason in json.loads(planner.answer(json.dumps(asked)))["refused"]
        assert planner.point(json.dumps(asked), 1) == "null"


def test_the_planner_in_the_browser_needs_nothing_but_python(tmp_path: Path) -> None:
    """Pyodide has no other packages."""
    (tmp_path / "penstock.zip").write_bytes(_tool("site").planner_modules())
    code = f"""
import sys
sys.modules["grp"] = None  # which Pyodide lacks
sys.path.insert(0, {str(tmp_path / "penstock.zip")!r})
exec(compile(open({str(ROOT / "docs/assets/planner.py")!r}).read(), "planner.py", "exec"), globals())
config = '{{"model_type": "gpt2", "n_layer": 2}}'
print(len(answer(json.dumps({{"config": config, "gpus": "1"}}))), *{{name.partition(".")[0] for name in sys.modules}})
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    size, *modules = done.stdout.split()
    assert int(size) > 5000
    assert set(modules) - set(sys.stdlib_module_names) == {"penstock", "__main__"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see [the script](../../examples/own_model.py).", "see the script (`examples/own_model.py`)."),
        ("[ladder](ladder.md#how-it-climbs)", "[ladder](ladder.md#how-it-climbs)"),
        (
            "[a part](#below) and [a site](https://a.example/b)",
            "[a part](#below) and [a site](https://a.example/b)",
        ),
    ],
)
def test_links_that_leave_the_site_become_words(text: str, shown: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="how-to/own-model.md"))
    assert _tool("site").on_page_markdown(text, page) == shown


def test_every_how_to_is_in_the_navigation() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    told = json.dumps(settings["nav"])
    for path in (ROOT / "docs").rglob("*.md"):
        name = path.relative_to(ROOT / "docs").as_posix()
        assert name in told or name.startswith("decisions/0"), name


def test_the_glossary_is_in_order() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = [
        word.replace("`", "").lower() for word in re.findall(r"^\| (.+?) \| .+\. \|$", text, re.MULTILINE)
    ]
    assert len(words) == text.count("\n|") - 2, "a row is a word and whole sentences"
    assert words == sorted(set(words))


class _Loaded(HTMLParser):
    """Addresses that a browser fetches by itself, rather than when a reader follows a link."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "link" and named.get("rel") in ("canonical", "next", "prev"):
            return
        if tag in ("link", "script", "img", "iframe", "source"):
            self.found += [value for name, value in attrs if name in ("src", "href", "srcset") and value]


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        loaded = _Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        for address in loaded.found:
            assert not re.match(r"(https?:)?//", address), f"{page} loads {address}"
            if not address.startswith("data:") and page.name != "404.html":
                assert (page.parent / address.partition("?")[0]).exists(), f"{page} lacks {address}"
    api = (tmp_path / "site" / "reference" / "api.html").read_text(encoding="utf-8")
    assert 'id="penstock.accelerate"' in api
    assert (tmp_path / "site" / "assets" / "penstock.zip").stat().st_size > 1e5
