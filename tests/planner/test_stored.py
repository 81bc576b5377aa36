"""Layers that store their weights for inference: by which rates they are priced, and what predictions say of that."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from helpers.toy import TOY
from penstock.config.formats import Products
from penstock.config.machine import GemmSample, KernelSample, Machine, load_machine
from penstock.config.model import PRESETS, ModelConfig
from penstock.config.plan import Plan
from penstock.planner.describe import describe
from penstock.planner.prediction import predict, predict_pass
from penstock.planner.serve import Passes, Serving, predict_inference
from penstock.planner.terms import assumption, storing

RATE, TRAINED = 4e11, 1e11
BERT: Any = replace(PRESETS["bert-base"], sequence=128, dropout=0.0)  # type: ignore[call-arg]
GPT: Any = PRESETS["gpt2"]
PASS = Plan(micro_batch=2, attention="auto")


def _machine(trained: float = TRAINED, memory: float = 1e13, **rates: float) -> Machine:
    """A machine with rates of training in int8 and of layers with these weights, whose memory is so fast that reading
    weights takes no longer than to multiply the first rows by them."""
    samples = [
        GemmSample(dtype=name, m=128, n=768, k=768, flops_per_second=rate, form="stored")
        for name, rate in rates.items()
    ]
    known = {"int8": trained} if trained else {}
    peaks = TOY.peak_flops | known
    return replace(TOY, peak_flops=peaks, memory_bytes_per_second=memory, gemm=tuple(samples))


def _seconds(
    machine: Machine, weights: Products = "int8", model: ModelConfig = BERT, plan: Plan = PASS
) -> float:
    return predict_pass(model, machine, plan, weights=weights)


def _flops(machine: Machine, *, heads: bool) -> float:
    """FLOPs of the products that are priced by the rate of stored layers."""
    work = describe(BERT, PASS, machine, storing=storing(machine, "int8", heads=heads))
    return sum(part.count * op.flops for part in work.parts for op in part.forward if op.narrow)


def test_a_pass_in_int8_is_priced_by_the_rate_of_the_layers_that_compute_it() -> None:
    fast, slow = _machine(int8=RATE), _machine(int8=RATE / 2)
    blocks = 2.0 * 12 * 2 * 128 * (3 + 1 + 4 + 4) * 768**2
    assert _flops(fast, heads=False) == blocks, "what a folder in int8 leaves in fp32 is none of them"
    assert _flops(fast, heads=True) == blocks + 2.0 * 2 * 128 * 768 * (768 + BERT.vocabulary)
    assert _seconds(slow) - _seconds(fast) == pytest.approx(blocks / RATE)
    assert _seconds(_machine(trained=2 * TRAINED, int8=RATE)) == _seconds(fast), "nothing is trained here"
    assert _seconds(fast, "int8_weights") == _seconds(_machine(), "int8_weights")
    assert _seconds(_machine(int8_weights=RATE), "int8_weights") == _seconds(fast)


def test_layers_round_multiply_and_scale_in_one_operator() -> None:
    listed = {}
    for machine in (_machine(int8=RATE), _machine()):
        work = describe(BERT, PASS, machine, storing=storing(machine, "int8"))
        (block,) = work.blocks
        listed[bool(machine.gemm)] = block.forward
        (up,) = (op for op in block.forward if op.name == "mlp.up" and op.kind == "gemm")
        rows, width = 2 * 128, 768
        read = 4 if machine.gemm else 1
        assert up.read == rows * width * read + 4 * width**2 + (4 * width * 4)
        assert up.written == rows * 4 * width * 4
    own = [op.name for op in listed[True]]
    assert [op.name for op in listed[False] if not op.name.endswith((".quantize", ".scale"))] == own
    assert len(listed[False]) == len(own) + 2 * 4


@pytest.mark.parametrize("rate", [RATE / 4, 1e15])
def test_weights_are_read_while_the_core_multiplies_the_first_rows(rate: float) -> None:
    """84.9 MB in blocks: 8 and 17 ms at these bandwidths. Slow products of 6 of 256 rows hide 11 of them."""
    fast, slow = (_machine(memory=memory, int8=rate) for memory in (1e10, 5e9))
    work = describe(BERT, PASS, fast, storing=storing(fast, "int8"))
    operators = [(part.count, op) for part in work.parts for op in part.forward if op.module != "loss"]
    moved = sum(count * (op.read + op.written) for count, op in operators if op.kind != "attention")
    weights = sum(count * op.n * op.k for count, op in operators if op.narrow)
    assert weights == 12 * 12 * 768**2
    products = _flops(fast, heads=False) / rate / math.ceil(256 / 6)
    other, *read = (moved - weights) / 1e10, weights / 5e9, weights / 1e10
    longer = other + max(products, read[0]) - max(products, read[1])
    assert _seconds(slow) - _seconds(fast) == pytest.approx(longer, rel=1e-6)


def test_a_machine_without_the_rate_falls_back_and_says_so() -> None:
    known, trained, none = _machine(int8=RATE), _machine(), _machine(trained=0.0)
    assert assumption(known, "int8") == assumption(none, "plain") == assumption(none, "packed") == ""
    assert "the rate of int8 products in training is assumed; measure it with penstock probe" in assumption(
        trained, "int8"
    )
    assert "the rate of products of plain weights is assumed" in assumption(none, "int8")
    assert _seconds(trained) - _seconds(_machine(trained=2 * TRAINED)) == pytest.approx(
        _flops(trained, heads=False) / TRAINED / 2
    )
    plain = predict_pass(BERT, none, PASS)
    assert 0.9 * plain < _seconds(none) < plain, "the same products, of weights with fewer bytes"


def test_generation_in_int8_is_priced_by_the_same_layers() -> None:
    serving = Serving(batch=4, prompt=64, half=False, weight_bytes=1.0, cache_bytes=4.0, weights="int8")
    fast, slow, none = _machine(int8=1e11), _machine(int8=5e10), _machine(trained=0.0)
    inside = 2.0 * 12 * 4 * (3 + 1 + 4 + 4) * 768**2
    head = 2.0 * 4 * 768 * GPT.vocabulary
    steps = [Passes(GPT, machine, serving).decode(4, 64) for machine in (slow, fast)]
    assert steps[0] - steps[1] == pytest.approx((inside + head) / 1e11, rel=1e-6)
    assert predict_inference(GPT, fast, serving).assumption == ""
    assert "toy has no rate" in predict_inference(GPT, none, serving).assumption
    h100 = load_machine("h100")
    served = predict_inference(GPT, h100, replace(serving, half=True))
    assert served.assumption == ""
    assert replace(served, serving=serving) == replace(
        predict_inference(GPT, h100, replace(serving, half=True, weights="plain")), serving=serving
    ), "GPUs multiply plain weights"


def test_a_pass_of_inference_drops_nothing() -> None:
    dropping = replace(BERT, dropout=0.1)
    assert predict_pass(dropping, TOY, PASS) == predict_pass(BERT, TOY, PASS)


def test_inference_computes_gelu_by_tanh_as_its_kernel_does() -> None:
    rates = {"gelu_tanh": 1e8, "fused_gelu_tanh": 1e9}
    machine = replace(
        TOY, name="activations",
        kernels=tuple(KernelSample(name=name, per_second=rate) for name, rate in rates.items()),
    )  # fmt: skip
    slower = replace(
        machine, name="slower", kernels=(machine.kernels[0], replace(machine.kernels[1], per_second=5e8))
    )
    config = replace(GPT, sequence=128)
    hidden = 12 * 2 * 128 * 4 * 768
    seconds = [predict_pass(config, one, PASS) for one in (slower, machine)]
    assert seconds[0] - seconds[1] == pytest.approx(hidden / 1e9)


def test_attention_of_one_query_has_a_rate_of_its_own() -> None:
    serving = Serving(batch=4, prompt=64, half=False, cache_bytes=4.0)
    kernels = [KernelSample(name="attention", per_second=1e10, tokens=64, features=64)]
    kernels.append(KernelSample(name="attention_token", per_second=1e9, tokens=64, features=64))
    machine = replace(TOY, name="one query", kernels=tuple(kernels))
    slower = replace(machine, name="slower", kernels=(kernels[0], replace(kernels[1], per_second=5e8)))
    steps = [Passes(GPT, one, serving).decode(4, 64) for one in (slower, machine)]
    assert steps[0] - steps[1] == pytest.approx(12 * 4.0 * 4 * 768 * 65 / 1e9)
    prompts = [Passes(GPT, one, serving).prefill(64, 4) for one in (slower, machine)]
    assert prompts[0] == prompts[1]


def test_blocks_in_one_call_are_one_launch_with_attention_of_their_own() -> None:
    """Norms, activations and sums add nothing to the products and the attention of such blocks."""
    kernels = [KernelSample(name=name, per_second=1e9) for name in ("gelu", "norm")]
    kernels.append(KernelSample(name="attention", per_second=1e10, tokens=197, features=64))
    own, slow = (replace(kernels[2], name="attention_block", per_second=rate) for rate in (2e10, 1e10))
    without = replace(_machine(int8=RATE), name="by operators", kernels=tuple(kernels))
    rated = replace(without, name="in one call", kernels=(*kernels, own))
    slower = replace(without, name="slower", kernels=(*kernels, slow))
    vit: Any = PRESETS["vit-s16"]
    seconds = [_seconds(machine, model=vit) for machine in (rated, slower, without)]
    attended = 12 * 4.0 * 6 * 197**2 * 64  # by each of two images
    assert seconds[1] - seconds[0] == pytest.approx(2 * attended / 2e10)
    serving = Serving(half=False, weight_bytes=1.0, weights="int8")
    marian: Any = PRESETS["marian-base"]  # whose encoder is in one call
    for model, blocks, heads in ((vit, 12, 6), (marian, 6, 8)):
        deployed = [Passes(model, machine, serving).prefill(197) for machine in (rated, slower)]
        assert deployed[1] - deployed[0] == pytest.approx(blocks * 4.0 * heads * 197**2 * 64 / 2e10)
    activated, normed = (2 * 12 * 197 * size for size in (1536, 2 * 384))
    launches = without.operator_seconds or without.launch_seconds
    assert seconds[2] - seconds[1] > (activated + normed) / 1e9 + 12 * 8 * launches
    others = [
        replace(vit, layer_scale=1.0), replace(vit, mlp="swiglu"), replace(vit, heads=12, width=288), GPT,
    ]  # fmt: skip
    for model in others:
        assert _seconds(rated, model=model) == _seconds(without, model=model), "computed by operators"
    for weights in ("int8_weights", "plain"):
        assert _seconds(rated, weights, vit) == _seconds(without, weights, vit)


@pytest.mark.parametrize(("weights", "each"), [("packed", 4.0), ("int8", 1.0)])
def test_weights_of_one_text_are_read_at_a_rate_of_their_own(weights: Products, each: float) -> None:
    packed = GemmSample(dtype="fp32", m=128, n=768, k=768, flops_per_second=1e13, form="packed")
    base = _machine(int8=1e13)

    def decoded(rate: float) -> float:
        reading = KernelSample(name="reading", per_second=rate)
        machine = replace(base, gemm=(*base.gemm, packed), kernels=(reading,))
        serving = Serving(half=False, weight_bytes=each, cache_bytes=4.0, weights=weights)
        return Passes(GPT, machine, serving).decode(1, 64)

    read = each * (12 * 12 * 768**2 + 768 * GPT.vocabulary)
    assert decoded(1e10) - decoded(2e10) == pytest.approx(read / 2e10, rel=1e-3)


def test_packed_layers_are_priced_by_their_own_rate_and_so_is_what_int8_leaves_out() -> None:
    def machine(rate: float) -> Machine:
        packed = GemmSample(dtype="fp32", m=128, n=768, k=768, flops_per_second=rate, form="packed")
        return replace(none, gemm=(*none.gemm, packed))

    attention = KernelSample(name="attention", per_second=1e10, tokens=128, features=64)
    none = replace(_machine(int8=RATE), kernels=(attention,))
    fast, slow = machine(4e11), machine(2e11)
    blocks, head = _flops(none, heads=False), 2.0 * 2 * 128 * 768 * (768 + BERT.vocabulary)
    for weights, flops in (("packed", blocks + head), ("int8", head), ("plain", 0.0)):
        given: Any = weights
        assert _seconds(slow, given) - _seconds(fast, given) == pytest.approx(flops / 4e11)
        assert (_seconds(none, given) == _seconds(fast, given)) == (weights == "plain")
    half = Plan(micro_batch=2, precision="O3", dtype="bf16", attention="flash")
    assert _seconds(slow, "packed", plan=half) == _seconds(fast, "packed", plan=half), "of fp32 alone"
    # The rate of training stays what it is.
    assert predict(BERT, slow, PASS) == replace(predict(BERT, fast, PASS), machine=slow.name)
    serving = Serving(half=False, cache_bytes=4.0, weights="packed")
    assert Passes(GPT, slow, serving).prefill(64, 4) > Passes(GPT, fast, serving).prefill(64, 4)
