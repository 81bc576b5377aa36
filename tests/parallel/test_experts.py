"""Mixtures of experts on several ranks learn what one process learns, balanced, with padding and recomputation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from helpers.families import ENROLLED, WITH_EXPERTS, Given, batches
from helpers.rank_pool import pool
from helpers.sweeps import sweep
from penstock import checkpoint
from penstock.build import Built, build
from penstock.config.model import ModelConfig, Seq2SeqConfig
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.config.stack import Stack
from penstock.models import create
from penstock.models.experts import MixtureOfExperts
from penstock.parallel import ALONE, ParallelDims, dims_of, whole_state
from penstock.parallel.agree import average
from penstock.parallel.experts import split_experts
from penstock.shards import whole_of

RECIPE = Recipe(lr=1e-2, eps=1e-4, clip_norm=0.5, ema_decay=0.5)
STEPS = 3


BIASED: dict[str, Any] = {"router": "sigmoid", "bias_rate": 0.01, "shared_experts": 1}


def _config(name: str) -> ModelConfig:
    """An enrolled model of four blocks, or two and two, whose balance losses weigh as much as the loss itself. A name
    that ends in "biased" has sigmoid routers and a shared expert, one that ends in "full" experts without room for all.
    """
    name, full = name.removesuffix(" full"), name.endswith(" full")
    name, biased = name.removesuffix(" biased"), name.endswith(" biased")
    config: Any = WITH_EXPERTS.get(name) or ENROLLED[name].config
    changes = (
        {"balance": 0.5, "z_loss": 0.1} | (BIASED if biased else {}) | ({"capacity": 0.75} if full else {})
    )
    if isinstance(config, Seq2SeqConfig):
        sides = {side: replace(getattr(config, side), **changes) for side in ("encoder", "decoder")}
        made: ModelConfig = replace(config, **sides)
        return made
    changes |= {} if config.latent else {"kv_heads": 2, "head_features": 4}
    found: ModelConfig = replace(config, depth=4, heads=4, **changes)
    return found


class Inside(Given):
    """The same loss, made inside the model, which so knows the last target of each sample."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        *arguments, targets = batch
        total: Tensor = model(*arguments, targets=targets)
        return total / max(1, self.targets(batch))


def _built(
    config: ModelConfig, plan: Plan, dims: ParallelDims, *, double: bool, loss: type[Given] = Given
) -> Built:
    made: Any = (lambda: create(config).double()) if double else config
    built = build(made, plan, recipe=RECIPE, loss=loss(), dims=dims)
    if built.scaler is not None:
        built.scaler.scale.fill_(2.0**8)
    return built


def _steps(built: Built, config: ModelConfig, steps: range) -> list[tuple[float, float]]:
    """Loss and norm of the gradients of each step."""
    plan, dims, results = built.plan, built.dims, []
    for step in steps:
        data = batches(config, step, plan.global_batch)
        starts = [(i * plan.dp + dims.data_rank) * plan.micro_batch for i in range(plan.accumulate)]
        done = built.step([tuple(value[at : at + plan.micro_batch] for value in data) for at in starts])
        assert done.grad_norm is not None
        results.append((float(average(done.loss.detach().double(), dims)), float(done.grad_norm)))
    return results


def _trained(config: ModelConfig, line: str, double: bool, loss: type[Given]) -> dict[str, Any]:
    """Results of a few steps, and what they left, whole, on rank 0."""
    plan = Plan.parse(line)
    dims = dims_of(plan, "cpu") if plan.gpus > 1 else ALONE
    built = _built(config, plan, dims, double=double, loss=loss)
    found: dict[str, Any] = {"steps": _steps(built, config, range(STEPS))}
    with built.inference():
        found["outputs"] = built.model(*batches(config, 99, 3)[:-1]).double()
    found["weights"] = whole_state(built.model, dims)
    assert built.ema is not None
    with built.ema.swapped():
        found["ema"] = whole_state(built.model, dims)
    return found


