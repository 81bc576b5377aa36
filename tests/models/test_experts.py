"""Mixtures of experts: products, choices and balance."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.families import ENROLLED, WORDS, batches, loss
from helpers.watched import ProductDtypes
from penstock.apply import compile_model
from penstock.build import Built, build
from penstock.config.formats import Weights
from penstock.config.model import PRESETS, Seq2SeqConfig
from penstock.config.plan import Plan
from penstock.config.rules import require
from penstock.config.run import Recipe
from penstock.config.stack import Stack
from penstock.errors import ConfigError
from penstock.infer.load import loaded
from penstock.kernels.bias_activation import activate
from penstock.kernels.cross_entropy import IGNORED
from penstock.models import create
from penstock.models.convert import save_pretrained
from penstock.models.experts import UNIT, MixtureOfExperts, balance, mixtures_of
from penstock.models.router import Router

SIZES = Stack(width=16, heads=2, mlp_width=24, mlp="swiglu", experts=4, experts_per_token=2, depth=2)


def _mixture(dtype: torch.dtype = torch.float64, **changes: Any) -> MixtureOfExperts:
    sizes = replace(SIZES, **changes)
    torch.manual_seed(0)
    mixture = MixtureOfExperts(sizes, sizes.layers[0], dtype=dtype)
    for parameter in mixture.parameters():
        nn.init.normal_(parameter, std=0.3)
    return mixture


def _reference(
    mixture: MixtureOfExperts, x: Tensor, visits: Tensor | None = None, seen: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Every expert computed for every token, and weighted with what the router says of it. `visits` (·, ·, E) says
    which experts a token visits, where these are not its best ones; `seen` is what a router reads in place of x."""
    assert mixture.router is not None
    logits = (x if seen is None else seen) @ mixture.router.weight.T
    scores = logits.sigmoid() if mixture.kind == "sigmoid" else logits.softmax(-1)
    bias = 0.0 if mixture.correction is None else mixture.correction * UNIT
    if visits is None:
        visits = torch.zeros_like(scores).scatter(-1, (scores + bias).topk(mixture.chosen).indices, 1.0)
    weights = scores * visits
    if mixture.normalises:
        weights = weights / weights.sum(-1, keepdim=True)
    up, down = mixture.up, mixture.down
    hidden = torch.einsum("...d,erd->...er", x, up.weight)
    hidden = activate(hidden if up.bias is None else hidden + up.bias, mixture.activation)
    made = torch.einsum("...er,edr->...ed", hidden, down.weight)
    made = made if down.bias is None else made + down.bias
    out = (made * weights[..., None]).sum(-2)
    return out if mixture.shared is None else out + mixture.shared(x)


def _same_gradients(mixture: MixtureOfExperts, x: Tensor, made: Tensor, wanted: Tensor) -> None:
    """The outputs and the gradients of x and all weights are alike."""
    results = [
        [out, *torch.autograd.grad(out.square().sum(), [x, *mixture.parameters()])] for out in (made, wanted)
    ]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"experts_per_token": 1, "mlp": "relu", "bias": False},
        {"router_normalised": False, "shared_experts": 2},
        {"router": "sigmoid", "experts_per_token": 3},
        {"router": "sigmoid", "router_normalised": False, "mlp_dropout": None},
    ],
    ids=str,
)
def test_a_mixture_is_the_weighted_sum_of_its_experts(changes: dict[str, Any]) -> None:
    mixture = _mixture(**changes, balance=0.0)
    if mixture.correction is not None:
        mixture.correction.copy_(torch.tensor([1, -1, 0, 2]) * 2**47)
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    _same_gradients(mixture, x, mixture(x), _reference(mixture, x))


