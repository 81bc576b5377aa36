"""Settings of a Plan on scripts that know nothing of them: what is applied, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers import forked
from penstock.cli import main
from penstock.errors import ConfigError
from penstock.kernels.sdpa import switch_of
from penstock.models.anatomy import inner_model
from penstock.models.fuse import places_for
from penstock.script import Interception
from penstock.tune.switches import ScriptSwitches

SCRIPTS = Path(__file__).parent / "scripts"


def _run(capsys: pytest.CaptureFixture[str], plan: str, *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and error of a script under a plan, in this process."""
    capsys.readouterr()
    torch.manual_seed(0)
    code = main(["run", "--plan", plan, str(SCRIPTS / words[0]), *words[1:]])
    return code, *capsys.readouterr()


def _loss(out: str) -> float:
    return float(re.findall(r"loss:? (\d+\.\d+)", out)[-1])


@pytest.mark.parametrize(
    ("plan", "words", "applied"),
    [
        ("optimizer=fused matmul=highest", "plain.py 8", "optimizer=fused matmul=highest to Sequential"),
        ("optimizer=fused recompute=early", "nanogpt.py --max_iters=4 --log_interval=1", "recompute=early to GPT"),
        ("optimizer=foreach recompute=elementwise", "nanogpt.py --max_iters=3", "elementwise to GPT"),
        ("offload=activations", "nanogpt.py --max_iters=3", "offload=activations to GPT"),
        ("padding=remove optimizer=fused", "run_glue.py --max_steps 2", "padding=remove optimizer=fused to BertFor"),
        ("optimizer=fused host_memory=keep", "accelerated.py 3", "host_memory=keep to Sequential"),
        ("attention=plain loss=chunked", "no_trainer.py 3", "attention=plain loss=chunked to GPT2LMHeadModel"),
        ("attention=sdpa", "no_trainer.py 3", "attention=sdpa to GPT2LMHeadModel"),
        ("attention=plain", "timm_train.py 3", "attention=plain to VisionTransformer"),
        ("optimizer=foreach", "mnist.py --epochs 1", "optimizer=foreach to Net"),
        ("optimizer=fused", "seq2seq.py 3", "optimizer=fused to Seq2Seq"),
        ("optimizer=fused precision=O1", "amp.py 3", "optimizer=fused to Sequential"),
    ],
)  # fmt: skip
def test_settings_are_applied_and_losses_stay(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, plan: str, words: str, applied: str
) -> None:
    name, *arguments = words.split()
    if name == "run_glue.py":
        pytest.importorskip("transformers")
        arguments += ["--output_dir", str(tmp_path)]
    code, plain, _ = _run(capsys, "baseline", name, *arguments)
    assert code == 0
    code, out, told = _run(capsys, plan, name, *arguments)
    assert code == 0, told
    assert applied in told
    assert "left alone" not in told or "precision" in plan
    # Dropout is drawn from one generator in one order, and every form is the same arithmetic but for its rounding.
    tolerance = 2e-2 if "padding" in plan else 1e-3
    if "loss" in plain:
        assert _loss(out) == pytest.approx(_loss(plain), rel=tolerance)


@pytest.mark.parametrize("kind", ["automatic", "manual"])
def test_lightning(kind: str, tmp_path: Path) -> None:
    """In processes of their own, because Lightning warns of what these few steps leave out."""
    pytest.importorskip("pytorch_lightning")
    losses = []
    for line in ("baseline", "optimizer=fused precision=O1 dtype=bf16"):
        words = ["-m", "penstock", "run", "--plan", line, str(SCRIPTS / "lightning_fit.py"), "3", kind]
        code, out, told = forked.run_python(words, tmp_path)
        assert code == 0, told
        losses.append(_loss(out))
    assert "accelerated Classifier (1,218 weights), trained by AdamW" in told
    assert "applied optimizer=fused to Classifier" in told
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize(
    ("plan", "words", "message"),
    [
        ("dp=2 optimizer=fused", "plain.py", "plan.dp cannot be applied to a script from outside"),
        ("optimizer=contiguous", "plain.py", "use optimizer=fused"),
        ("recompute=budget budget=1", "plain.py", "use recompute=early"),
        ("offload=optimizer", "plain.py", "use plan.sharding=fsdp"),
        ("padding=remove", "plain.py", "plan.padding=remove cannot be applied to it"),
        ("optimizer=fused", "mnist.py --epochs", "Adadelta has no fused form"),
        ("norms=half", "plain.py", "norms"),
        ("optimiser=fused", "plain.py", "Did you mean 'optimizer'?"),
    ],
)
def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], plan: str, words: str, message: str
) -> None:
    code, _, told = _run(capsys, plan, *words.split(), "2")
    assert code == 2
    assert message in told


