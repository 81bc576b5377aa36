"""What mkdocs does not do by itself: hooks of mkdocs.yml.

- Links to files outside docs/ become plain words: the site has no such pages.
- `assets/planner-table.js`, the answers of the planner's page, is computed, and kept in build/ between builds.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


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
    """Write the planner's answers into the site."""
    text = f"window.PENSTOCK_TABLE = {_table()};\n"
    Path(config["site_dir"], "assets", "planner-table.js").write_text(text, encoding="utf-8")


def _table() -> str:
    """The answers as JSON, computed by tools/planner_table.py unless nothing has changed that they depend on."""
    program = ROOT / "tools" / "planner_table.py"
    made = hashlib.sha256(program.read_bytes() + os.environ.get("PENSTOCK_SMALL_TABLE", "").encode())
    for path in sorted((ROOT / "src" / "penstock").rglob("*")):
        if {"planner", "config"} & set(path.parts) and path.suffix in (".py", ".toml", ".json"):
            made.update(path.read_bytes())
    kept = ROOT / "build" / f"planner-table-{made.hexdigest()[:16]}.json"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        temporary = kept.with_suffix(".tmp")
        subprocess.run([sys.executable, str(program), str(temporary)], check=True)
        os.replace(temporary, kept)
    return kept.read_text(encoding="utf-8")
