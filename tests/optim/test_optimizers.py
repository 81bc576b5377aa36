"""Every optimizer by its name: steps are torch's, runs resume, and the planner counts its states to the byte."""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.equality import TINY, images
from helpers.modules import loaded
from helpers.spawn import pool
from helpers.sweeps import in_turn
from penstock import checkpoint
from penstock.build import Built, build
from penstock.config.machine import load_machine
from penstock.config.model import PRESETS, ModelConfig
from penstock.config.optimizers import OPTIMIZERS
from penstock.config.plan import Plan
from penstock.config.recipes import load_run
from penstock.config.rules import problems
from penstock.config.run import Lora, Recipe
from penstock.errors import CheckpointError, ConfigError
from penstock.kernels.cross_entropy import IGNORED
from penstock.models import create
from penstock.optim import learning_rate, make_optimizer, muon
from penstock.optim.muon import Muon
from penstock.parallel import ALONE, dims_of
from penstock.planner.describe import describe
from penstock.planner.memory import memory
from penstock.planner.prediction import predict
from penstock.planner.states import device_share, learned_matrices, newton_schulz, update_operators
from penstock.shards import whole_of

USABLE = [name for name, row in OPTIMIZERS.items() if not row.refused]
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9}, "rmsprop": {"alpha": 0.99},
    **{name: {"betas": (0.9, 0.99)} for name in ("adamw", "adam", "adamax", "nadam", "radam")},
}  # fmt: skip
"""What torch's class is given beside its rate and weight decay."""


def recipe(name: str, **more: Any) -> Recipe:
    decay = 0.1 * OPTIMIZERS[name].decays  # type: ignore[index]
    return Recipe(optimizer=name, lr=1e-2, beta2=0.99, weight_decay=decay, clip_norm=None, **more)  # type: ignore[arg-type]


def _telling(where: str) -> Callable[[str], str]:
    """The message of a difference, with where it is."""
    return lambda text: f"{where}: {text}"


def train(built: Built, steps: range) -> None:
    for step in steps:
        built.step([images(step, 4)])


