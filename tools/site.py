"""What mkdocs does not do by itself: hooks of mkdocs.yml.

- Links to files outside docs/ become plain words: the site has no such pages.
- The planner's page runs the planner in the browser: the planner's modules and Pyodide come to lie in assets/.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LOG = logging.getLogger("mkdocs.plugins.penstock")
ROOMS = ("boundary", "config", "planner", "report", "schedules")
CHOICES = ("kernels/__init__.py", "kernels/choices.py")
"""Packages that the planner needs, besides the modules outside of packages."""
PYODIDE = "pyodide@314.0.7"
PYODIDE_SHA256 = "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"
PYODIDE_FILES = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "pyodide-lock.json",
    "python_stdlib.zip",
)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A link that leaves docs/ as its words and the path in the repository."""
    here = (DOCS / page.file.src_uri).parent

    def plain(found: re.Match[str]) -> str:
        target = (here / found[2].partition("#")[0]).resolve()
        if re.match(r"[a-z]+:", found[2]) or target.is_relative_to(DOCS):
            return found[0]
        return f"{found[1]} (`{target.relative_to(ROOT).as_posix()}`)"

    return re.sub(r"\[([^\]]+)\]\(([^)#\s][^)\s]*)\)", plain, markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Put Python for browsers and the planner's modules beside the planner's page."""
    assets = Path(config["site_dir"], "assets")
    (assets / "penstock.zip").write_bytes(planner_modules())
    python = pyodide()
    if python is None:
        LOG.warning("npm did not give %s: the planner's page will say that it cannot run.", PYODIDE)
        return
    shutil.copytree(python, assets / "pyodide", dirs_exist_ok=True)


def planner_modules() -> bytes:
    """The modules that the planner needs, which import nothing but Python's own, as a zip archive."""
    source, made = ROOT / "src" / "penstock", io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(source.rglob("*")):
            room, *rest = path.relative_to(source).parts
            planned = not rest or room in ROOMS or path.relative_to(source).as_posix() in CHOICES
            if path.suffix in (".py", ".pyi", ".toml", ".json") and planned:
                archive.write(path, path.relative_to(source.parent).as_posix())
    return made.getvalue()


def pyodide() -> Path | None:
    """The folder with Python for browsers, from the npm registry, kept in build/ between builds; None without npm.

    Raises ValueError for a package that is not the one that was chosen.
    """
    kept = ROOT / "build" / PYODIDE.replace("@", "-")
    if kept.exists():
        return kept
    npm = shutil.which("npm")
    if npm is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [npm, "pack", "--silent", PYODIDE], cwd=folder, capture_output=True, check=False
        )
        packed = list(Path(folder).glob("*.tgz"))
        if done.returncode or len(packed) != 1:
            return None
        digest = hashlib.sha256(packed[0].read_bytes()).hexdigest()
        if digest != PYODIDE_SHA256:
            raise ValueError(f"{PYODIDE} has the SHA-256 {digest}, but {PYODIDE_SHA256} was chosen.")
        half = Path(folder, "files")
        half.mkdir()
        with tarfile.open(packed[0]) as archive:
            for name in PYODIDE_FILES:
                member = archive.extractfile(f"package/{name}")
                assert member is not None
                (half / name).write_bytes(member.read())
        kept.parent.mkdir(exist_ok=True)
        shutil.move(half, kept)
    return kept
