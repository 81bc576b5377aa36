"""The README and the pages of docs/ are executed.

What a fenced block's first word means:

- `python`: run, in a folder of its own per page. The blocks of a page share their names, from top to bottom.
- `console`: each line that starts with `$ penstock` is run, in the same folder; it must end with code 0, or with the
  one that a comment at its end names (`# exit 2`). Lines without `$` are what a reader sees, and are not compared.
- `bash`: each line that starts with `penstock` is parsed, so that commands which take long or need data still name only
  verbs and options that exist. Among the slow tests it is run in a small form (`helpers.small_forms`).
- anything else is text.

Trainings take `STEPS` steps at most where nothing else on the page depends on them, ladders' rounds are short, and a
forecast of serving is of `REQUESTS` requests.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shlex
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

import penstock.ladder
from helpers import forked
from helpers.modules import loaded
from helpers.served import served
from helpers.small_forms import lay_out, small_form
from helpers.spawn import spawn
from helpers.sweeps import sweep
from penstock.cli import app, main
from penstock.cli.launch import names_no_degree, python_arguments
from penstock.config.describe import default_word
from penstock.config.kinds import field_types
from penstock.config.plan import EFFECTS, Plan, effect_of
from penstock.config.recipes import load_run, require_startable
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, ExitCode
from penstock.launch import ELASTIC
from penstock.serve.serve import OPENER

ROOT = Path(__file__).parent.parent
SLOW = (
    "checkpoints", "deploy", "fine-tune", "fine-tune-text", "fuse", "ladder", "own-model", "translation",
)  # fmt: skip
"""Pages whose commands take some seconds."""
REST = "chat", "language-model", "launch", "place-experts", "train"
"""Those that take longest, and those whose commands do in their small form."""
REST_SHOWN = (
    "coming-from", "compress", "distributed", "experts", "export", "generate", "ladder", "quick-start", "tune",
    "unified",
)  # fmt: skip
STEPS = 2
REQUESTS = "50"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
_FENCE = re.compile(
    r"^(?P<fence>`{3,})(?P<kind>\w*)[^\n]*\n(?P<body>.*?)^(?P=fence)$", re.DOTALL | re.MULTILINE
)


@dataclasses.dataclass(frozen=True)
class Block:
    kind: str
    body: str
    line: int
    """Of the block's first line in its page, from 1."""


def blocks(text: str) -> Iterator[Block]:
    """Every fenced block of a page."""
    for found in _FENCE.finditer(text):
        yield Block(found["kind"], found["body"], text.count("\n", 0, found.start("body")) + 1)


def commands(block: Block, prompt: str) -> Iterator[tuple[str, int, int]]:
    """Each penstock command after `prompt`, the exit code it is to end with, and its line in the page."""
    joined = block.body.replace("\\\n", "  ")
    for offset, line in enumerate(joined.splitlines()):
        if not line.startswith(f"{prompt}penstock"):
            continue
        command, _, comment = line.removeprefix(prompt).partition(" #")
        code = re.fullmatch(r"\s*exit (\d+)\s*", comment)
        yield command, int(code[1]) if code else 0, block.line + offset


def shortened(words: list[str], page: str) -> list[str]:
    """The words of a training of few steps, unless its page names steps elsewhere; of a forecast of few requests."""
    if words[0] == "deploy" and "--count" not in words:
        return [*words, "--count", REQUESTS]
    if "--recipe.steps" not in words or "checkpoint_every" in page or '"recipe.steps"' in page:
        return words
    words = list(words)
    at = words.index("--recipe.steps") + 1
    words[at] = str(min(int(words[at]), STEPS))
    for named in {"--recipe.warmup_steps", "--recipe.warmup_share"} & {*words}:
        words[words.index(named) + 1] = "0"
        return words
    return [*words, "--recipe.warmup_steps", "0"]


