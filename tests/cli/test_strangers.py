"""Scripts in the styles of other libraries, each in a process of its own: what `penstock run` made of them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from helpers.sweeps import sweep

SCRIPTS = Path(__file__).parent / "scripts"
TUNED = Path(__file__).parents[1] / "tune" / "scripts"
OTHERS = Path(__file__).parents[1] / "precision" / "scripts"
pytestmark = pytest.mark.timeout(600)


def _run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", *words], cwd=folder, capture_output=True, text=True, timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def _written(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(textwrap.dedent(text), encoding="utf-8")
    return "script.py"


STEP = """\
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
"""
ORDERS = {
    "looked up, as transformers does": "import importlib.util\nassert importlib.util.find_spec('torch')\nimport torch",
    "looked up often": (
        "import importlib.util, pkgutil\nfor _ in range(3):\n    spec = importlib.util.find_spec('torch')\n"
        "assert type(spec.loader).__name__ == 'SourceFileLoader' and spec.loader.get_code('torch')\n"
        "assert any(m.name == 'torch' for m in pkgutil.iter_modules())\nimport torch"
    ),
    "looked up in threads": (
        "import importlib.util, threading\n"
        "threads = [threading.Thread(target=importlib.util.find_spec, args=('torch',)) for _ in range(8)]\n"
        "[t.start() for t in threads], [t.join() for t in threads]\nimport torch"
    ),
    "a part first": "from torch.nn import functional\nimport torch",
    "by hand": (
        "import importlib.util, sys\nspec = importlib.util.find_spec('torch')\n"
        "torch = sys.modules['torch'] = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(torch)"
    ),
}


@pytest.mark.parametrize("order", sweep(ORDERS, ["looked up, as transformers does"]))
def test_torch_may_be_looked_up_before_it_is_imported(order: str, tmp_path: Path) -> None:
    done = _run(
        "run", "--strict", _written(tmp_path, ORDERS[order] + "\n" + textwrap.dedent(STEP)), folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert (
        "accelerated Linear (68 weights), trained by SGD (2 tensors): 1 of 1 matrix product in bf16"
        in done.stderr
    )


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("x = 1", "the script did not import torch"),
        ("import torch\ntorch.ones(2)", "the script made no optimizer of torch.optim"),
        pytest.param(
            "import torch\nwith torch.autocast('cpu', torch.bfloat16):\n" + STEP,
            "it runs under the script's own torch.autocast",
            marks=pytest.mark.sweep,
        ),
    ],
)  # fmt: skip
def test_nothing_accelerated_is_said_and_has_a_code(body: str, why: str, tmp_path: Path) -> None:
    body = body if body.endswith(STEP) else textwrap.dedent(body)
    for options, code in (((), 0), (("--strict",), 9)):
        done = _run("run", *options, _written(tmp_path, body), folder=tmp_path)
        last = done.stderr.strip().splitlines()[-1]
        assert (done.returncode, last.startswith("penstock: nothing was accelerated: ")) == (code, True), (
            done.stderr
        )
        assert why in last
        if "torch" in body:
            break  # one start of torch is enough: the code comes from the same line


KINDS: dict[str, tuple[Path, str, str]] = {
    "glue": (
        TUNED,
        "run_glue.py --max_steps 4 --output_dir OUT",
        "accelerated BertForSequenceClassification",
    ),
    "accelerate": (TUNED, "accelerated.py 4", "accelerated Sequential"),
    "lora": (SCRIPTS, "lora.py 4 OUT", "accelerated PeftModelForCausalLM"),
    "nanogpt": (TUNED, "nanogpt.py --max_iters=3 --compile=True --backend=eager", "accelerated GPT"),
    "workers": (SCRIPTS, "workers.py --save OUT", "accelerated Net"),
    "spawned workers": (SCRIPTS, "workers.py --workers spawn", "accelerated Net"),
    "timm": (TUNED, "timm_train.py 4", "accelerated "),
    "lightning": (OTHERS, "trainer_with_closures.py automatic 1 4", "accelerated Net"),
    "gan": (OTHERS, "gan.py", "accelerated Sequential"),
}


@pytest.mark.parametrize(
    ("kind", "plan"), sweep(itertools.product(KINDS, (False, True)), [("workers", False)], [("gan", True)])
)
def test_kinds_of_scripts(kind: str, plan: bool, tmp_path: Path) -> None:
    folder, words, said = KINDS[kind]
    options = ["--plan", "precision=O1 dtype=bf16 matmul=high"] if plan else ["--precision", "O1"]
    out = tmp_path / "out"
    out.mkdir()
    line = [str(out) if word == "OUT" else word for word in words.split()]
    done = _run("run", "--strict", *options, str(folder / line[0]), *line[1:], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    assert " in bf16" in done.stderr.split(said)[1].splitlines()[0]
    assert ("applied matmul=high" in done.stderr) == plan
    if kind == "workers":
        assert sorted(path.name for path in out.iterdir()) == ["exit.pt", "thread.pt"]
    if kind == "lora":
        assert (out / "adapter_model.safetensors").exists()


def test_processes_that_a_script_starts_run_as_they_are(tmp_path: Path) -> None:
    done = _run("run", "--strict", str(SCRIPTS / "children.py"), "spawn", folder=tmp_path)
    assert done.returncode == 9, done.stderr
    assert "accelerated Linear" not in done.stderr
    assert "programs and processes that it starts run as they are: start ranks with torchrun" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "run_glue.py --max_steps 2 --output_dir OUT --use_cpu True --bf16",
        pytest.param("sft_in_style.py --output_dir OUT --use_cpu True", marks=pytest.mark.sweep),
    ],
)
def test_a_trainer_that_is_mixed_already_is_told_what_to_type(line: str, tmp_path: Path) -> None:
    name, *words = line.replace("OUT", str(tmp_path / "out")).split()
    folder = SCRIPTS if name.startswith("sft") else TUNED
    done = _run("run", str(folder / name), *words, folder=tmp_path)
    assert done.returncode == 2
    assert "--bf16 False" in done.stderr
    assert f"{name}:" in done.stderr
    if name.startswith("sft"):
        words += ["--bf16", "False", "--max_steps", "2", "--report_to", "none"]
        done = _run("run", "--strict", str(SCRIPTS / name), *words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "accelerated LlamaForCausalLM" in done.stderr


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_exit_functions_and_threads_run_before_the_end(
    ranks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under torchrun, where the process ends at once afterwards, and with the code of --strict."""
    monkeypatch.setenv("WORLD_SIZE", ranks)
    script = """\
        import atexit, threading, time
        from concurrent.futures import ThreadPoolExecutor
        atexit.register(print, "exit function")
        pool = ThreadPoolExecutor(1)  # never shut down: its thread waits until the interpreter ends
        pool.submit(time.sleep, 0.1)
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        print("last line")
    """
    for options, code in (((), 0), (("--strict",), 9)):
        done = _run("run", *options, _written(tmp_path, script), folder=tmp_path)
        assert (done.returncode, done.stdout.splitlines()) == (code, ["last line", "thread", "exit function"])
        assert done.stderr.count("penstock: nothing was accelerated: ") == 1


@pytest.mark.parametrize(
    "kind", sweep(["glue", "accelerate", "lora", "nanogpt", "lightning", "workers", "gan"], (), slow=["gan"])
)
def test_tune_takes_the_same_scripts(kind: str, tmp_path: Path) -> None:
    folder, words, _ = KINDS[kind]
    line = words.replace("=3", "=100000").replace(" 4", " 100000").replace("OUT", str(tmp_path)).split()
    line += ["--epochs", "100000"] if kind == "workers" else []
    options = ["--budget", "40", "--rungs", "matmul", "--output", str(tmp_path / "tuned")]
    done = _run("tune", *options, str(folder / line[0]), *line[1:], folder=tmp_path)
    if kind == "gan":
        assert done.returncode == 2
        assert "steps with several optimizers" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert f"{line[0]}" in done.stdout.strip().splitlines()[-1]
        assert "weights, trained by" in done.stdout
