"""Ranks that share the tokens of each sample learn what one process learns."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from helpers import families
from helpers.equality import Close, Trained, beside_one, hold
from helpers.families import ENROLLED, loss, small
from helpers.spawn import pool
from helpers.sweeps import sweep
from penstock.config.model import DecoderConfig, preset
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.errors import ConfigError
from penstock.kernels.attention import Scores, attention
from penstock.kernels.context import Shared
from penstock.kernels.token_cut import Cut
from penstock.models import create
from penstock.parallel import ParallelDims
from penstock.parallel.context import split_tokens
from penstock.planner.describe import describe

RECIPE = Recipe(lr=1e-3, clip_norm=0.5, eps=1e-4)


def _batch(config: Any, how: str, step: int, samples: int) -> tuple[Any, ...]:
    """With documents, where only some words are asked for, with one of several memories for each sample, or as all
    tests have it."""
    batch = families.batches(config, step, samples)
    if how == "sees":
        *inputs, targets = batch
        more = [None] * (config.graph.arguments.index("memory_index") - len(inputs))
        return *inputs, *more, torch.arange(samples) % 2, targets
    if how == "words":
        *inputs, targets = batch
        targets[:, -2:] = -100
        if isinstance(config, DecoderConfig):
            tokens = inputs[0]
            documents = (torch.arange(tokens.shape[1]) > tokens.shape[1] // 3).long().expand_as(tokens)
            return tokens, documents, targets
    return batch


def _of_words(model: nn.Module, batch: Any, *, all_rows: bool) -> tuple[Tensor, Tensor]:
    """The summed loss of targets that the model is given, all of them or every second one, and their number."""
    *inputs, targets = batch
    rows = {} if all_rows else {"rows": torch.arange(0, targets.numel(), 2)}
    targets = targets.flatten()[rows["rows"]] if rows else targets
    return model(*inputs, targets=targets, **rows), (targets != -100).sum()


def _made(config: Any, double: bool) -> Any:
    torch.manual_seed(0)
    return create(config).double() if double else config


@mock.patch.object(
    families, "TOKENS", 13
)  # which two ranks cannot share out evenly; later tests use these ranks too
def _both(cases: list[tuple[Any, str, str, bool]]) -> list[tuple[str, Trained, Trained]]:
    found = []
    for config, line, how, double in cases:
        of_words = partial(_of_words, all_rows=isinstance(config, DecoderConfig))
        options: dict[str, Any] = {
            "steps": 3, "recipe": RECIPE, "double": double, "batches": partial(_batch, config, how),
            "loss": of_words if how == "words" else loss,
        }  # fmt: skip
        said = f"{type(config).__name__}, {how}{', fp64' * double}: {line}"
        found.append(beside_one(said, partial(_made, config, double), Plan.parse(line), {}, **options))
    return found


def _check(world: int, cases: list[tuple[Any, str, str, bool]], timeout: float = 120.0) -> None:
    for said, got, expected in pool(world).run(_both, cases, timeout=timeout)[0]:
        if "fp64" in said:
            hold(said, got, expected, weights=Close(1e-7, 1e-19, 0.0), figures=Close(1e-7, 1e-9))
        else:
            hold(
                said, got, expected, weights=Close(1e-4, 2e-5), figures=Close(1e-5, 1e-5), norms=Close(1e-4, 1e-5),
            )  # fmt: skip


CONFIGS: dict[str, Any] = {
    **{name: one.config for name, one in ENROLLED.items()},
    "alibi": small("gpt-tiny", positions="alibi"),
    "sinks": small("gpt-oss-tiny", experts=0),
    "causal texts": replace(ENROLLED["multimodal"].config, text_causal=True),
}
CASES = [
    ("alibi", "cp=2 micro_batch=2 accumulate=2", "words", True),
    ("vit", "cp=2 micro_batch=2", "plain", True),
    ("phi", "cp=2 micro_batch=2", "words", True),
    ("gemma 2", "cp=2 micro_batch=2", "words", True),
    ("llama", "cp=2 micro_batch=1 accumulate=3", "plain", True),
    ("bert of classes", "cp=2 micro_batch=2", "plain", True),
    ("modernbert", "cp=2 micro_batch=2", "words", True),
    ("gpt", "cp=2 micro_batch=2 cp_exchange=gather attention=plain", "words", True),
    ("marian", "cp=2 micro_batch=2 accumulate=2 padding=remove", "plain", True),
    ("bert of classes", "cp=2 micro_batch=3 padding=remove token_order=batch_second", "plain", True),
    ("t5", "cp=2 micro_batch=2", "plain", True),
    ("sinks", "cp=2 micro_batch=2", "words", True),
    ("bart", "cp=2 micro_batch=2 token_order=batch_second loss=chunked", "plain", True),
    ("causal texts", "cp=2 micro_batch=2", "plain", True),
    (
        "multimodal",
        "cp=2 micro_batch=2 cp_exchange=gather token_order=batch_second padding=remove",
        "sees",
        True,
    ),
]
FOUR = [
    ("gpt", "cp=2 dp=2 micro_batch=2 sharding=fsdp recompute=full", "words", False),
    ("vit", "cp=4 micro_batch=2 sharding=zero2 token_order=batch_second accumulate=2", "plain", False),
]
_BESIDE = ("cp_exchange=gather", "attention=plain recompute=selective", "recompute=early")
_FAMILIES = [
    (name, how)
    for how in ("plain", "words")
    for name in ("vit", "gpt", "llama", "bert", "modernbert", "marian", "bart", "t5")
    if how == "plain" or name not in ("vit", "marian", "bart", "t5")
]
MORE = [
    (name, f"cp=4 micro_batch=2 {line}", how, True)
    for number, (name, how) in enumerate(_FAMILIES)
    for line in ("", _BESIDE[number % 3])
] + [
    (name, f"cp=2 dp=2 micro_batch=2 {line}", "words", False)
    for name, line in (
        ("gpt", "sharding=zero1 accumulate=2"),
        ("llama", "sharding=fsdp loss=chunked"),
        ("bert", "sharding=hsdp shard=2 accumulate=2"),
        ("gpt", "sharding=hsdp shard=2 accumulate=2"),
        ("llama", "optimizer=contiguous recompute=budget"),
        ("bert", "sharding=fsdp loss=chunked"),
    )
]
"""Every family in plain rows and, where it can, in packed texts, with one other setting in turn; then shardings."""


def _cases(cases: list[tuple[str, str, str, bool]]) -> list[tuple[Any, str, str, bool]]:
    return [(CONFIGS[name], line, how, double) for name, line, how, double in cases]


def test_two_ranks_learn_what_one_process_does() -> None:
    _check(2, _cases(CASES))


@pytest.mark.sweep
def test_it_goes_with_shards_replicas_and_recomputation() -> None:
    _check(4, _cases(FOUR))


@pytest.mark.slow
@pytest.mark.parametrize("turn", sweep(range(3), [0]))
def test_every_family_in_every_way_learns_what_one_process_does(turn: int) -> None:
    _check(4, _cases(MORE[turn::3]), timeout=280)


def _attention(ring: bool, causal: bool) -> tuple[list[Tensor], list[Tensor], int, int]:
    """Outputs and gradients of shared attention and of torch's, the operations of this rank, and the bytes that it
    sends to its neighbour."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    cut = Cut(None, rank, size, causal=causal, exchange="ring" if ring else "gather")
    torch.manual_seed(5)
    whole = [torch.randn(2, heads, 32, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    sent, exchange = 0, torch.distributed.batch_isend_irecv

    def counted(operations: list[Any]) -> Any:
        nonlocal sent
        for one in operations:
            if one.op is torch.distributed.isend:
                sent += one.tensor.numel() * one.tensor.element_size()
        return exchange(operations)

    torch.distributed.batch_isend_irecv = counted
    try:
        mine = [cut.take(x, 2).requires_grad_() for x in whole]
        with FlopCounterMode(display=False) as counter:
            out = attention(*mine, "plain", Scores(Shared(cut, 32)))
            out.square().sum().backward()  # type: ignore[no-untyped-call]
    finally:
        torch.distributed.batch_isend_irecv = exchange
    every = [x.clone().requires_grad_() for x in whole]
    expected = attention(*every, "plain", Scores(causal=causal))
    expected.square().sum().backward()  # type: ignore[no-untyped-call]
    got = [out.detach(), *(x.grad for x in mine if x.grad is not None)]
    alone = [expected.detach(), *(x.grad for x in every if x.grad is not None)]
    return got, [cut.take(x, 2) for x in alone], counter.get_total_flops(), sent


@pytest.mark.parametrize("ring", [True, False])
def test_ranks_have_equal_work_and_send_what_the_planner_says(ring: bool) -> None:
    for causal in (True, False):
        found = pool(2).run(_attention, ring, causal)
        for got, expected, _, _ in found:
            assert len(got) == 4
            for one, two in zip(got, expected, strict=True):
                torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)
        assert found[0][2] == found[1][2] > 0
        if ring:
            # Of both directions: keys and values there, and again with their gradients.
            model = replace(
                preset("gpt-tiny"), width=32, heads=4, kv_heads=2, sequence=32, depth=1, mlp_width=64
            )
            work = describe(model, Plan(cp=2, micro_batch=2), "cpu")
            said = sum(n * op.read for n, op in work.operators() if op.kind == "ring")
            assert {two * 2 for _, _, _, two in found} == {said / 4.0 * 8.0}


def _dropped() -> tuple[Tensor, Tensor, Tensor]:
    """A directional derivative of shared attention with dropout, by its gradients and by differences."""
    cut = Cut(None, torch.distributed.get_rank(), 2, causal=True, exchange="ring")
    torch.manual_seed(5)
    q, k, v = (cut.take(torch.randn(2, 2, 16, 8, dtype=torch.float64), 2) for _ in range(3))
    step = torch.randn_like(q)

    def run(by: float) -> tuple[Tensor, Tensor]:
        moved = (q + by * step).requires_grad_()
        torch.manual_seed(7)
        out = attention(moved, k, v, "plain", Scores(Shared(cut, 16), dropout=0.3))
        total = out.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        assert moved.grad is not None
        return total.detach(), (moved.grad * step).sum()

    total, slope = run(0.0)
    return slope, (run(1e-6)[0] - run(-1e-6)[0]) / 2e-6, total


def test_dropout_leaves_the_same_weights_out_in_both_passes() -> None:
    for slope, measured, _ in pool(2).run(_dropped):
        torch.testing.assert_close(slope, measured, rtol=1e-6, atol=1e-6)


def test_a_model_that_cannot_split_its_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear cannot split its tokens"):
        split_tokens(nn.Linear(2, 2), Plan(cp=2), ParallelDims(cp=2))