def run_page(page: Path, text: str) -> None:
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks(text):
        if block.kind == "python":
            # Empty lines put the block where it stands in the page, so that tracebacks name the page's lines.
            exec(compile("\n" * (block.line - 1) + block.body, str(page), "exec"), names)
        elif block.kind == "console":
            for command, code, line in commands(block, "$ "):
                words = shortened(shlex.split(command)[1:], text)
                assert main(words) == code, f"{page}:{line}: {command}"
        elif block.kind == "bash":
            for command, _, line in commands(block, ""):
                try:
                    app.parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)
                except Exception as error:
                    raise AssertionError(f"{page}:{line}: {command}: {error}") from error


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ladders and tuned scripts end their races undecided."""
    for contenders in ("ladder.measure.Models", "tune.script.Script"):
        monkeypatch.setattr(f"penstock.{contenders}.most_rounds", 2)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("known_machine", "hurried")
@pytest.mark.parametrize(
    "page",
    sweep(
        PAGES,
        [page for page in PAGES if page.stem not in SLOW + REST],
        [page for page in PAGES if page.stem in SLOW],
    ),
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        penstock.ladder,
        "ladder",
        functools.partial(penstock.ladder.ladder, round_seconds=0.01),
        raising=False,
    )
    run_page(page, page.read_text(encoding="utf-8"))


_OF_WEIGHTS = {"--from", "--init_from", "--recipe.teacher", "--config"}
"""Options of trainings that read what an earlier command writes."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_trainings_have_more_steps_than_warmup_as_they_are_written(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shortened` and `small_form` leave the warm-up out."""
    runs: list[RunConfig] = []

    def only_read(config: RunConfig, **options: object) -> None:
        runs.append(config)
        raise ConfigError("read")

    monkeypatch.setattr("penstock.train.train", only_read)
    for block in blocks(page.read_text(encoding="utf-8")):
        for command, _, line in commands(block, "$ " if block.kind == "console" else ""):
            words = shlex.split(command)[1:]
            if words[:1] == ["train"] and "--recipe.steps" in words and _OF_WEIGHTS.isdisjoint(words):
                assert main(words) == ExitCode.CONFIG, f"{page}:{line}"
                recipe = runs.pop().recipe
                assert recipe.steps is not None
                assert recipe.warmup(recipe.steps) < recipe.steps, f"{page}:{line}"


def _shown(page: Path) -> list[tuple[str, int]]:
    """Every penstock command of the page's bash blocks, with its line."""
    found = [block for block in blocks(page.read_text(encoding="utf-8")) if block.kind == "bash"]
    every = [(command, line) for block in found for command, _, line in commands(block, "")]
    return [(command, line) for command, line in every if shlex.split(command)[1] != "serve"]  # does not end


def _once() -> dict[Path, list[tuple[str, int]]]:
    """The commands to run of each page. Those that are the same in their small form are run for the first page."""
    known: set[tuple[str, ...]] = set()
    shown: dict[Path, list[tuple[str, int]]] = {}
    for page in PAGES:
        for command, line in _shown(page):
            words = small_form(shlex.split(command)[1:], Path("/"))
            if "--output" in words and words[0] != "probe":
                at = words.index("--output")
                words = words[:at] + words[at + 2 :]
            if tuple(words) not in known:
                shown.setdefault(page, []).append((command, line))
            known.add(tuple(words))
    del shown[PAGES[0]]  # the README's follow each other, in a test of their own
    return shown