def _theirs(name: str, model: nn.Module, built: Built) -> list[torch.optim.Optimizer]:
    """torch's plain optimizers of a model, with the groups that `built` made; Lion as its paper has it."""
    parameters = dict(model.named_parameters())
    plain, matrices = list[dict[str, Any]](), list[dict[str, Any]]()
    for group in built.optimizer.param_groups:
        mine = {
            "params": [parameters[n] for n in group["param_names"]],
            "weight_decay": group["weight_decay"],
        }
        if name == "rprop":
            del mine["weight_decay"]
        (matrices if group.get("orthogonal") else plain).append(mine)
    if name == "muon":
        return [
            torch.optim.Muon(matrices, lr=1e-2, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(plain, lr=1e-2, betas=(0.9, 0.99)),
        ]
    return [getattr(torch.optim, OPTIMIZERS[name].torch)(plain, lr=1e-2, **OPTIONS.get(name, {}))]  # type: ignore[index]


def _lion_step(group: dict[str, Any], parameter: Tensor, mean: Tensor) -> None:
    """Algorithm 2 of the paper."""
    gradient = parameter.grad
    assert gradient is not None
    sign = (0.9 * mean + 0.1 * gradient).sign()
    parameter -= 1e-2 * (sign + group["weight_decay"] * parameter)
    mean.copy_(0.99 * mean + 0.01 * gradient)


@pytest.fixture
def in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations of Muon are in bf16, as torch's, whatever the CPU."""
    monkeypatch.setattr(muon, "iterated_in", lambda device: torch.bfloat16)


def test_iterations_in_fp32_differ_by_the_rounding_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    made = {}
    for dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(muon, "iterated_in", lambda device, dtype=dtype: dtype)
        made[dtype] = muon.orthogonalised(
            torch.randn(48, 16, generator=torch.Generator().manual_seed(0))
        ).float()
    half, single = made.values()
    assert (
        0 < float((half - single).norm() / single.norm()) < 0.04
    )  # measured: 0.012, three roundings of 2^-8
    assert float((single.T @ single - torch.eye(16)).norm() / 4) < 0.4  # singular values from 0.7 to 1.2


@pytest.mark.usefixtures("in_bf16")
@pytest.mark.parametrize("name", USABLE)
def test_steps_are_those_of_torchs_plain_optimizer(name: str) -> None:
    """In every form that it has: from the same gradients the same weights, up to how a form rounds."""
    for form in OPTIMIZERS[name].forms:  # type: ignore[index]
        built = build(TINY, Plan(optimizer=form), recipe=recipe(name))
        model = create(TINY)
        model.load_state_dict(built.model.state_dict())
        means = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        theirs = [] if name == "lion" else _theirs(name, model, built)
        for step in range(3):
            built.step([images(step, 4)])
            for p, mine in zip(model.parameters(), built.model.parameters()):
                p.grad = None if mine.grad is None else mine.grad.clone()
            for one in theirs:
                one.step()
            if name == "lion":
                parameters = dict(model.named_parameters())
                with torch.no_grad():
                    for group in built.optimizer.param_groups:
                        for n in group["param_names"]:
                            _lion_step(group, parameters[n], means[n])
        for n, p in model.named_parameters():
            got = dict(built.model.named_parameters())[n]
            torch.testing.assert_close(got, p, msg=_telling(f"{form}: {n}"))


@pytest.mark.parametrize(("name", "line"), in_turn(USABLE, ["baseline", "precision=O2"]))
def test_a_resumed_run_equals_one_that_was_not_interrupted(name: str, line: str) -> None:
    plan = Plan.parse(line)
    whole, first = (build(TINY, plan, recipe=recipe(name)) for _ in range(2))
    train(whole, range(4))
    train(first, range(2))
    saved = io.BytesIO()
    state = {"model": first.model.state_dict(), "optimizer": checkpoint.by_name(first.optimizer.state_dict())}
    torch.save(state, saved)
    saved.seek(0)
    loaded = torch.load(saved)
    resumed = build(TINY, plan, recipe=recipe(name), seed=7)
    resumed.model.load_state_dict(loaded["model"])
    resumed.optimizer.load_state_dict(
        checkpoint.by_index(loaded["optimizer"], resumed.optimizer.state_dict())
    )
    train(resumed, range(2, 4))
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))
    other = "sgd" if name == "adamw" else "adamw"
    with pytest.raises(CheckpointError, match=f"state of {name}, but the optimizer is {other}; use recipe"):
        checkpoint.by_index(
            loaded["optimizer"], build(TINY, plan, recipe=recipe(other)).optimizer.state_dict()
        )


SMALL: dict[str, Any] = {"vocabulary": 64, "depth": 2}
MIXTURE = replace(PRESETS["mixtral-tiny"], **SMALL)


