"""The page on torch's internals lists every use in the source with its reason, and nothing that is not there."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "penstock"
PAGE = ROOT / "docs" / "reference" / "torch-internals.md"

# Private names that are not torch's: of the standard library, and of operators in words that a table compares.
NOT_TORCHS = {"_replace", "_asdict", "_fields", "_make", "_run_exitfuncs", "_args_from_interpreter_flags", "_to_copy",
              "_unsafe_view", "_shutdown"}  # fmt: skip
# Names of torch's that the source also gives to attributes of its own.
TORCHS = {
    "_parameters", "_buffers", "_modules", "_version", "_apply", "_values", "_step_supports_amp_scaling",
}  # fmt: skip
# Calls that change something for the whole process; `_patch` replaces attributes of other people's classes.
PROCESS_WIDE = {
    "torch.set_float32_matmul_precision", "torch.set_num_threads", "torch.library.Library",
    "torch.compiler.set_stance", "torch.manual_seed", "register_optimizer_step_post_hook", "_patch", "_CLASS.__set__",
    "ctypes.c_int.in_dll",
}  # fmt: skip
FAMILIES = ("torch._foreach_", "torch._C.", "torch._dynamo.")


def _private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return None


def _family(name: str) -> str:
    return next((f"{family.rstrip('._')}*" for family in FAMILIES if name.startswith(family)), name)


def own_names(tree: ast.Module) -> Iterator[str]:
    """Private names that a module itself defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _own(node):
            yield node.attr


def _own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def uses(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """What a module takes of torch's internals, class swaps, and what it changes for the whole process."""
    inner: set[ast.AST] = set()
    own = own | NOT_TORCHS
    # A name that is put together begins with its first part; `f"{field}_length"` is none of torch's.
    later = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values[1:]}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for full, name in ((f"{node.module}.{alias.name}", alias.name) for alias in node.names):
                if _private(full) or name in PROCESS_WIDE:
                    yield full if _private(full) else name
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("torch._"))
        elif isinstance(node, ast.Attribute) and node not in inner:
            inner.update(ast.walk(node))
            yield from _of_attribute(node, own)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in PROCESS_WIDE:
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in later:
            name = node.value  # asked for by getattr, or looked for
            theirs = name in TORCHS or name not in own
            if re.fullmatch(r"_[a-z][a-z_]+", name) and not name.startswith("_penstock") and theirs:
                yield f".{name}"
            elif re.fullmatch(r"torch(\.\w+)+", name) and _private(name):
                yield name


def _of_attribute(node: ast.Attribute, own: set[str]) -> Iterator[str]:
    dotted = _dotted(node)
    if dotted is not None and (dotted in PROCESS_WIDE or (dotted.startswith("torch.") and _private(dotted))):
        yield dotted
        return
    for part in ast.walk(node):
        if (
            not isinstance(part, ast.Attribute)
            or not _private(part.attr)
            or part.attr.startswith("_penstock")
        ):
            continue
        if part.attr not in own or (part.attr in TORCHS and not _own(part)):
            yield f".{part.attr}"
    if node.attr == "__class__" and isinstance(node.ctx, ast.Store):
        yield "__class__"


@cache
def found() -> dict[str, set[str]]:
    """Every use with the files that have it."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    own = {name for tree in trees.values() for name in own_names(tree)}
    where: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        for use in uses(tree, own):
            where[_family(use)].add(path.relative_to(SOURCE).as_posix())
    return dict(where)


def listed() -> dict[str, tuple[set[str], str]]:
    """The rows of the page: files and reason of each name."""
    rows = re.findall(
        r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {name: (set(re.findall(r"`([^`]+)`", files)), reason.strip()) for name, files, reason in rows}


def test_every_use_of_torchs_internals_is_listed_with_its_reason() -> None:
    there, page = found(), listed()
    missing = [
        f"| `{name}` | {', '.join(f'`{f}`' for f in sorted(there[name]))} | why |"
        for name in there.keys() - page
    ]
    assert not missing, "say in docs/reference/torch-internals.md why:\n" + "\n".join(sorted(missing))
    assert not page.keys() - there.keys(), "no longer used, take it off the page"
    for name, (files, reason) in page.items():
        assert files == there[name], name
        assert len(reason) > 15, f"{name} needs a reason"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\ntorch._C.x()", {"torch._C*"}),
        ("from torch._ops import OpOverload", {"torch._ops.OpOverload"}),
        ("import torch._dynamo.config", {"torch._dynamo*"}),
        ("sys.modules['torch._dynamo.utils']", {"torch._dynamo*"}),
        ("module._flat = 1", {"._flat"}),
        ("self._mine = 1\nx._mine", set()),
        ("getattr(x, '_hidden_thing')", {"._hidden_thing"}),
        ("getattr(x, f'_hidden_{thing}')", {"._hidden_"}),
        ("f'{field}_length'", set()),
        ("x.__class__ = Y", {"__class__"}),
        ("x._modules", {"._modules"}),
        ("import torch\ntorch.nn.Linear", set()),
    ],
)
def test_the_scan_sees(text: str, expected: set[str]) -> None:
    tree = ast.parse(text)
    assert {_family(use) for use in uses(tree, set(own_names(tree)))} == expected


if __name__ == "__main__":
    for name, files in sorted(found().items()):
        print(f"| `{name}` | {', '.join(f'`{file}`' for file in sorted(files))} |")
