"""Whole scripts that know nothing of Penstock, run by `penstock run`: what ran in which type, and what came out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from helpers.sweeps import sweep
from helpers.watched import ProductDtypes
from penstock.cli import main
from penstock.errors import ConfigError
from penstock.script import Interception

SCRIPTS = Path(__file__).parent / "scripts"
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
LEVELS = [("O1", "bf16"), ("O2", "bf16"), ("O3", "bf16"), ("O1", "fp16"), ("O2", "fp16")]


@dataclass
class Outcome:
    code: Any
    found: dict[str, Any]
    """What the script printed."""
    told: str
    """What `penstock run` said on stderr."""
    products: dict[torch.dtype, int]


def _run(
    capsys: pytest.CaptureFixture[str], script: str, *arguments: str, level: str = "O0", dtype: str = "auto"
) -> Outcome:
    """In this process."""
    options = ["--precision", level] + ([] if level == "O0" else ["--dtype", dtype])
    capsys.readouterr()
    with ProductDtypes() as products:
        try:
            code: Any = main(["run", *options, str(SCRIPTS / script), *arguments])
        except SystemExit as end:
            code = end.code
    out, told = capsys.readouterr()
    found = json.loads(out.splitlines()[-1]) if out else {}
    return Outcome(code, found, told, dict(products.counts))


def _mostly_half(outcome: Outcome, dtype: str) -> None:
    assert outcome.products.get(HALF[dtype], 0) > 3 * outcome.products.get(torch.float32, 0), outcome.products


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_bare_loop(capsys: pytest.CaptureFixture[str], tmp_path: Path, level: str, dtype: str) -> None:
    plain = _run(capsys, "bare.py")
    saved = tmp_path / "weights.pt"
    half = _run(
        capsys, "bare.py", "--save", str(saved), "--precision", "its own", level=level, dtype=dtype
    )  # fmt: skip
    assert (plain.code, half.code) == (0, 0)
    assert set(plain.products) == {torch.float32}
    assert plain.told == ""
    assert set(half.products) == {HALF[dtype]}
    assert plain.found["accuracy"] == half.found["accuracy"] == 1.0
    assert half.found["loss"] == pytest.approx(plain.found["loss"], rel=0.2)  # O3 0.14, others 0.01
    assert half.found["said"] == "its own"
    lines = half.told.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"penstock: {level} in {dtype}: ")
    assert lines[1] == (
        "penstock:   accelerated Sequential (226 weights), trained by AdamW (6 tensors): "
        f"2 of 2 matrix products in {dtype}"
    )
    stored = torch.load(saved, weights_only=True)
    assert {value.dtype for value in stored["model"].values()} == {torch.float32}
    if level != "O3":
        assert {v.dtype for s in stored["optimizer"]["state"].values() for v in s.values()} == {torch.float32}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", ["LBFGS", "SGD"])
def test_closure(capsys: pytest.CaptureFixture[str], kind: str, level: str) -> None:
    half = _run(capsys, "closure.py", kind, level=level)
    assert half.code == 3
    _mostly_half(half, "bf16")
    assert half.found["first"] == pytest.approx(12.7097, rel=1e-3)
    assert half.found["loss"] < 1e-3  # fp32 1e-10: the outputs have bf16's three digits


def test_closure_in_fp16(capsys: pytest.CaptureFixture[str]) -> None:
    half = _run(capsys, "closure.py", "SGD", level="O1", dtype="fp16")
    assert half.code == 3
    assert half.found["loss"] < 1e-4
    refused = _run(capsys, "closure.py", "LBFGS", level="O1", dtype="fp16")
    assert refused.code == 2
    assert "LBFGS may call its closure several times" in refused.told
    assert "closure.py:29" in refused.told


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
@pytest.mark.parametrize("kind", ["automatic", "manual"])
def test_trainers_that_give_steps_a_closure(
    capsys: pytest.CaptureFixture[str], kind: str, level: str, dtype: str
) -> None:
    """The first forward pass is inside the first step, or every closure does nothing."""
    plain = _run(capsys, "trainer_with_closures.py", kind, "1", "30")
    half = _run(capsys, "trainer_with_closures.py", kind, "1", "30", level=level, dtype=dtype)
    assert (plain.code, half.code) == (0, 0)
    _mostly_half(half, dtype)
    assert len(half.found["losses"]) == 30, "each closure is called once"
    # From 0.76 to 0.01: a step that is lost shows at once.
    assert half.found["losses"][:5] == pytest.approx(plain.found["losses"][:5], rel=0.02)
    assert half.found["losses"][-1] < 0.05
    if dtype == "fp16":
        large = _run(capsys, "trainer_with_closures.py", kind, "1e4", "2", level=level, dtype=dtype)
        assert large.found["finite"], "the very first step overflows, and must be skipped"
        assert large.found["losses"][0] == large.found["losses"][1]


@pytest.mark.parametrize("inside", ["model", "layers"])
def test_a_call_that_lightning_redirects_is_taken_inside(inside: str) -> None:
    """Under DDP Lightning replaces `forward` on the instance until its training step is reached."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Any:
            return self.layers(x)

        def training_step(self, x: Tensor) -> Any:
            return (self if inside == "model" else self.layers)(x)

    def redirected(x: Tensor) -> Any:
        model.forward = before
        return model.training_step(x)

    redirected.__module__ = "pytorch_lightning.strategies.strategy"
    model: Any = Net()
    told: list[str] = []
    with Interception(precision="O1", dtype="bf16", say=told.append):
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            before, model.forward = model.forward, redirected
            with ProductDtypes() as products:
                model(torch.ones(2, 4)).sum().backward()
            assert set(products.counts) == {torch.bfloat16}
            optimizer.step()
    assert f"accelerated {'Net' if inside == 'model' else 'Linear'} (5 weights)" in told[0]
    model.forward = lambda x: x  # what replaces it for good is refused as ever
    with pytest.raises(ConfigError, match="was replaced on the instance"):
        penstock.accelerate(model, precision="O1", dtype="bf16")


