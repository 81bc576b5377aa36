"""Write constraints.txt and the licence table of docs/dependencies.md from what is installed.

Run by `make relock` in an environment made with `make install-all`. Follows the requirements of the project and of
every extra that CI installs, so packages that merely happen to be installed are not pinned.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
EXTRAS = ("images", "hf", "text", "languages", "track", "serve", "export", "test", "check", "docs")
# What only pip's own environment for editable builds has.
BUILD = {"editables": ("0.6", "MIT")}
# Where a package's own metadata gives no SPDX expression: read from its licence file.
LICENCES = {
    "accelerate": "Apache-2.0",
    "colorama": "BSD-3-Clause",
    "ghp-import": "Apache-2.0",
    "jinja2": "BSD-3-Clause",
    "markdown-it-py": "MIT",
    "mdurl": "MIT",
    "mergedeep": "MIT",
    "mpmath": "BSD-3-Clause",
    "lxml": "BSD-3-Clause",
    "num2words": "LGPL-2.1",
    "numpy": "BSD-3-Clause",
    "opencv-python-headless": "Apache-2.0; its wheel bundles FFmpeg (LGPL-2.1)",
    "pathspec": "MPL-2.0",
    "peft": "Apache-2.0",
    "protobuf": "BSD-3-Clause",
    "pyyaml": "MIT",
    "rich": "MIT",
    "safetensors": "Apache-2.0",
    "scipy": "BSD-3-Clause",
    "sentence-transformers": "Apache-2.0",
    "sympy": "BSD-3-Clause",
    "tiktoken": "MIT",
    "tokenizers": "Apache-2.0",
    "triton": "MIT",
    "trove-classifiers": "Apache-2.0",
    "word2number": "MIT",
}
HEADER = """\
# Every version that CI and the Makefile install; `make relock` writes this file anew from what is installed.
# numpy stays below 2.4: Triton 3.6's interpreter fails with it, at a range with a runtime step.
"""
MARK = "<!-- Below this line `make relock` writes. -->"


def requirements(name: str, extras: tuple[str, ...], seen: set[str], pairs: set[tuple[str, str]]) -> set[str]:
    """Names of all that `name` with `extras` needs here, itself not counted."""
    for line in importlib.metadata.requires(name) or []:
        need = Requirement(line)
        if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        found = canonicalize_name(need.name)
        for extra in need.extras or {""}:
            if (found, extra) not in pairs:
                pairs.add((found, extra))
                seen.add(found)
                requirements(found, tuple(need.extras), seen, pairs)
    return seen


def licence(name: str) -> str:
    """The SPDX expression or short words for a package's licence."""
    if name in LICENCES:
        return LICENCES[name]
    metadata = importlib.metadata.metadata(name)
    if expression := metadata.get("License-Expression"):
        return expression
    text = metadata.get("License") or ""
    if text and len(text) < 40 and "\n" not in text:
        return text
    words = [entry for entry in metadata.get_all("Classifier") or [] if entry.startswith("License")]
    if not words:
        sys.exit(f"{name} names no licence; look it up and add it to LICENCES in {__file__}")
    return words[-1].rpartition("::")[2].strip()


def main() -> None:
    core = requirements("penstock", (), set(), set())
    everything = requirements("penstock", EXTRAS, set(), set())
    versions = {name: importlib.metadata.version(name).partition("+")[0] for name in everything}
    pins = versions | {name: version for name, (version, _) in BUILD.items()}
    pins["pip"] = importlib.metadata.version("pip")
    lines = [f"{name}=={version}" for name, version in sorted(pins.items())]
    (ROOT / "constraints.txt").write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")

    rows = [f"| {name} | {licence(name)} | {'core' if name in core else 'extra'} |" for name in everything]
    rows += [f"| {name} | {spdx} | build |" for name, (_, spdx) in BUILD.items()]
    page = ROOT / "docs" / "dependencies.md"
    kept = re.split(re.escape(MARK), page.read_text(encoding="utf-8"))[0]
    table = "\n".join(["| package | licence | needed for |", "|---|---|---|", *sorted(rows)])
    page.write_text(f"{kept}{MARK}\n\n{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