@pytest.mark.parametrize("model", [TINY, MIXTURE, replace(PRESETS["gpt-tiny"], **SMALL)])
@pytest.mark.parametrize("name", USABLE)
def test_states_take_the_predicted_bytes(name: str, model: ModelConfig) -> None:
    built = build(model, Plan(), recipe=recipe(name))
    for parameter in built.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    built.optimizer.step()
    tensors = [v for state in built.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    counted = sum(tensor.nbytes for tensor in tensors if tensor.ndim)
    plan = Plan(algorithm=name)  # type: ignore[arg-type]
    assert memory(describe(model, plan), plan)["optimizer"] == pytest.approx(counted, rel=1e-6)


def test_an_optimizer_that_does_not_fit_is_refused_in_a_sentence() -> None:
    def refused(line: str) -> str:
        return " ".join(problems(Plan.parse(line), run=True))

    assert "searches along a line" in refused("algorithm=lbfgs")
    assert "gradients here are dense; use adamw" in refused("algorithm=sparseadam")
    assert "use plan.optimizer=loop or foreach or fused" in refused("algorithm=muon optimizer=contiguous")
    assert "has no such kernel; use plan.optimizer=loop" in refused("algorithm=lion optimizer=fused")
    for split in ("tp=2", "ep=2 dp=2", "sharding=fsdp dp=2"):
        assert "keeps means of whole rows and columns" in refused(f"algorithm=adafactor {split}")
    assert "multiplies matrices" in refused("algorithm=muon offload=optimizer sharding=fsdp dp=2")
    assert "recipe.optimizer=lion cannot skip" in refused("algorithm=lion precision=O2 dtype=fp16")
    assert "optimizer=fused, or dtype=bf16" in refused("algorithm=muon precision=O2 dtype=fp16")
    assert not refused("algorithm=muon optimizer=fused precision=O2 dtype=fp16 tp=2 dp=2 sharding=fsdp")
    with pytest.raises(ConfigError, match=r"leave plan\.algorithm out"):
        build(TINY, Plan(algorithm="sgd"), recipe=recipe("muon"))
    with pytest.raises(ConfigError, match="weight_decay=0"):
        build(TINY, Plan(), recipe=Recipe(optimizer="rprop"))
    with pytest.raises(ConfigError, match="optimizer=muon, or leave muon_momentum out"):
        build(TINY, Plan(), recipe=Recipe(muon_momentum=0.9))
    with pytest.raises(ConfigError, match="muon needs another rule"):
        build(TINY, Plan(), recipe=Recipe(optimizer="muon", lr_width=16))
    with pytest.raises(ConfigError, match=r"which recipe\.lora freezes"):
        build(TINY, Plan(), recipe=Recipe(lora=Lora(rank=2), lr_width=16))
    assert load_run(overrides={"recipe.optimizer": "lion"}).plan.algorithm == "lion"


def test_a_model_of_strangers_has_its_matrices_orthogonalised() -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(11, 8)
            blocks = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)]
            self.layers = nn.ModuleList(blocks)
            self.head = nn.Linear(8, 11)

    built = build(Strange(), Plan(), recipe=Recipe(optimizer="muon"), loss=lambda model, batch: batch)
    matrices = {n for g in built.optimizer.param_groups if g["orthogonal"] for n in g["param_names"]}
    linears = ("self_attn.out_proj", "linear1", "linear2")
    assert matrices == {f"layers.{i}.{name}.weight" for i in range(2) for name in linears}


