"""Which blocks recompute, what they then keep, and that it changes nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from helpers import families
from helpers.families import ENROLLED, loss
from helpers.sweeps import sweep
from penstock.build import build
from penstock.config.machine import load_machine
from penstock.config.model import (
    PRESETS,
    MultimodalConfig,
    Seq2SeqConfig,
    UniversalConfig,
    ViTConfig,
    preset,
    stacks,
    with_stacks,
)
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.models import Model, create
from penstock.models.anatomy import anatomy_of
from penstock.parallel import recompute
from penstock.parallel.recompute import _apply, _Recomputed, recompute_blocks
from penstock.planner.describe import describe
from penstock.planner.memory import pass_bytes
from penstock.planner.prediction import predict, room
from penstock.planner.recompute import (
    CHOICES,
    Recompute,
    allowed_bytes,
    block_kinds,
    choose,
    computed_again,
    kept_by,
)
from penstock.planner.search import search

WORDS = 64


@pytest.mark.parametrize(
    ("every", "chosen"),
    [("1", [0, 1, 2, 3, 4]), ("2", [0, 2, 4]), ("1.25", [0, 2, 3, 4]), ("2.5", [0, 3]), ("9", [0])],
)
def test_any_share_of_the_blocks_recomputes(every: str, chosen: list[int]) -> None:
    torch.manual_seed(0)
    model = Model(
        ViTConfig(
            image_size=8, patch_size=4, width=16, depth=5, heads=2, mlp_width=32, classes=4, dropout=0.1
        )
    )
    images = torch.randn(2, 3, 8, 8)

    before = _gradients(model, images)
    recompute_blocks(model, Plan.parse(f"recompute=full recompute_every={every}"))
    assert [
        i for i, block in enumerate(model.encoder.blocks) if isinstance(block.forward, _Recomputed)
    ] == chosen
    assert all(torch.equal(one, other) for one, other in zip(before, _gradients(model, images), strict=True))


def _gradients(model: nn.Module, *inputs: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(*inputs).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _config(name: str) -> Any:
    """An enrolled model of four blocks, wide enough that bytes are those of activations, with dropout."""
    config: Any = ENROLLED[name].config
    sizes: dict[str, Any] = {"width": 32, "mlp_width": 128, "depth": 4, "dropout": 0.1}
    return replace(config, **sizes, **({"image_size": 16} if name == "vit" else {"sequence": WORDS}))


def _batch(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(families, "TOKENS", WORDS)
    return families.batches(config, 0, 4)


def _kept(model: nn.Module, batch: Any, loss: Any = loss) -> tuple[int, torch.Tensor]:
    """Bytes that autograd keeps from forward to backward, but for weights and numbers of tokens; and the loss."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.dtype != torch.int64:
            seen[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = loss(model, batch)
    return sum(size for size, _ in seen.values()), found


@pytest.mark.parametrize("name", ["vit", "gpt", "llama", "bert"])
def test_a_way_to_recompute_keeps_the_bytes_that_the_operators_say(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, results = _config(name), []
    batch = _batch(config, monkeypatch)
    make, contexts = recompute.create_selective_checkpoint_contexts, list[Any]()

    def seen(policy: Any) -> Any:
        contexts.append(make(policy))  # type: ignore[no-untyped-call]
        return contexts[-1]

    monkeypatch.setattr(recompute, "create_selective_checkpoint_contexts", seen)
    for kind in ("none", *CHOICES, "operators"):
        plan = Plan(attention="plain", micro_batch=4)
        model = build(config, plan).model
        for block in anatomy_of(model).stacks[0].blocks:
            _apply(model, block, kind)
        torch.manual_seed(3)
        contexts.clear()
        kept, lost = _kept(model, batch)
        made = [
            one for forward, _ in contexts for by_turn in forward.storage.values() for one in by_turn.values()
        ]
        kept += sum(one.val.untyped_storage().nbytes() for one in made if hasattr(one, "val"))
        lost.backward()  # type: ignore[no-untyped-call]
        results.append([lost.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        work = describe(config, plan, "cpu")
        said = sum(part.count * sum(kept_by(part, Recompute(kind)).values()) for part in work.parts)
        assert said == pytest.approx(kept, rel=0.02), kind
    # Dropout draws the same numbers again.
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_a_budget_is_kept_and_the_gradients_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config("llama")
    batch = _batch(config, monkeypatch)
    plain = Plan(micro_batch=4, attention="plain")
    whole = pass_bytes(describe(config, plain, "cpu"), plain)
    expected, ways = None, []
    for share in (1.0, 0.75, 0.5, 0.25, 0.1):
        budget = share * whole.blocks / 2**30
        plan = replace(plain, recompute="budget", budget=budget)
        built = build(config, plan)
        torch.manual_seed(3)
        kept, lost = _kept(built.model, batch)
        lost.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in built.model.parameters() if p.grad is not None]
        expected = expected or gradients
        assert all(torch.equal(one, two) for one, two in zip(gradients, expected, strict=True))
        assert kept <= 1.02 * (share * whole.blocks + whole.entrance + whole.exit)
        ways.append(tuple(block_kinds(config, plan, describe(config, plan, "cpu"))))
    assert ways[0] == ("none",) * 4
    assert len(set(ways)) == len(ways), ways


def test_a_budget_is_spent_as_well_as_any_choice_could() -> None:
    config = replace(preset("t5-tiny"), sequence=64, decoder_sequence=32)
    plan = Plan(attention="plain")
    work = describe(config, plan, "cpu")

    def cost(part: Any, kind: str) -> float:
        again = computed_again(part, Recompute(kind))
        return sum(op.flops + 100.0 * (op.read + op.written) for op in again)

    def choices(part: Any) -> list[tuple[float, float]]:
        one = [(sum(kept_by(part, Recompute(k)).values()), cost(part, k)) for k in ("none", *CHOICES)]
        return [(sum(k for k, _ in some), sum(c for _, c in some))
                for some in itertools.combinations_with_replacement(one, part.count)]  # fmt: skip

    ways = [(a + b, c + d) for (a, c), (b, d) in itertools.product(*map(choices, work.blocks))]
    whole = max(kept for kept, _ in ways)
    largest = max(cost(part, "early") for part in work.blocks)
    for share in (0.9, 0.6, 0.45, 0.3):
        found = choose(work, share * whole)
        kept = sum(n * sum(kept_by(part, Recompute(way)).values()) for part, some in found for way, n in some)
        spent = sum(n * cost(part, kind) for part, some in found for kind, n in some)
        best = min(c for k, c in ways if k <= share * whole)
        assert kept <= share * whole
        assert spent <= best + largest  # all but the last block that moved


def test_a_stage_of_a_pipeline_counts_the_micro_batches_it_holds() -> None:
    plan = Plan(precision="O2", attention="flash", pp=4, accumulate=8, recompute="budget", budget=20.0, tp=8)
    config = preset("gpt-22b")
    work = describe(config, plan)
    assert allowed_bytes(work, plan) == 20.0 * 2**30 * 4 / 4
    found = predict(config, load_machine("a100-80g"), plan)
    assert (
        found.memory["activations"] - found.micro_batches_held * pass_bytes(work, plan).entrance
        > 0.9 * 20 * 2**30
    )
    assert (
        found.memory["activations"]
        <= 20.0 * 2**30 + found.micro_batches_held * pass_bytes(work, plan).entrance
    )
    kinds = block_kinds(config, plan, work)
    assert len(kinds) == 48
    stages = [sorted(kinds[i : i + 12]) for i in range(0, 48, 12)]
    assert (
        max(sum(kind != "none" for kind in stage) for stage in stages)
        - min(sum(kind != "none" for kind in stage) for stage in stages)
        <= 1
    )


def test_a_budget_that_cannot_be_kept_or_told_is_said(caplog: pytest.LogCaptureFixture) -> None:
    build(_config("gpt"), Plan(recompute="budget", budget=1e-9))
    assert "plan.budget=1e-09 GiB is less" in caplog.text
    with pytest.raises(ConfigError, match="was given as a module"):
        build(create(_config("gpt")), Plan(recompute="budget", budget=1.0))


@pytest.mark.parametrize(("attention", "dropout"), [("plain", 0.0), ("sdpa", 0.1)])
def test_scores_of_a_foreign_model_are_computed_again(attention: str, dropout: float) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32,
        patch_size=4, attention_probs_dropout_prob=dropout, hidden_dropout_prob=0.1,
    )  # fmt: skip
    images, classes = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])

    def lose(model: nn.Module, batch: None) -> torch.Tensor:
        return nn.functional.cross_entropy(model(images).logits, classes)

    sizes, results = [], []
    for line in ("", "recompute=selective"):
        torch.manual_seed(2)
        model = transformers.ViTForImageClassification(config)
        build(model, Plan.parse(f"attention={attention} {line}"))
        kept, lost = _kept(model, None, lose)
        lost.backward()  # type: ignore[no-untyped-call]
        sizes.append(kept)
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    assert sizes[1] < 0.8 * sizes[0]
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