@pytest.mark.parametrize("dtype", sweep(["bf16", "fp16"], ["bf16"]))
def test_two_models_and_optimizers(capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    half = _run(capsys, "gan.py", level="O1", dtype=dtype)
    assert half.code == 0
    # The frozen layer, three of each step's products and their gradients, is nobody's and stays fp32.
    assert half.products[HALF[dtype]] > 2 * half.products[torch.float32]
    assert half.found["distance"] < 0.3  # from 2.2; fp32 0.12
    assert half.told.count("accelerated Sequential") == 2
    assert half.told.count("left alone Linear: no optimizer trains it") == 1


@pytest.mark.parametrize("dtype", sweep(["bf16", "fp16"], ["bf16"]))
def test_accumulation_and_two_models_of_one_optimizer(capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    plain = _run(capsys, "accumulate.py")
    half = _run(capsys, "accumulate.py", level="O1", dtype=dtype)
    assert half.code == 0
    _mostly_half(half, dtype)
    assert half.found["loss"] < 0.5 * half.found["first"]
    assert half.found["first"] == pytest.approx(plain.found["first"], rel=2e-3)
    assert half.found["norm"] == pytest.approx(plain.found["norm"], rel=1e-2)
    assert half.found["clipped"] == pytest.approx(0.2, rel=1e-2)
    # What was kept in the middle and loaded at the end is the same model, to the bit but for the split in two.
    assert half.found["again"] == pytest.approx(half.found["at10"], rel=1e-4)
    assert half.found["kinds"] == ["torch.float32"]
    assert (
        "accelerated Encoder (4,008 weights), Linear (425 weights), trained by SGD (8 tensors)" in half.told
    )
    assert "left alone" not in half.told


class Spy:
    """A compiler that notes the types of the products in its graphs, and then runs them as they are."""

    def __init__(self) -> None:
        self.products: list[torch.dtype] = []
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func

        self.graphs += 1
        for node in graph.graph.nodes:
            if getattr(node.target, "__name__", "").partition(".")[0] in ("mm", "addmm"):
                self.products.append(node.meta["val"].dtype)
        return make_boxed_func(graph.forward)


@pytest.mark.parametrize("where", ["before", "after", "inplace", "function"])
def test_compile(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    import torch._dynamo
    from torch._dynamo.backends.common import aot_autograd

    level, dtype = ("O2", "fp16") if where == "after" else ("O1", "bf16")
    spy = Spy()
    torch._dynamo.reset()
    registry = torch._dynamo.backends.registry
    monkeypatch.setitem(registry._BACKENDS, "spy", None)
    monkeypatch.setitem(registry._COMPILER_FNS, "spy", aot_autograd(fw_compiler=spy, bw_compiler=spy))
    try:
        capsys.readouterr()
        options = ["--precision", level, "--dtype", dtype]
        code = main(["run", *options, str(SCRIPTS / "compiled.py"), where, "--backend", "spy"])
    finally:
        torch._dynamo.reset()
    out, told = capsys.readouterr()
    found = json.loads(out)
    assert code == 0
    assert found["first"] == pytest.approx(2.2794, rel=1e-3)
    assert found["loss"] == pytest.approx(0.1315, rel=2e-2)
    assert "accelerated Sequential (2,208 weights)" in told
    if where == "function":  # its first step shows that compiled code calls the model, and is fp32
        assert spy.graphs == 4
        assert spy.products[: len(spy.products) // 2] == [torch.float32] * (len(spy.products) // 2)
        assert set(spy.products[len(spy.products) // 2 :]) == {HALF[dtype]}
    else:
        assert spy.graphs == 2
        assert set(spy.products) == {HALF[dtype]}


@pytest.mark.filterwarnings("ignore")  # of transformers and accelerate, about their own arguments
@pytest.mark.slow
def test_transformers_trainer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    half = _run(capsys, "trainer.py", str(tmp_path), level="O1", dtype="bf16")
    assert half.code == 0
    _mostly_half(half, "bf16")
    assert half.found["first"] == pytest.approx(1.0919, rel=1e-2)  # fp32 1.0919
    assert half.found["loss"] < 0.2  # fp32 0.066
    assert half.found["norm"] == pytest.approx(2.675, rel=2e-2)  # fp32 2.675
    assert "accelerated BertForSequenceClassification (17,794 weights), trained by AdamW" in half.told
    stored = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.float32}


@pytest.mark.filterwarnings("ignore")
def test_transformers_trainer_that_is_mixed_already_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    half = _run(capsys, "trainer.py", str(tmp_path), "bf16", level="O1")
    assert half.code == 2
    assert "Trainer(bf16=True or fp16=True)" in half.told
    assert "trainer.py:" in half.told


# -- as a process of its own


def _process(*arguments: str, penstock: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(("-m", "penstock", "run") if penstock else ()), *arguments]
    return subprocess.run(
        command, cwd=SCRIPTS, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_o0_is_plain_python_to_the_bit() -> None:
    plain = _process("bare.py", "--steps", "20", penstock=False)
    run = _process("--precision", "O0", "bare.py", "--steps", "20")
    assert (run.returncode, run.stdout, run.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert json.loads(run.stdout)["bits"]