SHOWN = _once()


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands read."""
    folder = tmp_path_factory.mktemp("pages")
    lay_out(folder)
    pack = ["pack", str(folder / "photos"), str(folder / "photos.pack"), "--size", "64"]
    assert main(pack) == 0
    return folder


def _on_a_rank(words: list[str], replicas: bool) -> int:
    if replicas:  # the launcher's word that the Plan follows the number of ranks
        os.environ[ELASTIC] = "1"
    # torch warns of its own deprecated names where a library uses them; of collectives, that would be us.
    warnings.filterwarnings("error", "(?s).*(all_gather|reduce_scatter)", FutureWarning)
    return main(words)


def _end(words: list[str]) -> tuple[int, str]:
    """The exit code of `penstock WORDS`, and its output where it ran in a process of its own.

    Ranks of our own verbs come from `helpers.spawn`, and the agent that starts them is tested in `tests/launch`;
    programs of the reader's own are given a process.
    """
    if words[0] == "launch":
        _, bound, *_ = app.parse_args(words, exit_on_error=False, print_error=False)
        ranks = bound.kwargs["settings"].ranks
        program = python_arguments(words[words.index("--") + 1 :])
        if ranks > 1:
            assert program[:2] == ["-m", "penstock"]
            replicas = names_no_degree(program)
            return max(spawn(_on_a_rank, ranks, program[2:], replicas, group=False, timeout=200)), ""
    if words[0] in ("launch", "run"):
        code, out, error = forked.run_python(["-m", "penstock", *words], Path())
        return code, out[-1000:] + error[-2000:]
    return main(words), ""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("known_machine", "hurried")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning")
@pytest.mark.parametrize(
    "page", sweep(SHOWN, [page for page in SHOWN if page.stem not in REST_SHOWN]), ids=lambda page: page.stem
)
def test_commands_that_are_only_shown_run_in_a_small_form(
    page: Path, laid_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "page"
    shutil.copytree(laid_out, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    for module in ("penstock.tune.process", "penstock.launch.local"):
        monkeypatch.setattr(f"{module}.subprocess", forked.instead())
    for number, (command, line) in enumerate(SHOWN[page]):
        words = small_form(shlex.split(command)[1:], folder)
        if words[0] == "train" and "--output" not in words:
            words += ["--output", f"runs/{number}"]
        code, output = _end(words)
        assert code == 0, f"{page}:{line}: {shlex.join(words)}\n{output}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("known_machine", "hurried")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_the_readme_from_top_to_bottom(
    laid_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a reader types it, in one folder: runs/latest is what the last command has trained, and what a command that
    is shown with its output prints."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shutil.copytree(laid_out, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("penstock.tune.process", "penstock.launch.local"):
        monkeypatch.setattr(f"{module}.subprocess", forked.instead())
    [(command, printed)] = re.findall(r"^ {4}\$ penstock (.*)\n((?: {4}.*\n)+)", text, re.MULTILINE)
    assert main(shlex.split(command)) == 0
    out = capsys.readouterr().out
    for line in printed.splitlines():
        assert line[4:] in out
    verbs = []
    for block in blocks(text):
        if block.kind == "python":
            exec(compile(block.body, "README.md", "exec"), {})
        for command, _, line in commands(block, "") if block.kind == "bash" else ():
            words = small_form(shlex.split(command)[1:], tmp_path)
            verbs.append(words[0])
            if words[0] == "serve":
                with served(Path("runs/latest").resolve(), opener=OPENER) as running:
                    status, answer, _ = running.ask("/v1/completions", {"prompt": "import", "max_tokens": 4})
                assert status == 200, answer
                continue
            code, output = _end(words)
            assert code == 0, f"README.md:{line}: {shlex.join(words)}\n{output}"
    assert len(verbs) >= 12


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 700


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page} links to {target}, which is not there"


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = set(re.findall(r"\]\((\d{4}-[^)]+)\)", (folder / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.name for path in folder.glob("[0-9]*.md")}


@pytest.mark.parametrize(
    "text",
    [
        "```python\nx = 1\n```\ntext\n```python\nassert x == 2\n```\n",
        "```console\n$ penstock train --plan precision=O7\n```\n",
        "```console\n$ penstock --version  # exit 2\n```\n",
        "```bash\npenstock probe --quickly\n```\n",
        "```bash\npenstock prob \\\n  --quick\n```\n",
    ],
)
def test_a_wrong_page_fails(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError):
        run_page(tmp_path / "page.md", text)


def test_a_right_page_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "```python\nx = 1\n```\n```python\nassert x == 1\n```\n```text\nnonsense(\n```\n"
        "```console\n$ penstock --version\n0.1.0\n$ make test\n$ penstock --nonsense  # exit 2\n```\n"
        "```bash\npenstock probe \\\n  --quick\nmake demo\n```\n"
    )
    run_page(tmp_path / "page.md", text)


def test_run_files_are_accepted(tmp_path: Path) -> None:
    """Every file of the page is read as a run, could start, and says only what is none of the defaults already."""
    page = ROOT / "docs" / "how-to" / "run-files.md"
    files = [block for block in blocks(page.read_text(encoding="utf-8")) if block.kind in ("toml", "yaml")]
    assert len(files) >= 10
    for block in files:
        path = tmp_path / f"{block.line}.{block.kind}"
        path.write_text(block.body, encoding="utf-8")
        try:
            config = load_run(file=path)
            require_startable(config)
        except ConfigError as error:
            raise AssertionError(f"{page}:{block.line}: {error}") from error
        assert block.body.count("#") >= 1, f"{page}:{block.line} explains nothing"
        assert config.output != RunConfig().output


def test_every_field_of_a_plan_has_its_section() -> None:
    text = (ROOT / "docs" / "reference" / "plan.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    assert list(sections) == [field.name for field in dataclasses.fields(Plan)], (
        "one section per field, in order"
    )
    for field in dataclasses.fields(Plan):
        section = sections[field.name]
        effect = EFFECTS[effect_of(field.name)]
        assert f"Default: `{default_word(field.default)}`. {effect}" in " ".join(section.split()), field.name
        kind = field_types(Plan)[field.name]
        for value in get_args(kind) if get_origin(kind) is Literal else ():
            assert f"| `{value}` |" in section, f"{field.name}={value} is not explained"


def _tool(name: str) -> Any:
    """A program of tools/, as a module."""
    return loaded(ROOT / "tools" / f"{name}.py")


def test_the_reference_of_settings_is_up_to_date() -> None:
    reference = _tool("reference")
    assert reference.PATH.read_text(encoding="utf-8") == reference.page(), "run make reference"


def test_the_picture_of_the_readme_is_of_what_was_measured() -> None:
    gains = _tool("gains")
    assert gains.PATH.read_text(encoding="utf-8") == gains.picture(), "run make reference"
    states = {bar.label: bar.state for bar in gains.bars()}
    assert states["ViT-S/16, 8 images, CPU with AVX2 only"] == "unproven", (
        "nothing within the noise is drawn as a gain"
    )
    assert list(states.values()).count("kept") >= 5


RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_cited_measurements_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    cited = re.findall(r"(?<!--output )benchmarks/results/(\w+\.json)|`(\w+_(?:cpu|amx|h200)\.json)`", text)
    for name in map("".join, cited):
        measured = (RESULTS / name).read_text(encoding="utf-8")
        assert '"machine"' in measured, f"{name} does not say on which machine it was measured"


def test_the_table_of_denoising_experts_is_what_its_code_computes(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "how-to" / "experts.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "dit-xl2" in block]
    exec(code, {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 5
    for line in printed:
        name, parameters, seconds, memory, sampling = line.rsplit(" ", 4)
        row = (
            f"| {name} | {int(parameters) / 1e9:.3f} B | {1e3 * float(seconds):.0f} ms "
            f"| {int(memory) / 2**30:.1f} GiB | {float(sampling):.1f} s |"
        )
        assert row in page


def test_tables_of_fused_operators_are_what_was_measured() -> None:
    page = (ROOT / "docs" / "how-to" / "fuse.md").read_text(encoding="utf-8")
    cells = json.loads((RESULTS / "step_parts_cpu.json").read_text(encoding="utf-8"))["cells"]
    columns = [
        next(cell for key, cell in cells.items() if key.startswith(f"{model}, ") and "AMD EPYC AVX512" in key)
        for model in ("vit-s16", "bert-base", "gpt2", "marian-base")
    ]
    kinds = ("products", "attention", "between products")
    named = [*(f"{kind}, {way}" for kind in kinds for way in ("forward", "backward")), "optimizer"]
    for name in (*named, "the rest", "whole step"):
        words = []
        for cell in columns:
            parts = [one for one in cell["parts"] if name == "whole step" or one["name"] == name]
            parts = [it for it in cell["parts"] if it["name"] not in named] if name == "the rest" else parts
            took, least = (
                sum(one[key] or 0.0 for one in parts) for key in ("milliseconds", "least_milliseconds")
            )
            words.append(f"{took:,.0f} of {least:,.0f}")
        assert f"| {name} | {' | '.join(words)} |\n" in page, words
    gains = []
    for cell in columns:
        parts = {it["name"]: (it["milliseconds"], it["least_milliseconds"] or 0.0) for it in cell["parts"]}
        bound = sum(
            took if name.startswith("products") else min(took, least) for name, (took, least) in parts.items()
        )
        gains.append(f"{sum(took for took, _ in parts.values()) / bound:.2f}")
    assert f"| gain if all but products took no more than its least | {' | '.join(gains)} |\n" in page, gains
    races = json.loads((RESULTS / "native_one_thread_cpu.json").read_text(encoding="utf-8"))["cells"]
    titles = {"gpt2": "GPT-2", "bert-base": "BERT-base", "vit-s16": "ViT-S", "marian-base": "Marian-base"}
    for cell in races.values():
        ways = [
            f"{way['gain']:.2f} ({' to '.join(f'{end:.2f}' for end in way['interval'])})"
            for way in cell["ways"].values()
        ]
        assert f"| {titles[cell['model']]} | {' | '.join(ways)} | {cell['limit']:.2f} |\n" in page, ways
    rows: dict[tuple[str, str, int], list[str]] = {}
    for one in json.loads((RESULTS / "kernels_cpu.json").read_text(encoding="utf-8"))["times"]:
        gains = [f"{one['gains'][form]:.2f}" for form in ("eager", "compiled")]
        rows.setdefault((one["operator"], one["variant"], one["rows"]), []).extend(gains)
    for (operator, variant, count), words in rows.items():
        assert f"| `{operator}` | `{variant}` | {count:,} | {' | '.join(words)} |\n" in page, (variant, words)


def test_the_table_of_int8_beside_other_programs_is_what_was_measured() -> None:
    page = (ROOT / "docs" / "how-to" / "quantise.md").read_text(encoding="utf-8")
    for cell in json.loads((RESULTS / "int8_rivals_cpu.json").read_text(encoding="utf-8"))["cells"]:
        ways = cell["ways"]
        gains = [
            f"{ways[rival]['penstock is faster by']:.2f}" if rival in ways else ""
            for rival in ("ours-bf16", "onnxruntime", "ctranslate2")
        ]
        milliseconds = f"{1e3 * ways['penstock']['seconds']:,.0f}"
        words = [cell["model"], cell["length"], str(cell["batch"]), milliseconds, *gains]
        assert f"| {' | '.join(words)} |\n" in page, words


def test_the_table_of_forecasts_of_inference_is_what_was_measured() -> None:
    page = (ROOT / "docs" / "how-to" / "quantise.md").read_text(encoding="utf-8")
    cells = json.loads((RESULTS / "predicted_inference_cpu.json").read_text(encoding="utf-8"))["cells"]
    named = {(cell["model"], cell["work"], cell["weights"], cell["batch"]) for cell in cells}
    works = [(model, "pass") for model in ("bert-base", "vit-s16", "minilm", "gpt2")] + [
        ("gpt2", "generation")
    ]
    assert named == {(*one, form, batch) for one in works for form in ("int8", "packed") for batch in (1, 8)}
    for cell in cells:
        error = cell["predicted"] / cell["measured"] - 1
        assert abs(error) <= 0.15, cell
        times = f"{1e3 * cell['measured']:,.1f} | {1e3 * cell['predicted']:,.1f} | {100 * error:+.0f} %"
        names = f"{cell['model']} | {cell['work']} | {cell['weights']} | {cell['batch']}"
        assert f"| {names} | {times} |\n" in page, cell


def test_the_table_of_forecasts_of_fused_plans_is_what_was_measured() -> None:
    page = (ROOT / "docs" / "how-to" / "fuse.md").read_text(encoding="utf-8")
    for case in json.loads((RESULTS / "predicted_fused_cpu.json").read_text(encoding="utf-8"))["cases"]:
        error, plan = case["step_error"]["median"], case["plan"].replace(" host_memory=keep", "")
        assert abs(error) <= 0.1
        errors = f"{100 * error:+.1f} % | {100 * case['memory_error']:+.1f} %"
        row = f"{1e3 * case['step_seconds']['measured']:,.0f} | {errors} |"
        assert f"| {case['model']} | `{plan}` | {row}\n" in page, row


def test_the_table_of_kernels_on_a_gpu_is_what_was_measured() -> None:
    page = (ROOT / "docs" / "how-to" / "fuse-gpu.md").read_text(encoding="utf-8")
    removed = {"norm to int8", "experts"}  # kernels that lost, or that nothing reached
    wrong = {"attention"}  # one kernel timed three times, as the page says
    for cell in json.loads((RESULTS / "kernels_h200.json").read_text(encoding="utf-8"))["cells"]:
        if cell["section"] in removed | wrong:
            continue
        times = cell["milliseconds"]
        best, ours = times[cell["best_other"]], times[cell["best_other"]] / cell["speedup"]
        words = f"| {cell['best_other']} | {best:.3f} | {ours:.3f} | {cell['speedup']:.2f} |"
        assert re.search(rf"^\| {cell['section']} \|.*{re.escape(words)}", page, re.MULTILINE), words