def _alone(line: str) -> str:
    """The Plan of one process that takes all samples of a step at once."""
    plan = Plan.parse(line)
    names = "dp sharding shard tp sp pp schedule virtual cp ep recompute budget accumulate offload"
    kept = {name: getattr(Plan(), name) for name in names.split()}
    return replace(plan, **kept, micro_batch=plan.global_batch).line()


def _compare(config: ModelConfig, line: str, *, double: bool = True) -> None:
    loss = Given if "pp=" in line else Inside
    wanted = _trained(config, _alone(line), double, loss)
    found = pool(Plan.parse(line).gpus).run(_trained, config, line, double, loss)
    close = {"rtol": 1e-7, "atol": 1e-9} if double else {"rtol": 3e-2, "atol": 1e-5}
    for one in found:
        torch.testing.assert_close(one["steps"], wanted["steps"], **close, msg=lambda t: f"{line}: {t}")
        if double:
            torch.testing.assert_close(one["outputs"], wanted["outputs"], **close)
    for kind in ("weights", "ema"):
        assert found[0][kind].keys() == wanted[kind].keys()
        for name, value in wanted[kind].items():
            got = found[0][kind][name]
            if double:
                torch.testing.assert_close(got, value, **close, msg=lambda t, n=name: f"{line}: {n}: {t}")
            elif value.is_floating_point():
                # In half precision a token may find another expert better, so visits differ, and a tensor is held as a
                # whole: against its norm, or how far Adam can have moved it.
                error = float((got.double() - value.double()).norm())
                far = max(float(value.norm()), RECIPE.lr * STEPS * value.numel() ** 0.5)
                assert error <= 0.1 * far, f"{line}: {name} differs by {error:.1e} of {far:.1e}"


# Adam divides gradients by their own size and would hide a wrong factor; SGD shows it.
STAGES = [
    ("t5 moe", "micro_batch=2 accumulate=2 pp=2 schedule=zero_bubble recompute=full"),
    ("marian moe", "micro_batch=2 accumulate=2 pp=2 padding=remove algorithm=sgd"),
    ("qwen moe", "micro_batch=2 accumulate=4 pp=2 schedule=interleaved virtual=2 algorithm=sgd"),
    ("qwen moe biased", "micro_batch=1 accumulate=2 pp=2 dp=2 sharding=fsdp algorithm=sgd"),
]


@pytest.mark.parametrize(("name", "line"), sweep(STAGES, STAGES[:2]))
def test_mixtures_are_balanced_over_stages(name: str, line: str) -> None:
    _compare(_config(name), line)


def test_a_loss_scale_is_in_the_balance_on_every_stage() -> None:
    _compare(
        _config("mixtral"),
        "micro_batch=2 accumulate=2 pp=2 precision=O2 dtype=fp16 optimizer=fused",
        double=False,
    )


