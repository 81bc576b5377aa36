"""Store the lines of each room, and which files and functions are too long, in tests/lines.json.

    python tools/lines.py            where nothing has grown
    python tools/lines.py --raise    whatever has grown, for a release

tests/test_house.py compares the tree with that file: the sum may not rise, a room only where others fall by more, and
the lists of long files and functions only shrink.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "penstock"
STORED = ROOT / "tests" / "lines.json"
LONG_FILE, LONG_FUNCTION = 400, 60


def _functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and lines of each function of a module, with the classes that it is in."""
    inside = [("", ast.parse(text))]
    while inside:
        before, node = inside.pop()
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            name = f"{before}{child.name}" if named else before  # type: ignore[attr-defined]
            if named and not isinstance(child, ast.ClassDef):
                yield name, child.end_lineno - child.lineno + 1  # type: ignore[attr-defined]
            inside.append((f"{name}." if named else before, child))  # type: ignore[arg-type]


def count() -> dict[str, Any]:
    """Lines of src by room, of tests in all, and the files and functions that are too long."""
    rooms: Counter[str] = Counter()
    files, functions = {}, {}
    for path in sorted(SOURCE.rglob("*.py")):
        place, text = path.relative_to(SOURCE), path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        rooms[place.parts[0] if len(place.parts) > 1 else "(modules)"] += lines
        if lines > LONG_FILE:
            files[place.as_posix()] = lines
        functions |= {
            f"{place.as_posix()}:{name}": length
            for name, length in _functions(text)
            if length > LONG_FUNCTION
        }
    tests = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    return {"rooms": dict(sorted(rooms.items())), "tests": tests, "files": files, "functions": functions}


def problems(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Everything that has grown since `stored`, and every entry of its lists that is no longer too long."""
    before, after = stored["rooms"], now["rooms"]
    least, most = sum(after.values()), sum(before.values())
    risen = {room: lines for room, lines in after.items() if lines > before.get(room, 0)}
    grown = []
    if least > most:
        grown.append(f"src has {least:,} lines, and had {most:,}; remove more than you add.")
    if risen and least >= most:
        rooms = ", ".join(f"{room} {before.get(room, 0):,} to {lines:,}" for room, lines in risen.items())
        grown.append(f"These rooms rise, and others do not fall by more: {rooms}.")
    if now["tests"] > stored["tests"]:
        grown.append(f"tests have {now['tests']:,} lines, and had {stored['tests']:,}.")
    for kind, limit in (("files", LONG_FILE), ("functions", LONG_FUNCTION)):
        for name in sorted(stored[kind] | now[kind]):
            old, new = stored[kind].get(name, limit), now[kind].get(name)
            if new is None:
                grown.append(f"{name} has {limit} lines or fewer; take it off the list of {kind}.")
            elif new > old:
                grown.append(f"{name} has {new} lines, and may have {old}; split it.")
    return grown


def main(arguments: list[str]) -> int:
    now = count()
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.is_file() else None
    grown = [] if stored is None else [each for each in problems(stored, now) if "off the list" not in each]
    if grown and arguments != ["--raise"]:
        print("\n".join([*grown, "Nothing was written; --raise stores it all the same."]), file=sys.stderr)
        return 1
    STORED.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(now['rooms'].values()):,} lines of src and {now['tests']:,} of tests: {STORED.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
