"""The house rules that a machine can hold: who imports whom, what `--help` costs, which words open docstrings."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import resource
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import penstock
from helpers.modules import loaded
from helpers.pace import at_reference_pace

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "penstock"

# What each room, a folder or a module of src/penstock, may import of the others. Everyone may ask the planner and the
# report, except what these are made of. See docs/decisions/0007-import-direction.md.
BASE = {"boundary", "config", "errors", "faces"}
ASKED = {"choices", "planner", "report", "schedules"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "faces": set(),
    "boundary": {"errors", "leftovers"},
    "disk": {"boundary", "errors"},
    "leftovers": set(),
    "config": {"boundary", "errors"},
    "schedules": BASE,
    "report": BASE | {"schedules"},
    "choices": BASE,
    "planner": BASE | {"choices", "report", "schedules"},
    "containers": set(),
    "shards": set(),
    "tensorfile": {"boundary", "config", "disk", "errors", "leftovers"},
    "cpu": set(),
    "dtypes": {"config"},
    "process": BASE,
    "probe": BASE | ASKED | {"cpu", "kernels", "models", "parallel", "process", "products"},
    "doctor": BASE | ASKED | {"dtypes", "products"},
    "data": BASE | ASKED | {"containers", "disk", "leftovers"},
    "launch": BASE | {"leftovers"},
    "kernels": BASE | ASKED | {"cpu", "dtypes"},
    "models": BASE | ASKED | {"cpu", "dtypes", "kernels", "leftovers", "tensorfile"},
    "decode": BASE | ASKED | {"containers", "dtypes", "kernels", "models", "parallel", "shards"},
    "infer": BASE
    | ASKED
    | {"apply", "data", "decode", "dtypes", "models", "parallel", "precision", "products", "tasks"},
    "serve": BASE | ASKED | {"data", "decode", "infer", "launch", "models", "parallel"},
    "export": BASE | ASKED | {"cpu", "decode", "infer", "models", "products"},
    "tasks": BASE | {"apply", "data", "decode", "dtypes", "kernels", "models", "parallel"},
    "optim": BASE | ASKED | {"cpu", "dtypes", "kernels", "models", "shards"},
    "products": BASE | {"cpu", "dtypes", "kernels", "models"},
    "precision": BASE
    | ASKED
    | {"cpu", "containers", "dtypes", "kernels", "models", "optim", "process", "products"},
    "parallel": BASE
    | ASKED
    | {"cpu", "containers", "dtypes", "kernels", "models", "optim", "precision", "products", "shards"},
    "apply": BASE
    | ASKED
    | {"decode", "kernels", "models", "optim", "parallel", "precision", "probe", "products"},
    "script": BASE | ASKED | {"apply", "containers", "dtypes", "models", "optim", "precision"},
    "step": BASE
    | ASKED
    | {"containers", "dtypes", "kernels", "models", "optim", "parallel", "precision", "process", "tasks"},
    "build": BASE | ASKED | {"apply", "models", "precision", "optim", "parallel", "step", "tasks"},
    "checkpoint": BASE | ASKED | {"disk", "kernels", "models", "shards", "tensorfile"},
}
_BUILT = set(ALLOWED) | {"build"}
ALLOWED["train"] = _BUILT - {"doctor"}
ALLOWED["ladder"] = _BUILT - {"doctor"} | {"train"}
ALLOWED["compress"] = _BUILT - {"doctor"} | {"train", "ladder"}
ALLOWED["tune"] = _BUILT - {"doctor"} | {"ladder"}
ALLOWED["cli"] = _BUILT | {"train", "ladder", "compress", "tune"}
TORCH_FREE = {"errors", "boundary", "choices", "config", "schedules", "planner", "report"}
# Modules that stand in one room and may be imported as another.
APART = {"penstock.kernels.choices": "choices"}


_parsed = cache(ast.parse)


def _modules() -> Iterator[tuple[str, Path]]:
    """Room and path of every module, but the package's own `__init__` and `__main__`, which see everything."""
    for path in sorted(SOURCE.rglob("*.py")):
        first = path.relative_to(SOURCE).parts[0]
        name = ".".join(("penstock", *path.relative_to(SOURCE).with_suffix("").parts))
        if first not in ("__init__.py", "__main__.py"):
            yield APART.get(name, first.removesuffix(".py")), path