@pytest.mark.parametrize("router", ["sigmoid", "softmax"])
def test_experts_are_chosen_in_the_best_groups(router: str) -> None:
    """DeepSeek-V3, section 2.1.2: groups by the sum of their two best scores, then the best experts in them."""
    sizes = {"experts": 9, "experts_per_token": 4, "router_groups": 3, "groups_per_token": 2}
    mixture = _mixture(router=router, balance=0.0, **sizes)
    if mixture.correction is not None:
        mixture.correction.copy_(torch.arange(9) * 2**46)
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    assert mixture.router is not None
    logits = x.detach() @ mixture.router.weight.T
    scores = (
        logits.softmax(-1) if mixture.correction is None else logits.sigmoid() + mixture.correction * UNIT
    )
    visits = torch.zeros_like(scores)
    for token, of_experts in zip(visits.view(-1, 9), scores.view(-1, 9).tolist()):
        sums = [sum(sorted(of_experts[at : at + 3])[1:]) for at in (0, 3, 6)]
        groups = sorted(range(3), key=sums.__getitem__)[1:]
        inside = [e for e in range(9) if e // 3 in groups]
        for e in sorted(inside, key=of_experts.__getitem__)[-4:]:
            token[e] = 1.0
    free = torch.zeros_like(scores).scatter(-1, scores.topk(4).indices, 1.0)
    assert not torch.equal(free, visits), "groups change the choice of some"
    _same_gradients(mixture, x, mixture(x), _reference(mixture, x, visits))


def test_experts_are_chosen_in_the_given_group() -> None:
    mixture = _mixture(router="given", experts=6, router_groups=2, balance=0.5, z_loss=0.1)
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    routes = torch.tensor([1, 0, 1])[:, None].expand(3, 5)
    inside = torch.arange(6) // 3 == routes[..., None]
    assert mixture.router is not None
    logits = (x @ mixture.router.weight.T).where(inside, -torch.inf)
    visits = torch.zeros_like(logits).scatter(-1, logits.topk(2).indices, 1.0)
    f, p = visits.sum((0, 1)) / 30, logits.softmax(-1).mean((0, 1))
    loss = 0.5 * 6 * (f * p).sum() + 0.1 * logits.logsumexp(-1).square().mean()
    learned = [x, *mixture.parameters()]
    # A token's weights are those of its group's experts alone.
    wanted = _reference(mixture, x, visits)
    plain = torch.autograd.grad(wanted.square().sum() + loss, learned)
    made = mixture(x, None, routes)
    found = torch.autograd.grad(made.square().sum(), learned)
    torch.testing.assert_close([made, *found], [wanted, *plain])
    with pytest.raises(ConfigError, match="pass it routes"):
        mixture(x)


def test_routers_read_features_that_jitter_in_training_alone() -> None:
    mixture = _mixture(router_jitter=0.5, balance=0.0)
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    made = mixture(x)
    torch.manual_seed(1)
    factors = torch.empty(15, 16, dtype=torch.float64).uniform_(0.5, 1.5).view(3, 5, 16)
    _same_gradients(mixture, x, made, _reference(mixture, x, seen=x * factors))
    torch.testing.assert_close(mixture.eval()(x), _reference(mixture, x))


def test_outputs_of_experts_are_masked_in_training_and_scaled_at_evaluation() -> None:
    mixture = _mixture(expert_dropout=0.25, balance=0.0, router_normalised=False)
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    made = mixture(x)
    torch.manual_seed(1)
    stays = (torch.rand(15, 2, dtype=torch.float64) >= 0.25).double()
    assert mixture.router is not None
    best = (x.detach().flatten(0, 1) @ mixture.router.weight.T).topk(2).indices
    visits = torch.zeros(15, 4, dtype=torch.float64).scatter(1, best, stays)
    assert 0 < stays.sum() < 30
    _same_gradients(mixture, x, made, _reference(mixture, x, visits.view(3, 5, 4)))
    torch.testing.assert_close(mixture.eval()(x), _reference(mixture, x) * 0.75)


def test_an_expert_has_room_for_so_many_tokens_of_a_sample() -> None:
    mixture = _mixture(experts_per_token=1, sample_capacity=2, balance=0.0)
    x = torch.randn(3, 6, 16, dtype=torch.float64, requires_grad=True)
    assert mixture.router is not None
    visits = torch.zeros(3, 6, 4, dtype=torch.float64)
    best = (x.detach() @ mixture.router.weight.T).argmax(-1)
    for sample in range(3):
        for token, e in enumerate(best[sample].tolist()):
            visits[sample, token, e] = visits[sample, :, e].sum() < 2
    assert 0 < visits.sum() < 18
    samples = torch.arange(3)[:, None].expand(3, 6)
    made = mixture(x, None, None, samples)
    _same_gradients(mixture, x, made, _reference(mixture, x, visits))
    torch.testing.assert_close(mixture.eval()(x, None, None, samples), made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_grouped_products_are_those_of_one_expert_after_the_other(dtype: torch.dtype, tokens: int) -> None:
    mixture = _mixture(dtype, experts=8)
    x = torch.randn(1, tokens, 16).to(dtype).requires_grad_()
    results = []
    for plain in (False, True):
        for module in mixture.linears:
            module.plain = plain
        made = mixture(x)
        results.append([made, *torch.autograd.grad(made.float().square().sum(), [x, *mixture.parameters()])])
    for grouped, looped in zip(*results):
        # Sums in another order: each differs by a few roundings of its largest terms (16 at most), not of its result.
        atol = (
            16 * torch.finfo(dtype).eps * float(looped.detach().abs().max())
            if dtype == torch.float32
            else None
        )
        torch.testing.assert_close(grouped, looped, atol=atol, rtol=atol and 1.3e-6)


def test_all_tokens_on_one_expert_and_no_tokens_at_all() -> None:
    for dtype in (torch.float32, torch.float64):
        mixture = _mixture(dtype)
        assert mixture.router is not None
        with torch.no_grad():
            mixture.router.weight.copy_(torch.tensor([[1.0], [0.5], [-1.0], [-2.0]]).expand(4, 16))
        for tokens in (6, 0):
            mixture.zero_grad()
            x = torch.rand(1, tokens, 16, dtype=dtype)
            mixture(x).square().sum().backward()
            assert mixture.up.weight.grad is not None
            used = mixture.up.weight.grad.flatten(1).any(1)
            assert used.tolist() == [tokens > 0, tokens > 0, False, False]


def test_the_router_computes_in_fp32() -> None:
    exact = _mixture(torch.float32)
    x = torch.randn(2, 4, 16).to(torch.bfloat16)
    assert exact.router is not None
    wanted = x.float() @ exact.router.weight.T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(exact.router(x), wanted)
    half = _mixture(torch.float32).to(torch.bfloat16)
    assert half.router is not None
    assert torch.equal(half.router(x), x.float() @ half.router.weight.float().T)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_every_level_routes_in_fp32_in_training_and_serving(level: str, tmp_path: Path) -> None:
    """The logits are those of fp32 products, of whatever types tokens and weights are, however weights are stored."""
    seen: list[torch.dtype] = []

    def compare(router: nn.Module, given: tuple[Tensor, ...], logits: Tensor) -> None:
        assert isinstance(router, Router)
        seen.append(given[0].dtype)
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            assert torch.equal(logits, given[0].float() @ router.weight.float().T)

    built = _built("mixtral", f"precision={level} micro_batch=2")
    plan = Plan.parse(f"precision={level}")
    save_pretrained(built.model, tmp_path)
    stored: tuple[Weights, ...] = ("auto", "int8")
    served = [loaded(tmp_path, plan, weights=weights, tokenizer=None).model for weights in stored]
    for model in (built.model, *served):
        for router in (module for module in model.modules() if isinstance(module, Router)):
            router.register_forward_hook(compare)
    tokens = torch.randint(0, WORDS, (2, 8))
    built.step(_parts("mixtral", 0, 2, 1))
    with torch.no_grad():
        for model in served:
            model(tokens)
    assert len(seen) == 3 * len(mixtures_of(built.model))
    assert (torch.bfloat16 in seen) == (level != "O0")


def _balance_loss(mixture: MixtureOfExperts, x: Tensor, real: Tensor) -> Tensor:
    """The losses of Fedus et al. and Zoph et al. by their formulas: means over the real tokens of a sample."""
    assert mixture.router is not None
    logits = x @ mixture.router.weight.T
    visits = torch.zeros_like(logits).scatter(-1, logits.topk(mixture.chosen).indices, 1.0)
    f = (visits * real[..., None]).sum((0, 1)) / (mixture.chosen * real.sum())
    weight = real / real.sum(1, keepdim=True) / len(x)
    p = (logits.softmax(-1) * weight[..., None]).sum((0, 1))
    z = (logits.logsumexp(-1).square() * weight).sum()
    return mixture.balance * mixture.experts * (f * p).sum() + mixture.z_loss * z


def test_gradients_of_balance_are_those_of_the_published_losses() -> None:
    mixture = _mixture(balance=0.3, z_loss=0.2)
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([5, 2, 3])
    real = (torch.arange(5) < counts[:, None]).double()
    shares = real / (3 * counts[:, None])
    learned = [x, *mixture.parameters()]
    plain = torch.autograd.grad(
        _reference(mixture, x).square().sum() + _balance_loss(mixture, x, real), learned
    )
    found = torch.autograd.grad(mixture(x, shares).square().sum(), learned)
    torch.testing.assert_close(found, plain)
    mixture.eval()
    quiet = torch.autograd.grad(mixture(x, shares).square().sum(), learned)
    torch.testing.assert_close(quiet, torch.autograd.grad(_reference(mixture, x).square().sum(), learned))


def test_what_has_no_room_is_dropped_in_training_alone() -> None:
    mixture = _mixture(experts=2, experts_per_token=1, router="given", capacity=0.5)
    x = torch.randn(4, 2, 16, dtype=torch.float64)
    routes = torch.tensor([0, 0, 0, 1])[:, None].expand(4, 2)
    whole = mixture.eval()(x, None, routes)
    made = mixture.train()(x, None, routes)
    kept = torch.tensor([[1, 1], [0, 0], [0, 0], [1, 1]])[
        ..., None
    ]  # room for two of eight tokens on each expert
    torch.testing.assert_close(made, whole * kept)
    shares = torch.tensor([[0.0, 0.25]]).expand(4, 2)
    padded = mixture(x, shares, routes)
    torch.testing.assert_close(padded, whole * torch.tensor([[0, 1], [0, 0], [0, 0], [0, 1]])[..., None])


def test_biases_of_sigmoid_routers_follow_the_loads() -> None:
    mixture = _mixture(torch.float32, router="sigmoid", bias_rate=0.125)
    mixture(torch.randn(2, 8, 16))
    loads = mixture.loads.clone()
    assert int(loads.sum()) == 32
    balance([mixture], lambda tensors: None)
    assert mixture.correction is not None
    wanted = 0.125 * torch.sign(loads.float().mean() - loads.float())
    torch.testing.assert_close(mixture.correction * UNIT, wanted)
    assert torch.equal(mixture.last, loads)
    assert not mixture.loads.any()
    with torch.no_grad():
        mixture(torch.randn(1, 8, 16))
    assert not mixture.loads.any(), "what is not trained is not counted"


def _built(name: str, line: str, **changes: Any) -> Built:
    config: Any = replace(ENROLLED[name].config, **changes)
    return build(config, Plan.parse(line), recipe=Recipe(lr=1e-2, eps=1e-4), loss=loss)


def _parts(name: str, step: int, samples: int, parts: int) -> list[Any]:
    batch, size = batches(ENROLLED[name].config, step, samples), samples // parts
    return [tuple(value[i * size : (i + 1) * size] for value in batch) for i in range(parts)]


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("precision", ["precision=O0", "precision=O1 dtype=fp16 optimizer=fused"])
def test_a_step_is_balanced_alike_however_it_is_cut(precision: str, router: str) -> None:
    more = {"balance": 1.0, "z_loss": 0.1, "router": router, "bias_rate": 0.05}
    whole, cut = (
        _built("mixtral", f"{precision} micro_batch={8 // n} accumulate={n}", **more) for n in (1, 4)
    )
    half = "fp16" in precision
    for step in range(3):
        norms = [built.step(_parts("mixtral", step, 8, n)).grad_norm for built, n in ((whole, 1), (cut, 4))]
        if norms[0] is not None:
            assert norms[1] is not None
            assert float(norms[0]) == pytest.approx(float(norms[1]), rel=2e-2 if half else 1e-5)
    for one, other in zip(mixtures_of(whole.model), mixtures_of(cut.model)):
        assert torch.equal(one.last, other.last) or half
        assert int(one.last.sum()) == int(other.last.sum()) == 8 * 6 * 2
        if one.correction is not None and other.correction is not None and not half:
            assert one.correction.any()
            assert torch.equal(one.correction, other.correction)
    if not half:
        for mine, theirs in zip(whole.model.parameters(), cut.model.parameters()):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_loss_scale_is_in_the_balance_as_in_the_loss() -> None:
    """With fp16 products the gradient norm is that of fp32, though the balance is most of it."""
    lines = ("precision=O0 micro_batch=8", "precision=O1 dtype=fp16 optimizer=fused micro_batch=8")
    norms = []
    for line in lines:
        built = build(
            replace(ENROLLED["mixtral"].config, balance=0.0, z_loss=3.0),  # type: ignore[call-arg]
            Plan.parse(line), recipe=Recipe(clip_norm=1e9), loss=loss,
        )  # fmt: skip
        if built.scaler is not None:
            built.scaler.scale.fill_(2.0**8)
        norm = built.step(_parts("mixtral", 0, 8, 1)).grad_norm
        assert norm is not None
        norms.append(float(norm))
    quiet = _built("mixtral", "micro_batch=8", balance=0.0).step
    assert norms[1] == pytest.approx(norms[0], rel=2e-2)
    quiet.clip_norm = 1e9
    norm = quiet(_parts("mixtral", 0, 8, 1)).grad_norm
    assert norm is not None
    assert norms[0] > 1.5 * float(norm)


@pytest.mark.parametrize("way", ["full", "early", "operators", "elementwise", "selective attention=plain"])
def test_recomputation_repeats_the_choices_and_counts_once(way: str) -> None:
    more = {"balance": 1.0, "z_loss": 0.1, "router": "sigmoid"}
    plain, again = (_built("mixtral", f"micro_batch=8 recompute={r}", **more) for r in ("none", way))
    for step in range(2):
        for built in (plain, again):
            built.step(_parts("mixtral", step, 8, 1))
    for one, other in zip(mixtures_of(plain.model), mixtures_of(again.model)):
        assert torch.equal(one.last, other.last)
        assert int(one.last.sum()) == 8 * 6 * 2
    for mine, theirs in zip(plain.model.parameters(), again.model.parameters()):
        torch.testing.assert_close(mine, theirs)


def test_every_second_product_of_a_mixture_is_kept() -> None:
    """Of what `early` computes again, `operators` computes the other half, and `elementwise` nothing."""
    made = []
    for way in ("none", "early", "operators", "elementwise"):
        built = _built("mixtral", f"micro_batch=8 experts=loop recompute={way}")
        with ProductDtypes() as products:
            built.step(_parts("mixtral", 0, 8, 1))
        made.append(sum(products.counts.values()))
    plain, early, kept, all_kept = made
    assert all_kept == plain
    assert kept - plain == pytest.approx((early - plain) / 2, abs=2)


def test_choices_are_repeated_though_the_router_would_choose_otherwise() -> None:
    from penstock.parallel.recompute import _Recomputed

    mixture = _mixture()
    assert mixture.router is not None
    x = torch.randn(1, 6, 16, dtype=torch.float64, requires_grad=True)
    made = _Recomputed(mixture.forward, "full", mixed=True)(x)
    with torch.no_grad():
        mixture.router.weight.neg_()  # all tokens would go elsewhere, and gradients have other sizes
    made.square().sum().backward()
    assert x.grad is not None
    assert int(mixture.loads.sum()) == 12


def test_padding_and_what_follows_the_last_target_count_for_nothing() -> None:
    model = create(ENROLLED["mixtral"].config)
    tokens = torch.randint(0, 13, (2, 6))
    targets = tokens.clone()
    targets[0, 2:] = IGNORED
    model(tokens, targets=targets)
    assert [int(mixture.loads.sum()) for mixture in mixtures_of(model)] == [2 * (2 + 6)] * 2
    both = create(ENROLLED["nllb moe"].config)
    both(tokens, tokens, lengths=torch.tensor([4, 1]))
    assert [int(mixture.loads.sum()) for mixture in mixtures_of(both)] == [2 * 5, 2 * 12]


def test_biases_of_experts_are_not_decayed() -> None:
    built = build(ENROLLED["nllb moe"].config, Plan(), loss=loss)
    decayed = {
        name
        for group in built.optimizer.param_groups
        if group["weight_decay"]
        for name in group["param_names"]
    }
    assert "decoder.blocks.1.mlp.up.weight" in decayed
    assert "decoder.blocks.1.mlp.router.weight" in decayed
    assert "decoder.blocks.1.mlp.up.bias" not in decayed


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # it makes instances of autograd functions
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("name", "line", "changes"),
    [
        # A loss scale and several micro-batches: the weight of the balance is no constant of compiled code.
        ("mixtral", "compile=blocks precision=O1 dtype=fp16 optimizer=fused accumulate=2", {"balance": 1.0}),
        pytest.param(
            *("switch", "compile=whole", {"sample_capacity": 2, "capacity": 0.75, "balance": 0.1}),
            marks=pytest.mark.sweep,
        ),
    ],
)
@pytest.mark.slow
def test_compiled_mixtures_learn_the_same(
    name: str, line: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is traced and how it is derived, without making kernels of it."""
    monkeypatch.setattr("penstock.apply.compile_model", partial(compile_model, backend="aot_eager"))
    config: Any = ENROLLED[name].config
    if isinstance(config, Seq2SeqConfig):
        sides = (replace(stack, **changes) for stack in (config.encoder, config.decoder))
        config = replace(config, **dict(zip(("encoder", "decoder"), sides)))
    else:
        config = replace(config, **changes)
    results: list[tuple[list[float], Built]] = []
    for plan in (line, re.sub(r"compile=\w+", "", line)):
        built = build(
            config, Plan.parse(f"micro_batch=4 {plan}"), recipe=Recipe(lr=1e-2, eps=1e-4), loss=loss
        )
        parts = built.plan.accumulate
        steps = [built.step([batches(config, parts * i + j, 4) for j in range(parts)]) for i in range(3)]
        results.append(([float(step.loss) for step in steps], built))
    (got, compiled), (expected, plain) = results
    assert got == pytest.approx(expected, rel=1e-5)
    for one, other in zip(mixtures_of(compiled.model), mixtures_of(plain.model)):
        assert torch.equal(one.last, other.last)
        assert one.last.any()
    half = "fp16" in line
    for mine, theirs in zip(compiled.model.parameters(), plain.model.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-3 if half else 1e-4, atol=1e-3 if half else 1e-5)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("compile=blocks recompute=full", "plan.recompute=full"),
        ("compile=blocks ep=2 dp=2", "plan.ep=2"),
        ("compile=blocks products=int8 precision=O1", "plan.products=int8"),
    ],
)
def test_what_was_not_proven_is_refused_by_name(line: str, words: str) -> None:
    from penstock.config.rules import problems

    found = problems(Plan.parse(line), ENROLLED["mixtral"].config, run=True)
    assert any(words in problem and "model.experts=4" in problem for problem in found), found


@pytest.mark.parametrize(
    ("name", "changes", "line", "words"),
    [
        ("mixtral", {"sample_capacity": 4}, "cp=2", "a rank needs all tokens of a sample"),
        ("mixtral", {"router_jitter": 0.1}, "tp=2", "with random numbers"),
        ("mixtral", {"expert_dropout": 0.1}, "tp=2 ep=2", "with random numbers"),
    ],
)
def test_choices_that_ranks_would_make_otherwise_are_refused(
    name: str, changes: dict[str, Any], line: str, words: str
) -> None:
    from penstock.config.rules import problems

    config: Any = replace(ENROLLED[name].config, **changes)
    assert any(words in problem for problem in problems(Plan.parse(line), config, run=True))
    assert not any(words in problem for problem in problems(Plan.parse("dp=2 ep=2"), config, run=True))


@pytest.mark.slow
def test_a_plan_lets_experts_multiply_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.apply.compile_model", partial(compile_model, backend="aot_eager"))
    config = replace(PRESETS["mixtral-tiny"], depth=1, width=32)
    tokens = torch.randint(0, 2048, (2, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for line in ("baseline", "experts=loop", "experts=loop compile=blocks"):
        plan = replace(Plan.parse(line), micro_batch=2)
        built = build(config, plan, loss=_next_token)
        ways = {linear.plain for mixture in mixtures_of(built.model) for linear in mixture.linears}
        assert ways == {plan.experts == "loop"}
        losses.append(torch.stack([built.step([tokens]).loss for _ in range(2)]))
    torch.testing.assert_close(losses[1:], losses[:1] * 2)
    with pytest.raises(ConfigError, match=r"experts=loop is for mixtures of experts"):
        require(Plan(experts="loop"), PRESETS["gpt-tiny"])


def _next_token(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, targets=tokens) / tokens.numel()  # type: ignore[no-any-return]
