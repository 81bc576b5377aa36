"""Mixtures of experts on several ranks learn what one process learns, balanced, with padding and recomputation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from helpers.equality import Close, Job, Trained, compare, goes_on_elsewhere, take_steps
from helpers.families import ENROLLED, WITH_EXPERTS, Given
from helpers.spawn import pool
from helpers.sweeps import sweep
from penstock.config.model import ModelConfig, Seq2SeqConfig
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.config.stack import Stack
from penstock.models.experts import MixtureOfExperts
from penstock.parallel import dims_of
from penstock.parallel.experts import split_experts
from penstock.shards import whole_of

RECIPE = Recipe(lr=1e-2, eps=1e-4, clip_norm=0.5, ema_decay=0.5)


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


def _job(name: str, line: str = "pp=", *, double: bool = True) -> Job:
    return Job(
        config=_config(name), recipe=RECIPE, loss=Given() if "pp=" in line else Inside(), double=double
    )


# In half precision a token may find another expert better, so visits differ, outputs too, and a tensor is held as a
# whole: against its norm, or how far Adam can have moved it.
HALF = {"weights": Close(0.1, 0.0, RECIPE.lr * 3), "figures": Close(3e-2, 1e-5)}


def _compare(name: str, line: str, *, double: bool = True) -> None:
    job = _job(name, line, double=double)
    compare(job, line, **{} if double else {**HALF, "outputs": False})  # type: ignore[arg-type]


# Adam divides gradients by their own size and would hide a wrong factor; SGD shows it.
STAGES = [
    ("t5 moe", "micro_batch=2 accumulate=2 pp=2 schedule=zero_bubble recompute=full"),
    ("marian moe", "micro_batch=2 accumulate=2 pp=2 padding=remove algorithm=sgd"),
    ("qwen moe", "micro_batch=2 accumulate=4 pp=2 schedule=interleaved virtual=2 algorithm=sgd"),
    ("qwen moe biased", "micro_batch=1 accumulate=2 pp=2 dp=2 sharding=fsdp algorithm=sgd"),
]


@pytest.mark.parametrize(("name", "line"), sweep(STAGES, STAGES[:2]))
def test_mixtures_are_balanced_over_stages(name: str, line: str) -> None:
    _compare(name, line)


def test_a_loss_scale_is_in_the_balance_on_every_stage() -> None:
    line = "micro_batch=2 accumulate=2 pp=2 precision=O2 dtype=fp16 optimizer=fused"
    _compare("mixtral", line, double=False)


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
        _compare(name, f"{line} algorithm=sgd")


@pytest.mark.sweep
@pytest.mark.parametrize("line", ["dp=2 tp=2 pp=2 ep=4 sharding=fsdp", "dp=2 tp=2 cp=2 ep=8 sp=true"])
def test_all_that_splits_a_mixture_goes_together(line: str) -> None:
    _compare("qwen moe", f"micro_batch=1 accumulate=2 {line} algorithm=sgd")


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
    _compare("mixtral", f"{size} {line}", double=False)


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
    job, recorded = _job("mixtral"), _Recorded()
    built = job.built(line)
    with mock.patch("torch.distributed.all_to_all_single", recorded):
        take_steps(built, range(1), job.batches, Trained())
    return len(recorded.counts), len(recorded.rows)


def test_a_mixture_exchanges_four_times_and_counts_once() -> None:
    blocks, parts = 4, 3
    for more, each in (("ep=2", 4), ("ep=2 recompute=full", 6), ("", 0)):
        found = pool(2).run(_calls, f"micro_batch=1 accumulate={parts} dp=2 {more}")
        assert found == [(blocks * parts * bool(each), blocks * parts * each)] * 2


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
def test_a_checkpoint_goes_on_with_experts_on_other_ranks(before: str, after: str, tmp_path: Path) -> None:
    goes_on_elsewhere(_job("qwen moe biased"), before, after, tmp_path, Close(1e-9, 1e-12))