def _imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Every module named by an import statement, wherever it stands; `from a import b` names a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            yield module, node
            yield from ((f"{module}.{alias.name}", node) for alias in node.names)


def _typing_only(tree: ast.AST) -> set[ast.stmt]:
    """Statements under `if TYPE_CHECKING`, which never run."""
    found: set[ast.stmt] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            found.update(child for child in ast.walk(node) if isinstance(child, ast.stmt))
    return found


def violations(room: str, text: str) -> list[str]:
    """What a module of `room` imports and must not."""
    tree = _parsed(text)
    unrun = _typing_only(tree)
    problems = []
    for name, statement in _imports(tree):
        package, _, rest = name.partition(".")
        target = next((apart for one, apart in APART.items() if name.startswith(one)), rest.partition(".")[0])
        runs = statement not in unrun
        if package == "torch" and room in TORCH_FREE and runs:
            problems.append(f"line {statement.lineno}: {room} is free of torch")
        if package == "cyclopts" and room != "cli":
            problems.append(f"line {statement.lineno}: only cli imports cyclopts")
        if package == "helpers":
            problems.append(f"line {statement.lineno}: only tests import helpers")
        if package == "penstock" and runs and target in ALLOWED and target not in {room, *ALLOWED[room]}:
            problems.append(f"line {statement.lineno}: {room} imports {target}")
    return list(dict.fromkeys(problems))


def test_imports_point_one_way() -> None:
    rooms = set()
    problems = []
    for room, path in _modules():
        rooms.add(room)
        if room not in ALLOWED:
            problems.append(f"{path}: say in ALLOWED what the new room {room!r} may import")
            continue
        problems += [f"{path}: {problem}" for problem in violations(room, path.read_text(encoding="utf-8"))]
    assert not problems, "\n".join(problems)
    assert {"config", "models", "cli"} <= rooms