def test_an_overflowed_step_leaves_muons_weights_and_momentum() -> None:
    plan = Plan.parse("precision=O2 dtype=fp16 optimizer=fused")
    built = build(TINY, plan, recipe=replace(recipe("muon"), eps=1e-6))
    assert built.scaler is not None
    built.scaler.scale.fill_(2.0**8)
    train(built, range(2))
    before = copy.deepcopy((list(built.model.parameters()), built.optimizer.state_dict()["state"]))
    built.scaler.scale.fill_(1e30)
    train(built, range(2, 3))
    after = (list(built.model.parameters()), built.optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert float(built.scaler.scale) < 1e30
    built.scaler.scale.fill_(2.0**8)
    train(built, range(3, 4))
    assert not torch.equal(next(iter(built.model.parameters())), before[0][0])


LINES = [
    "dp=2 micro_batch=2 sharding=fsdp", "dp=2 micro_batch=2 sharding=zero2 optimizer=foreach", "tp=2 micro_batch=2",
]  # fmt: skip
MIXED = ["dp=2 ep=2 micro_batch=2 sharding=fsdp", "tp=2 ep=2 micro_batch=2"]


def _weights(
    model: ModelConfig, line: str, folder: Path, *, saves: bool = False, resumes: bool = False
) -> Any:
    """Whole weights and moments after two steps in fp64. Between them ranks save a checkpoint, or one process goes on
    from theirs."""
    plan = Plan.parse(f"{line} algorithm=muon")
    dims = dims_of(plan, "cpu") if plan.gpus > 1 else ALONE
    torch.manual_seed(0)
    built = build(lambda: create(model).double(), plan, recipe=recipe("muon"), dims=dims, loss=_loss)
    if resumes:
        stored = checkpoint.find(folder)
        assert stored is not None
        snapshot = stored.load(dict(built.model.named_parameters()), rank=0, world=1)
        built.model.load_state_dict(snapshot.weights["weights"])
        state = checkpoint.by_index(snapshot.state["optimizer"], built.optimizer.state_dict())
        built.optimizer.load_state_dict(state)
    for step in range(int(resumes), 2):
        at = dims.data_rank * plan.micro_batch
        built.step([tuple(one[at : at + plan.micro_batch] for one in _batch(model, step))])
        if saves and step == 0:
            state = {"optimizer": checkpoint.by_name(built.optimizer.state_dict())}
            weights = {"weights": built.model.state_dict()}
            checkpoint.save(
                folder, checkpoint.Snapshot(step=1, weights=weights, state=state, config={}, plan=plan.line())
            )
    found = {name: whole_of(value).detach() for name, value in built.model.state_dict().items()}
    names = {p: n for n, p in built.model.named_parameters()}
    for parameter, moments in built.optimizer.state.items():
        found |= {f"{names[parameter]} {key}": whole_of(value) for key, value in moments.items()}  # type: ignore[index]
    return found


def _batch(model: ModelConfig, step: int) -> tuple[Tensor, ...]:
    if model == TINY:
        pictures, classes = images(step, 4)
        return pictures.double(), classes
    words = torch.randint(0, 64, (4, 9), generator=torch.Generator().manual_seed(step))
    return words[:, :-1], words[:, 1:]


def _loss(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    outputs = model(batch[0])
    loss = nn.functional.cross_entropy(
        outputs.flatten(0, -2), batch[1].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss, (batch[1] != IGNORED).sum()


def _both(cases: list[tuple[ModelConfig, str]], folder: Path) -> list[tuple[str, Any, Any]]:
    found = []
    for number, (model, line) in enumerate(cases):
        got = _weights(model, line, folder, saves=number == 0)
        if torch.distributed.get_rank() == 0:
            plan = Plan.parse(line)
            alone = f"micro_batch={plan.global_batch} optimizer={plan.optimizer}"
            found.append((line, got, _weights(model, alone, folder)))
    return found


@pytest.mark.slow
def test_two_ranks_orthogonalise_what_one_process_does(tmp_path: Path) -> None:
    """Owners get whole updates, so that in fp64 nothing differs but sums of gradients: what is cast to bf16 is the
    same, and a weight differs by 1e-14. One process goes on from what two ranks have saved."""
    cases = [*((TINY, line) for line in LINES), *((MIXTURE, line) for line in MIXED)]
    results = pool(2).run(_both, cases, tmp_path, timeout=120.0)[0]
    resumed = _weights(TINY, "micro_batch=4", tmp_path, resumes=True)
    results.append(("one process goes on from two ranks' checkpoint", resumed, results[0][2]))
    assert len(results) == len(cases) + 1
    for line, got, expected in results:
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-9, msg=_telling(f"{line} {name}"))


def test_the_plan_has_muons_products_and_what_it_sends() -> None:
    model = PRESETS["gpt-tiny"]
    for line, ranks in (("baseline", 1), ("dp=4 sharding=fsdp", 4), ("tp=2", 2), ("dp=4", 1)):
        plan = Plan.parse(f"{line} algorithm=muon")
        work = describe(model, plan)
        operators = list(update_operators(work, plan, device_share(work, plan)))
        whole = describe(model, Plan())
        matrices = [(op.n, op.k) for count, op in learned_matrices(whole) for _ in range(count)]
        # Five times X·Xᵀ, its square, and their product with X; of matrices in turn.
        flops = sum(5 * (4 * min(m) ** 2 * max(m) + 2 * min(m) ** 3) for m in matrices)
        computed = sum(times * op.flops for times, op in operators if op.kind == "gemm")
        assert computed == pytest.approx(flops / len(matrices) * math.ceil(len(matrices) / ranks))
        sent = sum(times * op.read for times, op in operators if op.kind in ("gather", "scatter"))
        assert sent == (2 * 2 * sum(n * k for n, k in matrices) if ranks > 1 else 0)
    assert all(op.batch == 8 for op in newton_schulz(learned_matrices(whole)[0][1]._replace(batch=8)))


def test_a_prediction_has_the_optimizers_time_and_memory() -> None:
    h100 = load_machine("h100")
    line = "precision=O2 optimizer=fused dp=8 sharding=fsdp"
    found = {
        name: predict(PRESETS["llama3-8b"], h100, Plan.parse(f"{line} algorithm={name}"))
        for name in ("adamw", "muon", "sgd")
    }
    adamw, muon, sgd = found.values()
    assert sgd.memory["optimizer"] < muon.memory["optimizer"] < 0.6 * adamw.memory["optimizer"]
    assert muon.seconds["owners"] > 0
    assert "owners" not in adamw.seconds
    assert muon.seconds["optimizer"] > adamw.seconds["optimizer"]


@pytest.mark.parametrize("name", ["time_to_loss", "widths"])
def test_the_page_shows_what_runs_took(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(root / "benchmarks")
    bench, page = (
        loaded(root / "benchmarks" / f"{name}.py"),
        (root / "docs" / "measured.md").read_text("utf-8"),
    )
    stored = json.loads((root / "benchmarks" / "results" / f"{name}_cpu.json").read_text("utf-8"))
    assert bench.table(stored["runs"]) == stored["table"]
    assert not [line for line in bench.lines(stored) if line not in page.splitlines()]


def test_schedules_begin_and_end_where_they_say() -> None:
    def rates(**settings: Any) -> list[float]:
        given = Recipe(lr=1.0, min_lr=settings.pop("min_lr", 0.1), warmup_steps=10, **settings)
        return [learning_rate(step, given, 110) for step in (4, 10, 60, 100, 109, 110, 200)]

    assert rates() == pytest.approx([0.5, 1.0, 0.55, 0.122, 0.1002, 0.1, 0.1], abs=1e-3)
    assert rates(schedule="linear") == pytest.approx([0.5, 1.0, 0.55, 0.19, 0.109, 0.1, 0.1])
    assert rates(schedule="constant", min_lr=0.0) == [0.5] + [1.0] * 6
    assert rates(schedule="wsd") == pytest.approx([0.5, 1.0, 1.0, 0.509, 0.141, 0.1, 0.1], abs=1e-3)
    assert rates(schedule="wsd", decay_share=0.1)[3] == pytest.approx(0.918, abs=1e-3)
    for wrong in ({"decay_share": 0.5}, {"schedule": "constant", "min_lr": 0.1}):
        with pytest.raises(ConfigError, match=r"leave \w+ out"):
            build(TINY, Plan(), recipe=Recipe(**wrong))


@pytest.mark.usefixtures("in_bf16")
def test_an_unknown_stack_of_matrices_is_orthogonalised_one_by_one() -> None:
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(3, 8, 5))
    stack.grad = torch.randn(3, 8, 5)
    singles = [nn.Parameter(one.clone()) for one in stack.detach()]
    for single, gradient in zip(singles, stack.grad):
        single.grad = gradient.clone()
    groups = [{"params": [stack], "orthogonal": True, "weight_decay": 0.1}]
    mine = make_optimizer(groups, "loop", "muon", lr=1e-2)
    assert isinstance(mine, Muon)
    theirs = torch.optim.Muon(singles, lr=1e-2, adjust_lr_fn="match_rms_adamw")
    for optimizer in (mine, theirs):
        optimizer.step()
    torch.testing.assert_close(stack.detach(), torch.stack([one.detach() for one in singles]))