SPLIT = {
    "replicas, 2 ranks": [
        ("mixtral", "micro_batch=1 accumulate=2 dp=2 ep=2"),
        ("t5 moe", "micro_batch=2 dp=2 ep=2 sharding=fsdp recompute=operators"),
        ("switch", "micro_batch=2 dp=2 ep=2"),
        ("gpt-oss", "micro_batch=2 dp=2 ep=2 sharding=fsdp recompute=full"),
        ("marian moe", "micro_batch=2 dp=2 ep=2 sharding=fsdp padding=remove recompute=full"),
        ("qwen moe biased", "micro_batch=1 accumulate=4 dp=2 ep=2 sharding=zero1 optimizer=contiguous"),
    ],
    "replicas, 4 ranks": [
        ("qwen moe", "micro_batch=1 accumulate=2 dp=4 ep=2 optimizer=contiguous"),
        ("t5 moe", "micro_batch=1 dp=4 ep=4 sharding=hsdp shard=2 recompute=early"),
        ("qwen moe", "micro_batch=1 accumulate=2 dp=4 ep=2 sharding=hsdp shard=2 token_order=batch_second"),
        (
            "marian moe",
            "micro_batch=1 accumulate=4 dp=2 ep=2 pp=2 schedule=zero_bubble padding=remove recompute=full",
        ),
    ],
    "layers, 2 ranks": [
        ("t5 moe", "micro_batch=1 accumulate=2 tp=2"),
        ("gpt-oss", "micro_batch=1 accumulate=4 tp=2 sp=true ep=2"),
        ("qwen moe biased full", "micro_batch=2 tp=2 sp=true token_order=batch_second"),
        ("marian moe", "micro_batch=1 accumulate=4 tp=2 ep=2 recompute=full"),
        ("deepseek biased", "micro_batch=2 tp=2 ep=2 sp=true"),
        ("marian moe full", "micro_batch=2 tp=2 ep=2 sp=true padding=remove"),
    ],
    "layers, 4 ranks": [
        ("t5 moe", "micro_batch=1 accumulate=2 dp=2 tp=2 ep=4 sp=true sharding=fsdp"),
        ("qwen moe biased", "micro_batch=1 dp=2 tp=2 ep=2 token_order=batch_second optimizer=contiguous"),
        (
            "mixtral",
            "micro_batch=1 accumulate=4 tp=2 ep=2 pp=2 sp=true schedule=interleaved virtual=2 recompute=full",
        ),
        ("marian moe full", "micro_batch=2 cp=2 tp=2 ep=4 sp=true padding=remove"),
    ],
    "tokens, 2 ranks": [
        ("marian moe", "micro_batch=1 accumulate=4 cp=2 padding=remove recompute=full"),
        ("qwen moe biased full", "micro_batch=2 cp=2 ep=2 sharding=fsdp cp_exchange=gather"),
        ("deepseek biased", "micro_batch=2 cp=2 attention=plain"),
    ],
    "tokens, 4 ranks": [
        ("mixtral", "micro_batch=1 accumulate=2 cp=2 dp=2 ep=4 sharding=zero2"),
        ("qwen moe", "micro_batch=1 accumulate=2 cp=2 ep=2 pp=2"),
    ],
}


@pytest.mark.parametrize("kind", sweep(SPLIT, (), slow=["tokens, 4 ranks"]))
def test_mixtures_learn_the_same_however_ranks_split_them(kind: str) -> None:
    for name, line in SPLIT[kind]:
        _compare(_config(name), f"{line} algorithm=sgd")


@pytest.mark.sweep
@pytest.mark.parametrize("line", ["dp=2 tp=2 pp=2 ep=4 sharding=fsdp", "dp=2 tp=2 cp=2 ep=8 sp=true"])
def test_all_that_splits_a_mixture_goes_together(line: str) -> None:
    _compare(_config("qwen moe"), f"micro_batch=1 accumulate=2 {line} algorithm=sgd")


@pytest.mark.parametrize(
    "line",
    [
        "precision=O1 products=int8_all",
        pytest.param("precision=O2 dtype=fp16 optimizer=fused accumulate=2", marks=pytest.mark.slow),
        pytest.param("precision=O3 optimizer=contiguous", marks=pytest.mark.sweep),
        "precision=O2 sharding=fsdp optimizer=contiguous offload=optimizer recompute=budget budget=0.00006",
        pytest.param("precision=O2 tp=2 sp=true", marks=pytest.mark.sweep),
    ],
)
def test_every_level_trains_split_experts(line: str) -> None:
    size = "micro_batch=1 dp=2 ep=4" if "tp=2" in line else "micro_batch=2 dp=2 ep=2"
    _compare(_config("mixtral"), f"{size} {line}", double=False)


SIZES = Stack(
    width=16, heads=2, mlp_width=24, mlp="swiglu", experts=4, experts_per_token=2, balance=0.0, depth=2
)
CASES = {"no tokens on one rank": (5, 0), "all on one expert": (4, 3), "ties": (3, 4), "one token": (1, 0)}


def _mixture(case: str) -> MixtureOfExperts:
    torch.manual_seed(0)
    sizes = replace(SIZES, shared_experts=1) if case == "shared" else SIZES
    mixture = MixtureOfExperts(sizes, sizes.layers[0], dtype=torch.float64)
    mixture.init_weights()
    for parameter in mixture.parameters():
        nn.init.normal_(parameter, std=0.3)
    assert mixture.router is not None
    if case == "ties":
        nn.init.zeros_(mixture.router.weight)
    elif case == "all on one expert":
        with torch.no_grad():
            mixture.router.weight[2] += 100.0
    return mixture