def test_a_plan_and_a_precision_say_the_same_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--plan", "optimizer=fused", "--precision", "O1", "train.py"]) == 2
    assert "--plan 'precision=O1 optimizer=fused'" in capsys.readouterr().err
    assert main(["run", "--plan", "optimizer=fused", "--option", "loss_scale=8", "train.py"]) == 2
    assert "add precision=O1" in capsys.readouterr().err


def test_everything_is_as_before_afterwards() -> None:
    """One loop under a plan, and the same without: torch is what it was, and the optimizer keeps its form."""
    before = torch.get_float32_matmul_precision(), torch.optim.Optimizer.__init__
    switches = ScriptSwitches("precision=O1 optimizer=fused matmul=medium attention=plain")
    with Interception(say=lambda words: None, switches=switches, **switches.precision):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        saved = torch.optim.AdamW(nn.Linear(4, 4).parameters(), fused=False).state_dict()
        assert saved["param_groups"][0]["fused"]  # every optimizer that is made meanwhile
        saved["param_groups"][0].update(fused=None)
        optimizer.load_state_dict(saved)
        model(torch.ones(2, 4)).sum().backward()
        assert torch.get_float32_matmul_precision() == "medium"
        optimizer.step()
    assert optimizer.param_groups[0]["fused"]
    assert switch_of(model) is not None
    assert (torch.get_float32_matmul_precision(), torch.optim.Optimizer.__init__) == before


def _compile_and_step() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.compile(model, backend="eager")(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_a_model_that_a_module_only_holds_is_switched() -> None:
    """As a LightningModule holds one of transformers: what needs known parts is applied to that."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50, num_labels=2,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.BertForSequenceClassification(config)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss * self.scale

    mask = torch.tensor([[1] * 8, [1] * 3 + [0] * 5])
    batch = {"input_ids": torch.arange(16).view(2, 8), "attention_mask": mask, "labels": torch.tensor([0, 1])}

    def train(line: str) -> tuple[list[float], str, nn.Module]:
        switches = ScriptSwitches(line)
        told: list[str] = []
        torch.manual_seed(0)
        with Interception(say=told.append, switches=switches, **switches.precision):
            holder = Holder()
            optimizer = torch.optim.SGD(holder.parameters(), lr=0.1)
            losses = []
            for _ in range(3):
                optimizer.zero_grad()
                loss = holder(batch)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
        return losses, "".join(told), holder

    plain, _, holder = train("matmul=highest")
    assert inner_model(holder) is holder.model
    assert places_for(inner_model(holder), "cpu") == {"residual_norm": 4, "bias_activation": 2}
    line = "padding=remove fuse=residual_norm,bias_activation recompute=early"
    losses, told, changed = train(line)
    assert f"applied {line} to Holder" in told
    assert losses == pytest.approx(plain, rel=1e-5)
    assert sum(type(module).__mro__[1].__name__ == "_AddedOutput" for module in changed.modules()) == 4
    assert inner_model(nn.Linear(2, 2)).__class__ is nn.Linear


def test_a_script_that_compiles_is_not_compiled_twice() -> None:
    switches = ScriptSwitches("compile=whole")
    with (
        Interception(say=lambda words: None, switches=switches, **switches.precision),
        pytest.raises(ConfigError, match=r"the script calls torch\.compile itself"),
    ):
        _compile_and_step()
