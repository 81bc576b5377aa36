"""The site of docs/: built, complete, and readable without a network."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

import penstock
from penstock import PRESETS, load_machine, search

ROOT = Path(__file__).parent.parent
FUNCTIONS = [
    "penstock.build.build",
    "penstock.ladder.climb.ladder",
    "penstock.probe.probe",
    "penstock.train.train",
]


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_api_page_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    wanted = [f"penstock.{name}" for name in penstock.__all__ if name != "__version__"]
    assert sorted(listed) == sorted([*wanted, *FUNCTIONS])


def test_the_answers_of_the_planners_page_are_the_planners() -> None:
    answer = _tool("planner_table").answer
    best = search(PRESETS["vit-h14"], load_machine("h100"), 8, global_batch=1024)[0]
    seconds, mfu, size, plan = answer(("vit-h14", "h100", 8, 1024))
    assert seconds == pytest.approx(best.iteration_seconds, abs=1e-5)
    assert (mfu, size, plan) == (round(best.mfu, 4), best.memory_bytes, best.plan.line())
    assert answer(("gpt-175b", "h100", 1, 256)) is None


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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PENSTOCK_SMALL_TABLE": "1"}
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
    script = (tmp_path / "site" / "assets" / "planner-table.js").read_text(encoding="utf-8")
    table = json.loads(script.removeprefix("window.PENSTOCK_TABLE = ").rstrip(";\n"))
    assert table["answers"]["vit-h14|h100|8|1024"][0] > 0
    assert table["answers"].keys() == {
        "|".join(map(str, (model, machine, gpus, batch)))
        for model in table["models"] for machine in table["machines"]
        for gpus in table["gpus"] for batch in table["batches"]
    }  # fmt: skip