ONE_OF_EACH = {
    (type(config), *(len({*stack.layers}) for stack in stacks(config))): name
    for name, config in PRESETS.items()
}.values()
"""A preset of each kind of model, and of each number of kinds of blocks."""


@pytest.mark.parametrize("name", sweep(PRESETS, ONE_OF_EACH, slow=()))
def test_planner_and_builder_order_the_kinds_of_blocks_alike(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = PRESETS[name]
    if isinstance(config, Seq2SeqConfig):
        config = replace(config, encoder=replace(config.encoder, depth=3))
    elif isinstance(config, MultimodalConfig):
        config = replace(config, vision=replace(config.vision, depth=2))
    elif isinstance(config, UniversalConfig):
        config = with_stacks(config, lambda stack: replace(stack, depth=min(stack.depth, 8)))
    else:
        config = replace(config, depth=min(config.depth, 8))
    model = create(config, device="meta")
    applied: list[str] = []
    monkeypatch.setattr(recompute, "_apply", lambda model, block, kind: applied.append(kind))
    layers = [(number, layer) for number, stack in enumerate(stacks(config)) for layer in stack.layers]
    for setting in (
        "selective", "operators", "elementwise", "early", "full recompute_every=2.5", "budget", "budget budget=0.01",
        "budget budget=1",
    ):  # fmt: skip
        plan = Plan.parse(f"recompute={setting}")
        work = describe(config, plan, "cpu")
        kinds = block_kinds(config, plan, work)
        assert len(kinds) == len(layers) == work.depth
        parts = {
            (n, part.block.layer): part for n, some in enumerate(work.stacks) for part in some if part.block
        }
        assert Counter(layers) == {key: part.count for key, part in parts.items()}
        assert list(dict.fromkeys(layers)) == list(parts)
        if plan.recompute == "budget":
            for key, part in parts.items():
                mine = Counter(kind for kind, layer in zip(kinds, layers) if layer == key)
                assert mine == dict(dict(choose(work, allowed_bytes(work, plan)))[part])
        if model is None:
            continue
        applied.clear()
        recompute_blocks(model, plan, config)
        assert applied == kinds
    if model is not None:
        blocks: list[Any] = [
            model.get_submodule(one.name) for stack in anatomy_of(model).stacks for one in stack.blocks
        ]
        built = [
            (getattr(one.attention, "windowed", False), not isinstance(one.norm1, nn.Identity))
            for one in blocks
        ]
        assert built == [(layer.window > 0, layer.normed) for _, layer in layers]


def test_a_search_finds_the_budget_that_fills_the_memory() -> None:
    machine, base = load_machine("a100-80g"), "precision=O2 optimizer=fused attention=flash compile=blocks"
    found = {}
    for kind in ("budget", "early"):
        plan = Plan.parse(f"{base} dp=8 sharding=fsdp micro_batch=2 recompute={kind}")
        fixed = frozenset({"dp", "sharding", "micro_batch", "recompute"})
        found[kind] = search(preset("llama3-8b"), machine, 8, global_batch=512, base=plan, fixed=fixed)[0]
    best = found["budget"]
    assert best.plan.budget > 1
    assert 0.95 < best.memory_bytes / room(machine) <= 1
    assert best.iteration_seconds < 0.95 * found["early"].iteration_seconds
