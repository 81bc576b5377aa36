"""Linear layers that choose between a CPU's libraries: results, gradients, and which product takes which library."""

from __future__ import annotations

import io
from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn

from helpers.spawn import pool
from helpers.toy import TOY
from penstock import Plan, predict
from penstock.build import build
from penstock.config.machine import GemmSample
from penstock.config.model import PRESETS
from penstock.errors import ConfigError
from penstock.kernels import probed_linear as probed
from penstock.models.heads import Vocabulary
from penstock.parallel import ALONE, ParallelDims
from penstock.planner.libraries import library_obstacle, onednn_choice
from penstock.planner.rates import ONEDNN
from penstock.probe import libraries, products

# Rates by pass: oneDNN is faster in one of three, and where a vocabulary's logits are computed.
RATES = {"forward": (100.0, 90.0), "input": (80.0, 100.0), "weight": (90.0, 92.0), "vocabulary": (50.0, 80.0)}
MACHINE = replace(
    TOY,
    peak_flops={"fp32": 1e11, "bf16": 1e11, ONEDNN: 1e11},
    gemm=tuple(
        GemmSample(dtype=dtype, m=64, n=n, k=64, form=form, flops_per_second=1e9 * rate)
        for form, both in RATES.items()
        for dtype, rate in zip(("fp32", ONEDNN), both, strict=True)
        for n in (32001 if form == "vocabulary" else 64,)
    ),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _by_mkl() -> Iterator[None]:
    """Every test begins and ends without a choice."""
    yield
    probed.choose_by(lambda m, n, k, form: False)


def _gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y, x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("compiled", [False, True])
def test_each_product_takes_the_library_chosen_for_it(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 8, bias=False))
    model = deepcopy(plain)
    monkeypatch.setattr(libraries, "machine_for", lambda _: MACHINE)
    libraries.choose_libraries(model, torch.device("cpu"), ALONE)
    asked, by_onednn = set(), []
    probed.choose_by(lambda *key: asked.add(key) is None and key[-1] == "input")
    real = probed.by_onednn
    monkeypatch.setattr(
        probed, "by_onednn", lambda a, b, bias=None: by_onednn.append(a.shape) or real(a, b, bias)
    )
    x = torch.randn(2, 5, 24)
    for ours, theirs in zip(
        _gradients(torch.compile(model) if compiled else model, x), _gradients(plain, x), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    passes = {(10, 32, 24, "forward"), (10, 24, 32, "input"), (32, 24, 10, "weight")}
    assert asked == passes | {(10, 8, 32, "forward"), (10, 32, 8, "input"), (8, 32, 10, "weight")}
    assert sorted(by_onednn) == [(10, 8), (10, 32)]
    assert [*model.state_dict()] == [*plain.state_dict()]


def test_other_types_no_rows_and_autocast_keep_torch_s_product() -> None:
    probed.choose_by(lambda *_: True)
    for x in (torch.randn(3, 4).double(), torch.randn(0, 4)):
        weight = torch.randn(2, 4, dtype=x.dtype)
        assert probed.probed_linear(x, weight, None).equal(F.linear(x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        assert probed.probed_linear(torch.randn(3, 4), torch.randn(2, 4), None).dtype == torch.bfloat16


def test_rows_of_any_number_and_second_derivatives_are_torch_s() -> None:
    probed.choose_by(lambda *_: True)
    weight = torch.randn(2, 4, requires_grad=True)
    for shape in ((4,), (3, 4), (0, 4), (2, 1, 4)):
        x, found = torch.randn(shape, requires_grad=True), []
        for linear in (probed.probed_linear, F.linear):
            y = linear(x, weight, torch.ones(2)).square().sum()
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            found.append((y, first, *torch.autograd.grad(first.square().sum(), (x, weight))))
        torch.testing.assert_close(*found)


def test_a_choice_follows_what_was_measured() -> None:
    choose = onednn_choice(MACHINE)
    assert [choose(64, 64, 64, form) for form in ("forward", "input", "weight")] == [False, True, False]
    assert choose(64, 50257, 64, "forward"), "logits have rates of their own"
    vit, slow = PRESETS["vit-ti16"], replace(MACHINE, gemm=MACHINE.gemm[:2])
    assert library_obstacle(MACHINE, None, Plan()) is library_obstacle(MACHINE, vit, Plan()) is None
    for machine, model, line, words in (
        (TOY, None, "", "no measured rates"), (slow, None, "", "MKL is as fast as oneDNN"),
        (slow, vit, "", "predicted to be as fast"), (MACHINE, vit, "precision=O1", "predicted to be as fast"),
    ):  # fmt: skip
        assert words in str(library_obstacle(machine, model, Plan.parse(line)))
    plain, chosen = (
        predict(PRESETS["vit-ti16"], MACHINE, Plan.parse(line)) for line in ("", "matmul=probed")
    )
    assert chosen.iteration_seconds < 0.99 * plain.iteration_seconds


def test_a_plan_trains_with_it_and_says_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "machine_for", lambda _: MACHINE)
    asked = set()
    model = replace(PRESETS["gpt-tiny"], depth=1, vocabulary=96)
    tokens = torch.randint(0, 96, (2, model.sequence), generator=torch.Generator().manual_seed(1))
    losses = []
    for line in ("micro_batch=2", "micro_batch=2 matmul=probed"):
        built = build(
            model, Plan.parse(line), loss=lambda net, words: net(words, targets=words) / words.numel()
        )
        if "probed" in line:
            probed.choose_by(lambda *key: asked.add(key) is None and onednn_choice(MACHINE)(*key))
        losses.append([float(built.step([tokens]).loss) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    head = next(module for module in built.model.modules() if isinstance(module, Vocabulary))
    assert head.probed
    assert any(n == 96 and form == "forward" for _, n, _, form in asked), "the loss's logits choose too"
    with pytest.raises(ConfigError, match="matmul=high"):
        libraries.choose_libraries(model=nn.Linear(2, 2), device=torch.device("cuda"), dims=ALONE)


def _choices_of_a_rank() -> list[bool]:
    """What a rank chooses, each having measured other rates."""
    dims = ParallelDims.of(Plan(dp=2), rank=distributed.get_rank())
    here = MACHINE if dims.rank == 0 else replace(MACHINE, gemm=MACHINE.gemm[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libraries, "machine_for", lambda _: here)
        libraries.choose_libraries(nn.Linear(2, 2), torch.device("cpu"), dims)
    try:
        return [probed._choice(64, 64, 64, form) for form in ("forward", "input", "weight")]
    finally:
        probed.choose_by(lambda m, n, k, form: False)


def test_ranks_choose_alike() -> None:
    assert pool(2).run(_choices_of_a_rank) == [[False, True, False]] * 2


def test_a_script_saves_and_copies_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole model in `torch.save` is torch's own, and opens where no Penstock is; a copy multiplies as the model."""
    monkeypatch.setattr(libraries, "machine_for", lambda _: MACHINE)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    libraries.choose_libraries(model, torch.device("cpu"), ALONE)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    opened = torch.load(file, weights_only=False)
    assert type(opened[0]) is type(opened[2]) is nn.Linear
    assert isinstance(model[0], probed.ProbedLinear)
    x = torch.randn(3, 4)
    for other in (opened, deepcopy(model), copy(model)):
        torch.testing.assert_close(other(x), model(x))
    assert isinstance(deepcopy(model)[0], probed.ProbedLinear)
    assert isinstance(copy(model[0]), probed.ProbedLinear)


def test_a_torch_without_onednn_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert ONEDNN not in {kind.name for kind in products._kinds(torch.device("cpu"))}
