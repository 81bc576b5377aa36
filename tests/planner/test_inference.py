"""Generation: what bounds it, and how memory grows."""

from __future__ import annotations

import pytest

from penstock.config.machine import load_machine
from penstock.config.transformer import TRANSFORMERS
from penstock.errors import ConfigError
from penstock.planner.inference import Serving, cache_bytes_per_token, predict_inference
from penstock.planner.shapes import shape_of

H100 = load_machine("h100")
LLAMA = TRANSFORMERS["llama3-8b"]


def test_the_cache_of_llama_3_8b_takes_128_kib_a_token() -> None:
    """32 blocks × keys and values × 8 heads × 128 features × 2 bytes."""
    assert cache_bytes_per_token(shape_of(LLAMA), Serving()) == 32 * 2 * 8 * 128 * 2


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


def test_devices_and_fewer_bytes_shorten_decoding() -> None:
    llama = TRANSFORMERS["llama3-70b"]
    assert not predict_inference(llama, H100, Serving()).fits
    whole = predict_inference(llama, H100, Serving(tp=4))
    assert whole.fits
    half = predict_inference(llama, H100, Serving(tp=8))
    packed = predict_inference(llama, H100, Serving(tp=4, weight_bytes=1.0))
    assert half.decode_seconds_per_token < whole.decode_seconds_per_token
    assert packed.decode_seconds_per_token < whole.decode_seconds_per_token
    assert packed.weights_bytes == pytest.approx(whole.weights_bytes / 2)


def test_a_mixture_reads_only_the_experts_it_meets() -> None:
    mixtral = TRANSFORMERS["mixtral-8x7b"]
    one = predict_inference(mixtral, load_machine("h200"), Serving())
    many = predict_inference(mixtral, load_machine("h200"), Serving(batch=64))
    assert many.decode_seconds_per_token > 2 * one.decode_seconds_per_token


def test_impossible_degrees_are_named() -> None:
    with pytest.raises(ConfigError, match="tp=7 cannot share out"):
        predict_inference(LLAMA, H100, Serving(tp=7))
    with pytest.raises(ConfigError, match="only decoders"):
        predict_inference(TRANSFORMERS["t5-small"], H100, Serving())
