"""What the planner counts of text models, against our own modules: parameters, FLOPs, and what autograd keeps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from helpers.families import PRUNED
from helpers.kept import kept_blocks
from helpers.sweeps import in_turn, sweep
from penstock.config.graph import PatchInput, WordHead
from penstock.config.model import PRESETS, ViTConfig, stacks
from penstock.config.plan import Plan
from penstock.cpu import this_cpu
from penstock.kernels.choices import LOSS_BUDGET
from penstock.models import create
from penstock.planner.describe import describe, totals
from penstock.planner.memory import pass_bytes
from penstock.planner.operators import PENSTOCK, Software, Workload

TITAN = Software(norms_apart=True)
BUILT = [name for name, config in PRESETS.items() if not isinstance(config, ViTConfig)]
TINY = [name for name in BUILT if name.endswith("tiny") and PRESETS[name].graph.words]


@pytest.mark.parametrize("name", sweep([*BUILT, "pruned"], [*TINY, *BUILT[::4], "pruned"]))
def test_parameters_are_exact(name: str) -> None:
    config = PRUNED if name == "pruned" else PRESETS[name]
    model = create(config, device="meta")
    parameters = list(model.parameters())
    assert totals(config).parameters == sum(parameter.numel() for parameter in parameters)
    assert describe(config, Plan()).tensors == len(parameters)


def _inputs(
    config: Any, samples: int, device: str = "cpu", dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    found = []
    for one in config.graph.inputs:
        if isinstance(one, PatchInput):
            size = one.image_size
            found.append(torch.zeros(samples, one.channels, size, size, device=device, dtype=dtype))
        else:
            found.append(torch.zeros(samples, one.length, dtype=torch.long, device=device))
    return tuple(found)


def _made(model: Any, inputs: tuple[Tensor, ...], targets: Tensor | None = None) -> Tensor:
    """The sum of what a model computes of inputs; each head of several of the rows that it is asked for."""
    if len(model.graph.heads) == 1:
        return model(*inputs, targets=targets).sum()  # type: ignore[no-any-return]
    heads = model.graph.heads_of(WordHead)
    some = {
        head.name: round(head.target_share * inputs[-1].numel()) for head in heads if head.target_share < 1
    }
    rows = {name: torch.arange(count, device=inputs[-1].device) for name, count in some.items()}
    given: dict[str, Any] = {"rows": rows} if rows else {}
    if targets is not None:
        asked = {head.name: targets for head in heads}
        given["targets"] = asked | {name: targets.new_zeros(count) for name, count in some.items()}
    total: Tensor = sum(out.sum() for out in model(*inputs, **given).values())  # type: ignore[assignment]
    return total


@pytest.mark.parametrize("name", TINY)
def test_flops_equal_torchs(name: str) -> None:
    # Which experts a token visits is not known on the meta device, and of grouped products torch counts nothing.
    mixed = any(stack.experts for stack in stacks(PRESETS[name]))
    model = create(PRESETS[name], device="cpu" if mixed else "meta", dtype=torch.float64 if mixed else None)
    model.set_attention("plain")
    with FlopCounterMode(display=False) as counter:
        _made(model, _inputs(PRESETS[name], 2, "cpu" if mixed else "meta")).backward()  # type: ignore[no-untyped-call]
    assert 2 * totals(PRESETS[name]).model_flops == pytest.approx(counter.get_total_flops(), rel=0.005)


@pytest.mark.parametrize(
    ("name", "way"), in_turn(TINY, itertools.product(["O0", "O1", "O3"], ["plain", "sdpa"]))
)
def test_activation_bytes_are_what_autograd_keeps(name: str, way: tuple[Any, Any]) -> None:
    plan = Plan(precision=way[0], attention=way[1], micro_batch=4)
    dtype = torch.bfloat16 if plan.precision == "O3" else torch.float32
    model = create(PRESETS[name], dtype=dtype)
    model.set_attention(plan.attention)
    kept = _kept_bytes(model, _inputs(PRESETS[name], 4, dtype=dtype), autocast=plan.precision == "O1")
    described = describe(PRESETS[name], plan, "cpu", avx512=this_cpu().avx512)
    assert pass_bytes(described, plan).kept == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize(("name", "precision"), in_turn(TINY, ["O0", "O1"]))
def test_one_more_sample_keeps_what_is_predicted(name: str, precision: str) -> None:
    """Without what autocast keeps for all samples together: half copies of weights."""
    model = create(PRESETS[name])
    plans = [Plan(precision=precision, micro_batch=samples) for samples in (2, 3)]  # type: ignore[arg-type]
    kept = [
        _kept_bytes(model, _inputs(PRESETS[name], plan.micro_batch), autocast=precision == "O1")
        for plan in plans
    ]
    avx512 = this_cpu().avx512
    predicted = [pass_bytes(describe(PRESETS[name], plan, "cpu", avx512=avx512), plan).kept for plan in plans]
    assert predicted[1] - predicted[0] == pytest.approx(kept[1] - kept[0], rel=0.02)


@pytest.mark.parametrize("precision", ["O0", "O1"])
def test_routers_keep_what_is_predicted(precision: str) -> None:
    changes = {"router_jitter": 0.1, "expert_dropout": 0.2, "router_normalised": False}
    config: Any = replace(PRESETS["mixtral-tiny"], **changes)
    plan = Plan(precision=precision, micro_batch=4)  # type: ignore[arg-type]
    model = create(config)
    kept = _kept_bytes(model, _inputs(config, 4), autocast=precision == "O1")
    described = describe(config, plan, "cpu", avx512=this_cpu().avx512)
    assert pass_bytes(described, plan).kept == pytest.approx(kept, rel=0.01)
    assert totals(config).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_unequal_layers_keep_what_is_predicted() -> None:
    plan = Plan(micro_batch=4, attention="plain")
    model = create(PRUNED)
    model.set_attention("plain")
    kept = _kept_bytes(model, _inputs(PRUNED, 4), autocast=False)
    assert pass_bytes(describe(PRUNED, plan, "cpu"), plan).kept == pytest.approx(kept, rel=0.02)


def _kept_bytes(model: nn.Module, inputs: tuple[Tensor, ...], *, autocast: bool) -> int:
    """Bytes of the distinct blocks of memory that autograd keeps of the model and its loss; parameters and inputs are
    not counted.
    """
    with kept_blocks(*model.parameters(), *inputs, autocast=autocast) as kept:
        _made(model, inputs, inputs[-1])
    return sum(kept.values())


@pytest.mark.parametrize(
    ("device", "software", "launches"), [("cuda", PENSTOCK, 1), ("cuda", TITAN, 8), ("cpu", PENSTOCK, 8)]
)
def test_rms_norms_are_one_kernel_on_a_gpu_of_today(device: str, software: Software, launches: int) -> None:
    block = describe(PRESETS["llama-tiny"], Plan(precision="O3", micro_batch=1), device, software).blocks[0]
    norm = next(op for op in block.forward if op.kind == "norm")
    assert norm.launches == launches
    if launches == 1:
        rows, width = 128, 128
        assert norm.read == norm.written == rows * width * 2
        assert norm.kept == rows * width * 2 + rows * 4  # what it was given, and one statistic of each row


def test_a_loss_in_chunks_keeps_no_logits() -> None:
    model = PRESETS["gpt2"]
    whole, chunked = (
        describe(model, Plan(micro_batch=2, loss=loss), "cpu")  # type: ignore[arg-type]
        for loss in ("whole", "chunked")
    )
    assert whole.model_flops == chunked.model_flops
    logits = 2 * 1024 * model.vocabulary * 4  # type: ignore[union-attr]
    inputs = 2 * 1024 * model.width * 4  # type: ignore[union-attr]
    ends = [pass_bytes(work, Plan(micro_batch=2)) for work in (whole, chunked)]
    assert ends[0].exit - ends[1].exit == pytest.approx(logits + inputs)
    # The logits of one chunk, the gradients of the table and those of the inputs.
    table = model.width * model.vocabulary * 4  # type: ignore[union-attr]
    assert ends[1].output == pytest.approx(LOSS_BUDGET["cpu"] + table + inputs, rel=0.05)


def _share_of(part: Workload, whole: Workload, name: str) -> float:
    """FLOPs of an operator of the first block in one list, as a share of those in another."""
    found = [next(op.flops for op in work.blocks[0].forward if op.name == name) for work in (part, whole)]
    return found[0] / found[1]


def test_padding_left_out_and_words_not_asked_for_are_not_computed() -> None:
    model, plan = PRESETS["bert-base"], Plan(micro_batch=4, padding="remove")
    whole, part = describe(model, plan, "cpu"), describe(model, plan, "cpu", real=0.5)
    mlp = [next(op for op in work.blocks[0].forward if op.name == "mlp.up") for work in (whole, part)]
    assert mlp[1].flops == mlp[0].flops / 2
    assert _share_of(part, whole, "attention.scores") == pytest.approx(
        1 / 3, rel=0.01
    )  # of lengths from 0 to 512
    on_gpu = describe(model, plan, real=0.5), describe(model, plan)
    assert _share_of(*on_gpu, "attention") == 1.0
    pinned = replace(plan, precision="O2", attention="flash")
    still = replace(model, dropout=0.0)  # type: ignore[call-arg]
    for one, share in ((model, 1.0), (still, 1 / 3)):
        with_lengths = describe(one, pinned, real=0.5), describe(one, pinned)
        assert _share_of(*with_lengths, "attention") == pytest.approx(share, rel=0.01)
    short = replace(model, sequence=63), replace(model, sequence=64)  # type: ignore[call-arg]
    shares = [
        _share_of(describe(m, plan, "cpu", real=0.5), describe(m, plan, "cpu"), "attention.scores")
        for m in short
    ]
    assert shares == [1.0, pytest.approx(1 / 3, rel=0.02)]
    kept = describe(model, replace(plan, padding="keep"), "cpu", real=0.5)
    assert kept.model_flops == whole.model_flops
    masked = describe(model, plan, "cpu", words=0.15)
    head = [next(op for op in work.parts[-1].forward if op.name == "head") for work in (whole, masked)]
    assert head[1].flops == pytest.approx(0.15 * head[0].flops)


def test_attention_in_blocks_is_priced_for_the_keys_that_it_sees() -> None:
    long = replace(PRESETS["gpt2"], sequence=1024, dropout=0.0)  # type: ignore[call-arg]
    plain = describe(long, Plan(attention="plain"), "cpu").blocks[0]
    scores = next(op for op in plain.forward if op.name == "attention.scores")
    assert scores.window == (1024 + 128) // 2
    near = describe(replace(long, window=100), Plan(), "cpu").blocks[0]  # type: ignore[call-arg]
    assert next(op for op in near.forward if op.name == "attention").window == 99 + 99
    wide = describe(replace(long, window=600), Plan(), "cpu").blocks[0]  # type: ignore[call-arg]
    assert next(op for op in wide.forward if op.name == "attention").window == 0