def _visited(mixture: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a mixture makes of x (T, D), and the gradient at x; those of its weights are left there."""
    x = x.clone().requires_grad_()
    out = mixture(x[None])
    out.square().sum().backward()
    assert x.grad is not None
    return out.detach()[0], x.grad


class _Recorded:
    """What a rank sends in exchanges: bytes to other ranks, of each call."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.rows: list[int] = []

    def __call__(
        self, out: Tensor, rows: Tensor, came: Any = None, sent: Any = None, group: Any = None, **how: Any
    ) -> Any:
        own = torch.distributed.get_rank(group)
        if sent is None:
            self.counts.append(rows.numel())
        else:
            away = sum(count for rank, count in enumerate(sent) if rank != own)
            self.rows.append(away * rows.shape[1:].numel() * rows.element_size())
        return ALL_TO_ALL(out, rows, came, sent, group=group, **how)


ALL_TO_ALL = torch.distributed.all_to_all_single


def _exchanged() -> dict[str, Any]:
    """Of each case: results and gradients here and in one process, and what was sent."""
    dims, results = dims_of(Plan(dp=2, ep=2), "cpu"), {}
    for case, counts in CASES.items():
        x = torch.randn(sum(counts), 16, generator=torch.Generator().manual_seed(1)).double().abs()
        start = sum(counts[: dims.rank])
        own = x[start : start + counts[dims.rank]]
        alone, split, recorded = _mixture(case), _mixture(case), _Recorded()
        split_experts(split, dims)
        with mock.patch("torch.distributed.all_to_all_single", recorded):
            out, grad = _visited(split, own)
        wanted, wanted_grad = _visited(alone, x)
        gradients = {}
        for name, parameter in split.named_parameters():
            assert parameter.grad is not None
            gradients[name] = whole_of(parameter.grad)
            if not hasattr(parameter, "placements"):
                torch.distributed.all_reduce(gradients[name])
        away = [load for expert, load in enumerate(split.loads.tolist()) if expert // 2 != dims.rank]
        results[case] = {
            "results": ((out, grad), (wanted[start : start + len(own)], wanted_grad[start : start + len(own)])),
            "gradients": (gradients, {name: p.grad for name, p in alone.named_parameters()}),
            "recorded": (recorded.counts, recorded.rows), "bytes": sum(away) * 16 * 8,
        }  # fmt: skip
    return results


def test_tokens_travel_to_their_experts_and_back() -> None:
    """A rank without tokens, all tokens on one expert and exact ties, against a mixture that has all of them."""
    for rank in pool(2).run(_exchanged):
        assert rank.keys() == CASES.keys()
        for case, one in rank.items():
            for kind in ("results", "gradients"):
                torch.testing.assert_close(
                    *one[kind], rtol=1e-10, atol=1e-12, msg=lambda t, c=case: f"{c}: {t}"
                )
            counts, rows = one["recorded"]
            assert counts == [4]
            # Tokens go, results come; then gradients of results go and those of tokens come.
            assert rows[0] == rows[2] == one["bytes"], case
            assert len(rows) == 4
    both = pool(2).run(_exchanged)
    assert [rank["all on one expert"]["recorded"][1][0] > 0 for rank in both] == [True, True]


class _Noted:
    """Work that is noted where it is begun and where it is waited for."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.work: Any = None

    def __call__(self, out: Tensor, rows: Tensor, *splits: Any, **how: Any) -> Any:
        work = ALL_TO_ALL(out, rows, *splits, **how)
        if not how.get("async_op"):
            return work
        self.events.append("sent")
        noted = _Noted(self.events)
        noted.work = work
        return noted

    def wait(self) -> None:
        self.work.wait()
        self.events.append("came")


def _in_order() -> list[str]:
    events: list[str] = []
    mixture = _mixture("shared")
    split_experts(mixture, dims_of(Plan(dp=2, ep=2), "cpu"))
    assert mixture.shared is not None
    mixture.shared.register_forward_hook(lambda *_: events.append("shared"))
    mixture.shared.register_full_backward_hook(lambda *_: events.append("shared"))
    with mock.patch("torch.distributed.all_to_all_single", _Noted(events)):
        _visited(mixture, torch.randn(5, 16, dtype=torch.float64))
    return events


def test_shared_experts_compute_while_tokens_travel() -> None:
    forward, backward = "sent shared came sent came", "sent came sent shared came"
    assert pool(2).run(_in_order) == [[*forward.split(), *backward.split()]] * 2


def _calls(line: str) -> tuple[int, int]:
    config, recorded = _config("mixtral"), _Recorded()
    plan = Plan.parse(line)
    built = _built(config, plan, dims_of(plan, "cpu"), double=True)
    with mock.patch("torch.distributed.all_to_all_single", recorded):
        _steps(built, config, range(1))
    return len(recorded.counts), len(recorded.rows)


def test_a_mixture_exchanges_four_times_and_counts_once() -> None:
    blocks, parts = 4, 3
    for more, each in (("ep=2", 4), ("ep=2 recompute=full", 6), ("", 0)):
        found = pool(2).run(_calls, f"micro_batch=1 accumulate={parts} dp=2 {more}")
        assert found == [(blocks * parts * bool(each), blocks * parts * each)] * 2


def _went_on(config: ModelConfig, line: str, folder: str, save: bool) -> list[tuple[float, float]]:
    """Two steps and a save, or a start from it; then two steps more."""
    plan = Plan.parse(line)
    built = _built(config, plan, dims_of(plan, "cpu") if plan.gpus > 1 else ALONE, double=True)
    assert built.ema is not None
    if save:
        _steps(built, config, range(2))
        weights = {"weights": built.model.state_dict(), "ema": built.ema.state_dict()}
        state = {"optimizer": checkpoint.by_name(built.optimizer.state_dict())}
        checkpoint.save(Path(folder), checkpoint.Snapshot(2, weights, state, config={}))
    else:
        stored = checkpoint.find(Path(folder))
        assert stored is not None
        parameters = dict(built.model.named_parameters(remove_duplicate=False))
        found = stored.load(parameters, held={*parameters, *built.model.state_dict()})
        built.model.load_state_dict(found.weights["weights"])
        built.ema.load_state_dict(found.weights["ema"])
        state = checkpoint.by_index(found.state["optimizer"], built.optimizer.state_dict())
        built.optimizer.load_state_dict(state)
    return _steps(built, config, range(2, 4))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp=2 ep=2 micro_batch=2 sharding=fsdp", "dp=2 ep=2 micro_batch=2 sharding=fsdp"),
        ("dp=2 ep=2 micro_batch=2 optimizer=contiguous", "micro_batch=4"),
        pytest.param("micro_batch=4", "dp=4 ep=4 micro_batch=1", marks=pytest.mark.sweep),
        pytest.param(
            "dp=4 ep=2 micro_batch=1 sharding=fsdp",
            "dp=2 tp=2 ep=4 micro_batch=2 sharding=zero1",
            marks=pytest.mark.sweep,
        ),
        pytest.param("tp=2 micro_batch=4", "tp=2 ep=2 pp=2 micro_batch=4", marks=pytest.mark.sweep),
    ],
)
def test_a_checkpoint_goes_on_with_experts_on_any_other_ranks(
    before: str, after: str, tmp_path: Path
) -> None:
    config = _config("qwen moe biased")

    def on(line: str, save: bool) -> list[tuple[float, float]]:
        ranks, arguments = Plan.parse(line).gpus, (config, line, str(tmp_path), save)
        return _went_on(*arguments) if ranks == 1 else pool(ranks).run(_went_on, *arguments)[0]

    undisturbed, resumed = on(before, True), on(after, False)
    if before == after:
        assert resumed == undisturbed
    torch.testing.assert_close(resumed, undisturbed, rtol=1e-9, atol=1e-12)
