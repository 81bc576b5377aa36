"""What the planner says of a loss in chunks, held to what a step takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.kept import step_bytes
from penstock.config.machine import load_machine
from penstock.config.model import PRESETS, DecoderConfig
from penstock.config.plan import Plan
from penstock.kernels.choices import LOSS_BUDGET
from penstock.models import create
from penstock.models.heads import Vocabulary
from penstock.models.model import Model
from penstock.planner import Software, predict
from penstock.planner.describe import describe, workload_of

MODEL = DecoderConfig(width=32, depth=1, heads=2, mlp_width=64, vocabulary=8192, sequence=128)
CPU = replace(load_machine("a100-80g"), device="cpu", kernels=(), gemm=())


@pytest.mark.parametrize(
    ("precision", "tied"),
    [
        pytest.param(level, tied, marks=() if (level, tied) == ("O1", False) else pytest.mark.sweep)
        for level in ("O0", "O1", "O2")
        for tied in (True, False)
    ],
)
def test_memory_is_that_of_a_step(precision: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSS_BUDGET, "cpu", 2 << 20)
    workload_of.cache_clear()
    model = replace(MODEL, tied=tied)
    plan = Plan.parse(f"micro_batch=4 precision={precision} optimizer=fused loss=chunked")
    try:
        predicted = predict(model, CPU, plan).memory_bytes
    finally:
        workload_of.cache_clear()
    assert predicted == pytest.approx(step_bytes(model, plan), rel=0.1)
    whole = replace(plan, loss="whole")
    of_whole = predict(model, CPU, whole).memory_bytes
    logits = 4 * model.sequence * model.vocabulary * (4 if precision == "O0" else 2)
    assert predicted < of_whole - 0.6 * logits  # one chunk is a quarter of them
    many = replace(whole, micro_batch=16)
    assert predict(model, CPU, many).memory_bytes == pytest.approx(step_bytes(model, many), rel=1e-3)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_table_that_is_used_twice_has_two_gradients_and_their_sum(tied: bool, accumulate: int) -> None:
    """A narrow model with many words, whose backward pass is at its fullest where it ends."""
    small = replace(MODEL, vocabulary=20_000, width=32, mlp_width=64, sequence=16, tied=tied)
    plan = Plan(micro_batch=1, accumulate=accumulate, optimizer="fused")
    expected = predict(small, CPU, plan).memory_bytes
    assert step_bytes(small, plan) == pytest.approx(expected, rel=0.02)


def test_the_same_work_is_counted() -> None:
    for name in ("gpt2", "bert-base", "t5-small", "llama3-8b"):
        whole, chunked = (
            describe(PRESETS[name], Plan.parse(f"precision=O1 loss={form}")) for form in ("whole", "chunked")
        )
        assert chunked.model_flops == pytest.approx(whole.model_flops, rel=1e-9)
        assert chunked.parameters == whole.parameters
        assert chunked.tensors == whole.tensors
        assert len(list(chunked.operators())) < len(list(whole.operators())) + 8


def test_large_vocabularies_then_fit() -> None:
    """Of 8 texts of 8,192 tokens, what torch's loss makes of the logits of 128,256 words takes 67 GB."""
    machine, model = load_machine("h100"), PRESETS["llama3-1b"]
    line = "precision=O1 recompute=full optimizer=fused micro_batch=8 loss="
    whole, chunked = (predict(model, machine, Plan.parse(line + form)) for form in ("whole", "chunked"))
    torchs = predict(model, machine, Plan.parse(f"{line}whole"), Software(loss="torch"))
    assert torchs.memory_bytes > 80e9 > 50e9 > whole.memory_bytes > chunked.memory_bytes + 10e9
    assert chunked.iteration_seconds == pytest.approx(whole.iteration_seconds, rel=0.25)


def test_megatrons_loss_moves_all_logits_once_for_each_of_its_operators() -> None:
    """Forward a cast, the greatest, the difference from it, exponentials, their sum and the division by it; backward a
    product and the cast: 38 and 14 bytes of each half logit, of which it keeps 4."""
    rows, words = 2 * 2048, PRESETS["gpt-22b"].vocabulary
    moved, kept = {}, {}
    for loss in ("torch", "megatron"):
        work = describe(
            PRESETS["gpt-22b"], Plan.parse("precision=O2 micro_batch=2"), software=Software(loss=loss)
        )
        own = [(op, ahead) for part in work.parts for ahead, ops in ((True, part.forward), (False, part.backward))
               for op in ops if op.module == "loss" and op.elements == rows * words]  # fmt: skip
        moved[loss] = [
            sum(op.read + op.written for op, ahead in own if ahead == side) for side in (True, False)
        ]
        kept[loss] = sum(op.kept for op, ahead in own if ahead)
    assert moved["megatron"] == [38 * rows * words, 14 * rows * words]
    assert moved["torch"] == [14 * rows * words, 18 * rows * words]
    assert kept == {"megatron": 4 * rows * words, "torch": 6 * rows * words}


def test_the_gradients_of_a_shared_table_are_torchs_to_the_bit() -> None:
    """The head's gradient is a tensor of its own, to which that of the embedding is added in place."""
    small = replace(MODEL, vocabulary=101, tied=True)
    tokens = torch.randint(0, 101, (3, 16))
    found = []
    for tied in (True, False):
        torch.manual_seed(0)
        model = create(small).double()
        assert isinstance(model, Model)
        assert isinstance(model.head, Vocabulary)
        assert model.head.tied
        model.head.tied = tied  # without it, torch's own linear
        model(tokens, targets=tokens).backward()
        model(tokens).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("line", "padded"), [("", True), ("loss=chunked", True), ("tp=2", False), ("tp=2 loss=chunked", True)]
)
def test_products_of_an_odd_vocabulary_are_padded_where_the_loss_pads_them(line: str, padded: bool) -> None:
    """GPT-2 has 50,257 entries; two ranks have 25,129 each, which the plain form leaves as they are."""
    work = describe(PRESETS["gpt2"], Plan.parse(f"precision=O1 optimizer=fused micro_batch=2 {line}"), "cuda")
    head = [
        op
        for part in work.parts
        for op in (*part.forward, *part.backward)
        if op.linear == "head" and op.flops
    ]
    assert len(head) == 3
    assert {op.padded for op in head} == {padded}
    assert not any(op.padded for part in work.parts for op in part.forward if op.linear != "head")