def _imported_by_name(tree: ast.AST) -> Iterator[str]:
    """Every module that `import_module` is given as a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(each.value) for each in node.args[:1] if isinstance(each, ast.Constant))


def _graph() -> dict[str, set[str]]:
    """Which module of the package imports which others: inside functions, for types alone and by name too."""
    names = {
        ".".join(("penstock", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in SOURCE.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        tree = _parsed(path.read_text(encoding="utf-8"))
        # A package that resolves its names on first use imports them for the type checker alone.
        late = _typing_only(tree) if path.name == "__init__.py" else set()
        found = {target for target, statement in _imports(tree) if statement not in late and target in names}
        found |= set(_imported_by_name(tree)) & names.keys()
        # `from a import b` names a and a.b; where a.b is a module, a is merely on the way to it.
        graph[name] = found - {name} - {target.rpartition(".")[0] for target in found}
    return graph


def _circles(graph: dict[str, set[str]]) -> set[str]:
    """Modules that import themselves over others: what is left when all that imports nothing is taken away."""
    left = {name: set(targets) for name, targets in graph.items()}
    while free := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in free}
    return set(left)


def test_no_import_goes_in_a_circle() -> None:
    graph = _graph()
    left = _circles(graph)
    # What merely imports a circle is left too; what nothing left imports is none of it.
    while outer := {name for name in left if not any(name in graph[other] for other in left)}:
        left -= outer
    assert not left
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {"a", "b", "c"}
    assert not _circles({"a": {"b"}, "b": set()})


@pytest.mark.parametrize(
    ("room", "text", "count"),
    [
        ("models", "from penstock.train import loop", 1),
        ("models", "def f():\n    import penstock.build", 1),
        ("planner", "import torch", 1),
        ("planner", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", 0),
        ("config", "from torch.nn import Module", 1),
        ("boundary", "from penstock.config.convert import Range", 1),
        ("train", "import cyclopts", 1),
        ("cli", "import cyclopts\nimport torch", 0),
        ("build", "from penstock.train.loop import run", 1),
        ("build", "from penstock.step import TrainStep", 0),
        ("data", "from helpers import images", 1),
        ("planner", "from penstock.config.plan import Plan", 0),
        ("planner", "from penstock.kernels.choices import fuses_rows", 0),
        ("planner", "from penstock.kernels.attention import attention", 1),
    ],
)
def test_the_import_check_sees(room: str, text: str, count: int) -> None:
    assert len(violations(room, text)) == count


def _loaded_by(program: str) -> set[str]:
    """Top-level modules in sys.modules after `program`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys\nprint(*sorted(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


def test_importing_penstock_and_planning_load_no_torch() -> None:
    program = (
        "import penstock, penstock.config.load, penstock.planner, penstock.report, penstock.kernels.choices\n"
        "from penstock.config.rules import require\n"
        "require(penstock.Plan.parse('precision=O1'), penstock.PRESETS['vit-s16'], penstock.load_machine('h100'))"
    )
    loaded = _loaded_by(program)
    assert "torch" not in loaded
    assert "cyclopts" not in loaded


def test_help_loads_no_torch_and_no_verb() -> None:
    loaded = _loaded_by("from penstock.cli import main\nassert main(['--help']) == 0")
    assert loaded.isdisjoint({"torch", "numpy", "PIL", "safetensors", "transformers"})


@pytest.mark.alone
def test_help_is_instant() -> None:
    """Processor time at the pace of the reference machine, because a busy machine slows both clocks; all agree on an
    idle one."""

    def seconds(turn: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "penstock", "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert at_reference_pace(seconds, rounds=5) < 0.3


def _needs(name: str, extras: frozenset[str], found: set[str], seen: set[tuple[str, str]]) -> set[str]:
    """Names of everything that a package needs here in turn."""
    for line in importlib.metadata.requires(name) or []:
        need = Requirement(line)
        if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        package = canonicalize_name(need.name)
        for extra in need.extras or {""}:
            if (package, extra) not in seen:
                seen.add((package, extra))
                found.add(package)
                _needs(package, frozenset(need.extras), found, seen)
    return found


def test_the_core_needs_few_packages_beyond_torch() -> None:
    torch = _needs("torch", frozenset(), {"torch"}, set())
    # What torch brings anyway costs nobody anything.
    beyond = _needs("penstock", frozenset(), set(), {("torch", "")}) - torch
    assert {"numpy", "rich"} <= beyond
    assert len(beyond) <= 15, sorted(beyond)


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_every_package_that_ci_installs_is_pinned_and_registered() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    pins = _pins()
    extras = frozenset({"images", "hf", "text", "languages", "track", "serve", "export", "test", "docs"})
    for name in sorted(_needs("penstock", extras, set(), set())):
        assert name in pins, f"{name} is not in constraints.txt; run make relock"
        assert f"| {name} |" in page, f"{name} is not in docs/dependencies.md; run make relock"
        assert importlib.metadata.version(name).partition("+")[0] == pins[name], name
    assert pins["torch"] == "2.13.0"
    assert tuple(int(part) for part in pins["numpy"].split(".")[:2]) < (2, 4)


def test_every_dependency_has_a_purpose() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    by_hand = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").partition("<!--")[0]
    direct = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        direct += extra
    words = {
        word
        for line in by_hand.splitlines()
        for word in line.partition("| ")[2].partition(" |")[0].split(", ")
    }
    assert {Requirement(line).name for line in direct} <= words


def test_the_public_names_all_exist() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    assert {"Plan", "predict", "accelerate"} < set(penstock.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        penstock.nothing  # noqa: B018


def test_the_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == penstock.__version__


def test_library_code_prints_nothing() -> None:
    """The linter's T20 looks at calls of print; this also finds writing to the streams themselves."""
    for room, path in _modules():
        if room == "cli" or path.name == "__main__.py":
            continue
        text = path.read_text(encoding="utf-8")
        for call in ("sys.stdout.write", "sys.stderr.write", "breakpoint("):
            assert call not in text, f"{path} calls {call}"


# A data worker unpickles what its own parent process sends it over a pipe, and so do a rank of the ladder and the climb
# that started it: nothing from outside.
MAY_UNPICKLE = {"data/pool.py", "ladder/rank.py", "ladder/team.py"}


def test_nothing_from_outside_is_unpickled() -> None:
    for _, path in _modules():
        where = path.relative_to(SOURCE).as_posix()
        for node in ast.walk(_parsed(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called in ("pickle.load", "pickle.loads", "pickle.Unpickler", "Connection", "Pipe"):
                assert where in MAY_UNPICKLE, f"{where}:{node.lineno} unpickles"
            elif called == "torch.load":
                assert given.get("weights_only") == "True", f"{where}:{node.lineno} may unpickle"
            elif called in ("np.load", "numpy.load"):
                assert given.get("allow_pickle", "False") == "False", f"{where}:{node.lineno} may unpickle"


def _without_subject(text: str) -> list[tuple[int, str]]:
    """Line and first words of docstrings, and of strings behind fields, that lean on the name instead of saying it."""
    strings = [
        (node.lineno, node.value.value.strip())
        for node in ast.walk(_parsed(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    return sorted(
        (line, words[:40]) for line, words in strings if re.match(r"(Of|That|Those|As of|What)\b", words)
    )


def test_docstrings_have_a_subject_of_their_own() -> None:
    problems = [
        f"{path.relative_to(ROOT)}:{line}: {words}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, words in _without_subject(path.read_text(encoding="utf-8"))
    ]
    assert not problems, "name the thing first, as a sentence of its own:\n" + "\n".join(problems)


def test_the_check_of_docstrings_sees_all_places() -> None:
    text = (
        '"""Of a module."""\nx = 1\n"""What it is."""\n'
        'class A:\n    """Those that are."""\n    y: int\n    """As of x."""\n'
        '    def __init__(self):\n        """Officially fine."""\n        self.z = 1\n        """That of y."""\n'
    )
    assert [line for line, _ in _without_subject(text)] == [1, 3, 5, 7, 11]


# Class names that more than one class has, still; take off what becomes unique, and add none.
TWICE = """
    Account Attention Batch Block Costs Cut Dropout Embedding Entry Histogram Loaded
    Loader Outcome Own Pooler Scale Shared Space Stream Text _Layer
"""
THRICE = "Line Stack"


def test_a_class_name_is_of_one_class() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(_parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    allowed = dict.fromkeys(TWICE.split(), 2) | dict.fromkeys(THRICE.split(), 3)
    new = {name: where for name, where in places.items() if len(where) > allowed.get(name, 1)}
    assert not new, f"choose other names: {new}"
    gone = {name: len(places[name]) for name, count in allowed.items() if len(places[name]) < count}
    assert not gone, f"lower their counts in TWICE and THRICE to these: {gone}"


# Words that do not say which thing is meant.
BARE = """
    anew apart asked does everyones found goes gone lasts mine ours said says stuff that theirs them these thing things
    those told went whose
"""


def _bare_names(text: str) -> list[tuple[int, str]]:
    """Lines and names of functions, classes, arguments, variables and attributes that are one word of `BARE`."""
    names: list[tuple[int, str]] = []
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append((node.lineno, node.name))
        elif isinstance(node, ast.arg):
            names.append((node.lineno, node.arg))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.attr))
    return sorted((line, name) for line, name in names if name.strip("_").lower() in BARE.split())


def test_names_say_what_they_hold() -> None:
    problems = []
    for path in sorted(SOURCE.rglob("*.py")):
        places = _bare_names(path.read_text(encoding="utf-8"))
        problems += [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in places]
    assert not problems, "say what it holds or does:\n" + "\n".join(problems)


def test_the_check_of_names_sees_all_places() -> None:
    text = (
        "class Found:\n    _told: int = 0\ndef said(mine, ours=0): ...\nasync def asked(): ...\n"
        "lambda found: found\nfor theirs, whole in x: self.gone = whole\nif (found_at := x): print(found, that=1)\n"
    )
    assert [line for line, _ in _bare_names(text)] == [1, 2, 3, 3, 3, 4, 5, 6, 6]


# After these torch's gloo may write to memory that it has freed: see `parallel.sequence.all_gather`. A DTensor is
# gathered by `shards.whole_of`.
RACY = re.compile(
    r"\.(_allgather_coalesced|all_gather_into_tensor(_coalesced)?|all_gather_tensor(_autograd)?"
    r"|all_gather_single_autograd|full_tensor|redistribute)\b"
)


def test_nothing_gathers_by_a_call_that_races_on_gloo() -> None:
    for path in (*SOURCE.rglob("*.py"), *(ROOT / "tests" / "helpers").rglob("*.py")):
        calls = RACY.findall(path.read_text(encoding="utf-8"))
        assert not calls, f"{path} calls {calls}"


def _lines() -> Any:
    """tools/lines.py, which counts and compares."""
    return loaded(ROOT / "tools" / "lines.py")


def test_nothing_grows_that_nothing_pays_for() -> None:
    """tests/lines.json holds the lines as of the last release; `python tools/lines.py` stores what has shrunk."""
    lines = _lines()
    grown = lines.problems(json.loads(lines.STORED.read_text(encoding="utf-8")), lines.count())
    assert not grown, "\n".join(grown)


def test_few_files_are_opened_to_follow_a_step() -> None:
    """tools/walk.py lists them. The numbers may only fall."""
    walk = loaded(ROOT / "tools" / "walk.py")
    most = {"step": 18, "token": 18, "prediction": 23}
    for name, each in walk.walks().items():
        # Only some processors run kernels in C++.
        files = [file for file in walk.lines_of(each) if not file.startswith("kernels/native")]
        assert len(files) <= most.pop(name), f"{name} passes through {', '.join(files)}"
    assert not most


def test_every_slow_test_is_there() -> None:
    """tests/slow.txt holds ids of tests, or of functions for all of their cases."""
    for line in (ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines()[1:]:
        path, _, name = line.partition("::")
        function = f"def {name.partition('[')[0].rpartition('::')[2]}("
        assert function in (ROOT / path).read_text(encoding="utf-8"), f"tests/slow.txt names {line}"


def test_the_brake_sees_what_grows() -> None:
    problems = _lines().problems
    stored = {"rooms": {"a": 10, "b": 10}, "tests": 5, "files": {"a/x.py": 500}, "functions": {}}

    def found(**changes: Any) -> int:
        return len(problems(stored, stored | changes))

    assert found() == 0
    assert found(rooms={"a": 12, "b": 7}) == 0, "paid for"
    assert found(rooms={"a": 12, "b": 8}) == 1, "not by more"
    assert found(rooms={"a": 12, "b": 10}) == 2
    assert found(rooms={"a": 10, "b": 9, "c": 1}) == 1
    assert found(tests=6) == 1
    assert found(files={"a/x.py": 501}) == 1
    assert found(files={"a/x.py": 500, "b/y.py": 401}) == 1
    assert found(files={}) == 1, "an entry that is short enough leaves the list"
    assert found(functions={"a/x.py:f": 61}) == 1


# Modules that a person or another program starts, or names by a string that is put together.
ENTRIES = {"penstock", "penstock.__main__", "penstock.boundary.render"}


def unimported(graph: dict[str, set[str]], named: set[str]) -> set[str]:
    """Modules that nothing imports, but for verbs of the command line, packages, and what is `named` by a string."""
    imported = set().union(*graph.values())
    packages = {module.rpartition(".")[0] for module in graph}
    verbs = {module for module in graph if re.fullmatch(r"penstock\.cli\.[a-z]\w*", module)}
    return graph.keys() - imported - packages - verbs - named


def test_every_module_is_imported_by_another() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    strings = {
        node.value.partition(":")[0]
        for text in texts.values()
        for node in ast.walk(_parsed(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for path in SOURCE.rglob("*.pyi"):  # what a package resolves on first use
        strings |= {name for name, _ in _imports(_parsed(path.read_text(encoding="utf-8")))}
    unused = unimported(_graph(), strings | ENTRIES)
    assert not unused, f"nobody imports {', '.join(sorted(unused))}: delete them, or use them"
    assert unimported({"penstock.a": {"penstock.b"}, "penstock.b": set()}, set()) == {"penstock.a"}


# What changes a model as a Plan says: `penstock.apply` calls these, and nobody else.
ORDERED = "cast_in_place compile_model convert_linears fuse offload_blocks recompute_blocks set_switches store_linears"


def _calls(text: str, names: set[str]) -> list[str]:
    """Functions of these names that a module calls, or puts in a table."""
    return [
        node.id
        for node in ast.walk(_parsed(text))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names
    ]


def test_a_plan_is_applied_in_one_place() -> None:
    names = {*ORDERED.split()}
    for path in SOURCE.rglob("*.py"):
        calls = _calls(path.read_text(encoding="utf-8"), names)
        if path.relative_to(SOURCE).as_posix() == "apply.py":
            assert {*calls} == names
        else:
            assert not calls, f"let penstock.apply call {calls} in {path}"
    assert _calls("import a\ndef fuse(): ...\nb = partial(fuse, 1)\nmodel.fuse()", {"fuse"}) == ["fuse"]


def test_classes_and_forwards_are_replaced_in_one_place() -> None:
    replaced = re.compile(r"\.(__class__|forward) = (?!forward$|True$|False$)", re.M)
    found = {str(one.relative_to(SOURCE)) for one in SOURCE.rglob("*.py") if replaced.search(one.read_text())}
    assert found == {"models/wrap.py"}


def test_every_setting_of_a_plan_is_applied() -> None:
    """By a step of the table, or by what runs the model: a new field is named here, or it is silently dropped."""
    from penstock.apply import INFERENCE, STEPS

    runs = "optimizer host_memory micro_batch accumulate dp sharding shard gather algorithm gradients overlap"
    applied = [*runs.split(), *dict.fromkeys(name for step in STEPS for name in step.settings)]
    assert sorted(applied) == sorted(field.name for field in fields(penstock.Plan))
    assert all(step.why and step.purposes for step in STEPS)
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert [step.name for step in STEPS if step.purposes == (INFERENCE,)][-1] == "join"


# Where each kernel of ours was measured to be faster than what it takes the place of: a file in benchmarks/results, and
# the key whose numbers are times as fast.
GAINS = {
    "native/adamw.cpp": ("adamw_cpu.json", "gain"),
    "native/attention.cpp": ("native_cpu.json", "gain"),
    "native/blocks.cpp": ("encoders_cpu.json", "penstock is faster by"),
    "native/dropout.cpp": ("dropout_cpu.json", "times_as_fast"),
    "native/fused.cpp": ("kernels_cpu.json", "compiled"),
    "native/grouped.cpp": ("experts_bfloat16_cpu.json", "loop"),
    "native/integers.cpp": ("int8_rivals_cpu.json", "penstock is faster by"),
    "native/losses.cpp": ("linear_cross_entropy_cpu.json", "times_as_fast_as_torch"),
    "triton/adamw.py": ("kernels_h200.json", "speedup"),
    "triton/logit_rows.py": ("linear_cross_entropy_h200.json", "times_as_fast_as_torch"),
    "triton/seeded_norm.py": ("kernels_h200.json", "speedup"),
}
# Kernels without a figure: measure them, or delete them.
UNMEASURED = {"triton/beam_step.py"}


def _numbers(tree: Any, key: str) -> Iterator[float]:
    """All numbers under a key, at whatever depth."""
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if name == key and isinstance(value, int | float):
            yield value
        elif isinstance(value, dict | list):
            yield from _numbers(value, key)


def test_every_kernel_was_measured_to_pay() -> None:
    kernels = SOURCE / "kernels"
    files = {path.relative_to(kernels).as_posix() for path in kernels.rglob("*.cpp")}
    for path in (kernels / "triton").glob("*.py"):
        if re.search(r"def \w+_kernel\(", path.read_text(encoding="utf-8")):
            files.add(path.relative_to(kernels).as_posix())
    assert files == GAINS.keys() | UNMEASURED, "say in GAINS where a kernel was measured"
    for kernel, (file, key) in GAINS.items():
        stored = json.loads((ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8"))
        assert max(_numbers(stored, key)) > 1.02, f"{kernel} has no gain in {file}"


FAMILIES = {
    node.name
    for path in (SOURCE / "config" / "model").glob("*.py")
    for node in ast.walk(_parsed(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
}


def _family_questions(text: str) -> list[int]:
    """Lines that ask for the class of a configuration, or for a `family` other than to name it in a message."""
    tree = _parsed(text)
    named = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            classes: list[ast.AST] = [node.args[1]]
        elif isinstance(node, ast.Compare):
            classes = [node.left, *node.comparators]
        else:
            classes = [node.cls] if isinstance(node, ast.MatchClass) else []
        words = {word for each in classes for word in re.findall(r"\w+", ast.unparse(each))}
        family = isinstance(node, ast.Attribute) and node.attr == "family" and node not in named
        if family or words & FAMILIES:
            lines.append(node.lineno)  # type: ignore[attr-defined]
    return sorted(lines)


def test_nobody_asks_for_the_family_of_a_model() -> None:
    """What a model is made of stands in its graph: see docs/decisions/0015."""
    assert {"ViTConfig", "MultimodalConfig", "UniversalConfig"} <= FAMILIES
    for path in SOURCE.rglob("*.py"):
        place = path.relative_to(SOURCE).as_posix()
        if not place.startswith(("config/", "models/convert/")):
            lines = _family_questions(path.read_text(encoding="utf-8"))
            assert not lines, f"ask the graph instead: {place}, lines {lines}"


def test_the_check_of_families_sees_all_places() -> None:
    text = (
        "isinstance(x, (int,\n ViTConfig))\ntype(x) is model.DecoderConfig\n"
        "match x:\n    case UniversalConfig(): pass\n"
        "if x.family == 'vit': pass\nissubclass(y, EncoderConfig)\n"
        "f'a model of the family {x.family}'\ndef f(x: ViTConfig) -> None: ...\nisinstance(x, RunConfig)\n"
    )
    assert _family_questions(text) == [1, 3, 5, 6, 7]


# Names that modules about operators compare, and why none is an operator's: what an operator is stands in its fields.
NAMES_THAT_DECIDE = {
    ("cli/plan_config.py", "f.name"): "a setting",
    ("ladder/trace.py", "e.router.name"): "a part of a model",
    ("planner/describe.py", "run.name"): "a run of the graph",
    ("planner/prediction.py", "machine.name"): "a machine",
    ("planner/rates.py", "s.name"): "what a probe has measured",
    ("planner/serve.py", "source.name"): "an input of the graph",
    ("planner/terms.py", "sample.name"): "what a probe has measured",
    ("planner/attention.py", "core.name"): "names the operators that take the place of a kernel",
}
_SPLITS = """
    count endswith find index partition removeprefix removesuffix replace rfind rpartition rsplit split startswith
"""
_LOOK_UPS = "fnmatch fnmatchcase fullmatch get match search setdefault"


def test_a_number_format_is_named_in_few_files() -> None:
    """Its row, its rounding, its class, and its layout in other programs' folders; all other code asks the row."""
    texts = {path.relative_to(SOURCE).as_posix(): path.read_text("utf-8") for path in SOURCE.rglob("*.py")}
    assert {name for name, text in texts.items() if '"int4"' in text} == {
        "config/formats.py", "config/theirs/read.py", "models/convert/compressed_tensors.py", "models/rounded.py",
        "products/convert.py", "products/integers.py",
    }  # fmt: skip


def _names_that_decide(text: str) -> set[str]:
    """Attributes `name` that are compared, taken apart, looked up or stored: all but those that name something else."""
    tree = _parsed(text)
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and node.attr == "name" and isinstance(node.ctx, ast.Load)):
            continue
        around = above[node]
        taken = isinstance(around, ast.Attribute) and around.attr in _SPLITS.split()
        while isinstance(around, ast.Tuple):
            around = above[around]
        called = isinstance(around, ast.Call) and isinstance(around.func, ast.Attribute)
        looked_up = called and ast.unparse(around.func).rpartition(".")[2] in _LOOK_UPS.split()
        kinds = ast.Compare | ast.Subscript | ast.Dict | ast.DictComp | ast.SetComp | ast.Assign | ast.Match
        if taken or looked_up or isinstance(around, kinds | ast.NamedExpr):
            names.add(ast.unparse(node))
    return names


def test_no_operator_is_known_by_its_name() -> None:
    decided: set[tuple[str, str]] = set()
    for path in SOURCE.rglob("*.py"):
        place, text = path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8")
        if place.startswith("planner/") or "penstock.planner.operators" in text:
            decided |= {(place, name) for name in _names_that_decide(text)}
    assert decided == set(NAMES_THAT_DECIDE), "give the operator a field that says it, and ask that"


def test_the_check_of_operators_sees_all_places() -> None:
    seen = (
        "a.name == 'x'", "'x' in b.name", "c.name.startswith('x')", "if d.name.partition('.')[2]: pass", "t[e.name]",
        "t.get(f.name, 0)", "{g.name: g}", "{h.name for h in ops}", "{i.name: i for i in ops}", "x, y = j.name, 1",
        "re.match('x', k.name)", "match l.name:\n    case 'x': pass", "(n := m.name)")  # fmt: skip
    for text in seen:
        assert len(_names_that_decide(text)) == 1, text
    for text in ("f'{op.name}.left'", "Op(op.name, op.kind)", "op._replace(name=op.name)", "op.name = 'x'"):
        assert not _names_that_decide(text), text
