"""Generation: what bounds it, and how memory grows."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import penstock
from penstock.config.decoding import Decoding
from penstock.config.machine import load_machine
from penstock.config.model import PRESETS, DecoderConfig
from penstock.config.plan import Plan
from penstock.decode.engine import Engine, Request
from penstock.errors import ConfigError
from penstock.planner import serve
from penstock.planner.describe import describe
from penstock.planner.rates import rates_of
from penstock.planner.serve import Serving, cache_bytes_per_token, operators_of, predict_inference

H100 = load_machine("h100")
LLAMA = PRESETS["llama3-8b"]
FINE = replace(
    PRESETS["mixtral-8x7b"], width=2048, heads=16, kv_heads=16, experts=64, experts_per_token=6,
    shared_experts=2, expert_width=1408,
)  # fmt: skip
"""Many small experts, and some that every token visits."""


def test_the_cache_of_llama_3_8b_takes_128_kib_a_token() -> None:
    """32 blocks × keys and values × 8 heads × 128 features × 2 bytes."""
    assert cache_bytes_per_token(LLAMA, Serving()) == 32 * 2 * 8 * 128 * 2


def test_latents_are_all_that_is_kept_of_a_token() -> None:
    """61 blocks × (512 features of the latent and 64 of the rotated part) × 2 bytes, on each tensor parallel device."""
    for tp in (1, 8):
        assert cache_bytes_per_token(PRESETS["deepseek-v3"], Serving(tp=tp)) == 61 * 576 * 2


def test_a_branch_that_generates_is_predicted_with_the_body_below_it_alone() -> None:
    """48 blocks of 4,096 features and 12 of 768, and nothing of the branch that understands."""
    both: Any = PRESETS["ernie3-10b"]
    assert cache_bytes_per_token(both, Serving()) == 2 * (48 * 4096 + 12 * 768) * 2
    alone = replace(both, branches=("generating",))
    found, expected = (
        predict_inference(model, H100, Serving(prompt=128, generated=32)) for model in (both, alone)
    )
    assert found.decode_seconds_per_token == expected.decode_seconds_per_token
    assert found.prefill_seconds == expected.prefill_seconds
    assert found.cache_bytes == expected.cache_bytes
    read = expected.weights_bytes / 3.35e12
    assert read < found.decode_seconds_per_token < 2.2 * read
    assert found.weights_bytes > expected.weights_bytes  # a server holds the other branch, too


def test_decoding_one_sequence_reads_the_weights_once() -> None:
    one = predict_inference(LLAMA, H100, Serving(prompt=128, generated=32))
    read = 8.03e9 * 2 / 3.35e12
    assert read < one.decode_seconds_per_token < 2.2 * read
    assert one.fits
    assert one.largest_batch > 100


def test_a_batch_decodes_at_nearly_the_same_pace() -> None:
    alone = predict_inference(LLAMA, H100, Serving())
    many = predict_inference(LLAMA, H100, Serving(batch=32))
    assert many.decode_seconds_per_token < 1.5 * alone.decode_seconds_per_token
    assert many.tokens_per_second > 15 * alone.tokens_per_second


def test_prefill_is_bound_by_products_and_scales_with_the_prompt() -> None:
    short = predict_inference(LLAMA, H100, Serving(prompt=2048))
    long = predict_inference(LLAMA, H100, Serving(prompt=8192))
    assert 3.5 < long.prefill_seconds / short.prefill_seconds < 5.0
    assert long.prefill_seconds > 2 * 7.5e9 * 8192 / 989e12


def test_fp8_halves_what_lies_in_blocks_and_multiplies_faster() -> None:
    half, packed, fp8 = (
        predict_inference(LLAMA, H100, Serving(**given))
        for given in ({}, {"weight_bytes": 1.0}, {"weight_bytes": 1.0, "weights": "fp8"})
    )
    tables = 2 * 128256 * 4096 + 4096  # embeddings, head and the last norm stay in bf16
    assert fp8.weights_bytes == half.weights_bytes / 2 + tables
    assert fp8.prefill_seconds < 0.75 * packed.prefill_seconds
    assert (
        packed.decode_seconds_per_token < fp8.decode_seconds_per_token < 0.7 * half.decode_seconds_per_token
    )
    with pytest.raises(ConfigError, match="a100-80g has none"):
        predict_inference(LLAMA, load_machine("a100-80g"), Serving(weights="fp8"))


def test_devices_and_fewer_bytes_shorten_decoding() -> None:
    llama = PRESETS["llama3-70b"]
    assert not predict_inference(llama, H100, Serving()).fits
    whole = predict_inference(llama, H100, Serving(tp=4))
    assert whole.fits
    half = predict_inference(llama, H100, Serving(tp=8))
    packed = predict_inference(llama, H100, Serving(tp=4, weight_bytes=1.0))
    assert half.decode_seconds_per_token < whole.decode_seconds_per_token
    assert packed.decode_seconds_per_token < whole.decode_seconds_per_token
    assert packed.weights_bytes == pytest.approx(whole.weights_bytes / 2)


def test_a_mixture_reads_only_the_experts_it_meets() -> None:
    mixtral = PRESETS["mixtral-8x7b"]
    one = predict_inference(mixtral, load_machine("h200"), Serving())
    many = predict_inference(mixtral, load_machine("h200"), Serving(batch=64))
    assert many.decode_seconds_per_token > 2 * one.decode_seconds_per_token


@pytest.mark.parametrize("model", [PRESETS["mixtral-8x7b"], FINE], ids=["coarse", "fine"])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 2), (4, 2), (8, 1), (8, 2), (8, 4), (8, 8)])
def test_no_degree_computes_faster_than_the_devices_can(model: DecoderConfig, tp: int, ep: int) -> None:
    one = predict_inference(model, H100, Serving(batch=64, tp=tp, ep=ep))
    sample = describe(replace(model, sequence=512), Plan(micro_batch=64, attention="flash"))
    flops = sum(part.count * op.flops for part in sample.blocks for op in part.forward if op.kind == "gemm")
    assert flops / one.prefill_seconds / one.serving.gpus < H100.achievable_flops["bf16"]


def test_experts_are_divided_among_the_devices_once() -> None:
    """Whole experts on each device, or a part of every one: the same bytes and the same products."""
    mixtral = PRESETS["mixtral-8x7b"]
    split = predict_inference(mixtral, H100, Serving(batch=64, tp=8))
    whole = predict_inference(mixtral, H100, Serving(batch=64, tp=8, ep=8))
    assert (whole.weights_bytes, whole.cache_bytes) == (split.weights_bytes, split.cache_bytes)
    assert whole.serving.gpus == split.serving.gpus == 8
    # Exchanges come on top, and there is little else to gain.
    assert 1.0 < whole.prefill_seconds / split.prefill_seconds < 1.2
    assert 0.95 < whole.decode_seconds_per_token / split.decode_seconds_per_token < 1.2
    # One sequence meets two experts: eight devices share their products, or two devices compute one each.
    alone, parted = (predict_inference(mixtral, H100, Serving(tp=8, ep=ep)) for ep in (8, 1))
    assert alone.decode_seconds_per_token > 1.3 * parted.decode_seconds_per_token


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"batch": 0}, "serving.batch is 0, but must be at least 1."),
    ({"prompt": -1}, "serving.prompt is -1, but must be at least 1."), ({"generated": 0}, "serving.generated is 0"),
    ({"tp": 0}, "serving.tp is 0"), ({"pp": 0}, "serving.pp is 0"), ({"ep": 0}, "serving.ep is 0"),
    ({"tp": 1.5}, "serving.tp is 1.5, but must be a whole number."),
    ({"weight_bytes": 0.0}, "serving.weight_bytes is 0.0, but must be above 0."),
    ({"weight_bytes": math.nan}, "serving.weight_bytes is nan"),
    ({"cache_bytes": -2.0}, "serving.cache_bytes is -2.0"), ({"cache_bytes": math.inf}, "serving.cache_bytes is inf")],
)  # fmt: skip
def test_impossible_sizes_are_named(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        predict_inference(LLAMA, H100, Serving(**sizes))
    assert [message in problem for problem in caught.value.problems] == [True]


def test_impossible_degrees_are_named() -> None:
    mixtral = PRESETS["mixtral-8x7b"]
    with pytest.raises(ConfigError, match="tp=7 cannot split"):
        predict_inference(LLAMA, H100, Serving(tp=7))
    with pytest.raises(ConfigError, match="only decoders"):
        predict_inference(PRESETS["t5-small"], H100, Serving())
    with pytest.raises(ConfigError, match=r"ep=8 .* over the tp=1 devices of a stage, so it must divide tp"):
        predict_inference(mixtral, H100, Serving(ep=8))
    with pytest.raises(ConfigError, match=r"ep=8 .* tp=4"):
        predict_inference(mixtral, H100, Serving(tp=4, ep=8))
    with pytest.raises(ConfigError, match="ep=16 cannot split the model's 8 experts evenly"):
        predict_inference(mixtral, H100, Serving(tp=16, ep=16))
    with pytest.raises(ConfigError, match="ep=2 is for mixtures of experts"):
        predict_inference(LLAMA, H100, Serving(tp=2, ep=2))


def test_generation_is_predicted_by_the_package() -> None:
    assert penstock.predict_inference is predict_inference
    assert penstock.Serving is Serving


def test_steps_of_our_server_on_a_gpu_are_predicted_as_they_were_measured() -> None:
    """GPT-2 on an H200: 128 tokens of 8 texts, launched one by one and recorded. Nothing is fitted to either."""
    path = Path(__file__).parent.parent.parent / "benchmarks" / "results" / "generate_h200.json"
    (cell,) = json.loads(path.read_text())["cells"]
    given = {"batch": cell["batch"], "prompt": cell["prompt"], "generated": cell["new"]}
    seconds = {}
    for steps, way in (("launched", "penstock"), ("recorded", "penstock compiled"), ("device", "")):
        told = predict_inference(PRESETS["gpt2"], load_machine("h200"), Serving(**given, steps=steps))
        seconds[steps] = cell["batch"] * cell["new"] / told.tokens_per_second
        if way:
            assert seconds[steps] == pytest.approx(statistics.median(cell["seconds"][way]), rel=0.15)
    assert seconds["device"] < seconds["recorded"] / 1.5
    large = [predict_inference(LLAMA, H100, Serving(batch=256, steps=one)) for one in ("device", "launched")]
    assert large[0].prefill_seconds == large[1].prefill_seconds, "a busy device hides its launches"
    paged = 128 * 2**10 * 256 * (512 + 63) * (serve.CACHE_PASSES - 1) / rates_of(H100, Plan()).memory
    more = large[1].decode_seconds_per_token - large[0].decode_seconds_per_token
    assert more == pytest.approx(paged, rel=0.01)


def test_recorded_steps_keep_a_cache_for_each_bucket_of_widths() -> None:
    """Of GPT-2 with 300 tokens: buckets of 64, 128, 192, 256 and 320, and the widest twice more, of 36 KiB a token."""
    kept = serve.recorded_bytes(PRESETS["gpt2"], Serving(), 300)
    assert kept == 36 * 2**10 * (64 + 128 + 192 + 256 + 3 * 320) + 4 * 5 * 50257
    longer = serve.recorded_bytes(PRESETS["gpt2"], Serving(), 100_000)
    assert longer < 36 * 2**10 * 19 * 114_688, "16 are kept"


VIEWS = (
    "as_strided", "detach", "expand", "narrow", "permute", "reshape", "select", "slice", "squeeze", "t", "transpose",
    "unbind", "unsqueeze", "view",
)  # fmt: skip


class Counting(TorchDispatchMode):
    """Counts operators that compute, and not only view."""

    operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [
    "gpt2", "llama-tiny", "qwen-tiny", "phi-tiny", "olmo2-tiny", "smollm3-tiny", "glm-tiny", "gemma2-tiny",
    "gemma3-tiny", "mixtral-tiny", "qwen3-moe-tiny", "gpt-oss-tiny", "deepseek-tiny", "marian-tiny", "t5-tiny",
])  # fmt: skip
def test_operators_of_a_step_are_those_of_our_engine(name: str) -> None:
    sizes: dict[str, Any] = {"width": 32, "heads": 2}
    counted: dict[int, Counting] = {}
    predicted = {}
    for depth in (2, 4):
        model: Any = replace(PRESETS[name], vocabulary=50)
        if model.graph.remembered:
            model = replace(model, decoder=replace(model.decoder, depth=depth))
        else:
            model = replace(model, **sizes, depth=depth)
        engine = Engine(penstock.create(model).bfloat16(), slots=3, context=32, cache="paged", start=0)
        for text in range(3):
            ids = tuple(range(1, 6 + text))
            engine.admit(Request(ids=ids, decoding=Decoding(max_tokens=9, ignore_end=True)))
        for _ in range(3):
            engine.step()
        with Counting() as counted[depth]:
            engine.step()
        predicted[depth] = operators_of(model.writing().graph)
    each = (counted[4].operators - counted[2].operators) / 2
    assert each == pytest.approx((predicted[4] - predicted[2]) / 2, rel=0.1)
    # Around its blocks an encoder–decoder has up to 15 more.
    assert counted[2].operators == pytest.approx(predicted[2], rel=0.15)
