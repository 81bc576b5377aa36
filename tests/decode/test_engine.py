"""Slots: whichever texts run beside a text, whenever they come, and however they are kept, it stays the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from helpers.generation import BOTH, DECODERS, WORDS, served, tiny
from helpers.sweeps import sweep
from penstock.config.decoding import Decoding
from penstock.config.model import PRESETS
from penstock.decode.engine import Engine, Request
from penstock.decode.static import Compiled
from penstock.errors import ConfigError
from penstock.models import Model, create


def plain(model: Model, ids: Sequence[int], steps: int) -> list[int]:
    """The likeliest tokens, by running the whole model for each."""
    tokens = [0] if model.graph.remembered else list(ids)
    begin = len(tokens)
    for _ in range(steps):
        given = torch.tensor([tokens])
        with torch.no_grad():
            logits = model(torch.tensor([ids]), given) if model.graph.remembered else model(given)
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[begin:]


@pytest.mark.parametrize("name", sweep([*DECODERS, *BOTH], ["gpt", "llama", "t5-tiny"], slow=["pair"]))
def test_neither_company_nor_order_nor_cache_changes_a_token(name: str) -> None:
    model = tiny(name)
    draw = random.Random(1)
    start = tuple(draw.choices(range(WORDS), k=6))
    requests = [
        Request(
            ids=(*start, *draw.choices(range(WORDS), k=draw.randint(1, 9))), decoding=Decoding(max_tokens=9)
        )
        for _ in range(7)
    ]
    expected = [plain(model, request.ids, 9) for request in requests]
    assert len({tuple(text) for text in expected}) > 1
    for cache, chunk, late in (("slots", 4, 0), ("paged", 100, 3), ("paged", 3, 0)):
        engine = Engine(model, slots=3, cache=cache, block=4, chunk=chunk, start=0)  # type: ignore[arg-type]
        found = served(engine, requests, late)
        assert [text for text, _ in found] == expected
        assert {why for _, why in found} == {"length"}
        assert engine.running == 0


def test_prompts_that_begin_alike_are_read_once() -> None:
    model, start = tiny("gpt"), tuple(range(16))
    engine = Engine(model, slots=2, cache="paged", block=4)
    requests = [Request(ids=(*start, last), decoding=Decoding(max_tokens=3)) for last in (20, 30)]
    read = []
    model.decoder.register_forward_pre_hook(lambda _, given: read.append(given[0].shape[1]))
    found = [served(engine, [request])[0][0] for request in requests]
    assert read == [17, 1, 1, 1, 1, 1]
    assert found == [plain(model, request.ids, 3) for request in requests]


@pytest.mark.parametrize("cache", ["slots", "paged"])
def test_prompts_that_come_together_are_read_together_as_far_as_a_step_may(cache: Any) -> None:
    model = tiny("gpt")
    requests = [Request(ids=tuple(range(count)), decoding=Decoding(max_tokens=2)) for count in (3, 5, 4, 12)]
    read = []
    model.decoder.register_forward_pre_hook(lambda _, given: read.append(tuple(given[0].shape[:2])))
    engine = Engine(model, slots=4, cache=cache, block=4, chunk=16)
    found = served(engine, requests)
    # Of 16 tokens three prompts with padding take 15, and of the fourth there is one more in this step.
    assert read[:3] == [(3, 5), (1, 1), (1, 11)]
    assert [text for text, _ in found] == [plain(model, request.ids, 2) for request in requests]


def test_a_seed_draws_the_same_beside_others_and_another_seed_does_not() -> None:
    model = tiny("llama")
    asked = Request(ids=(1, 2, 3), decoding=Decoding(max_tokens=12, temperature=1.5, seed=7))
    other = Request(ids=(4, 5), decoding=Decoding(max_tokens=12, temperature=1.5, seed=8, top_k=5))
    alone = served(Engine(model, slots=1), [asked])[0]
    beside = served(Engine(model, slots=3, cache="paged"), [other, asked, other])
    assert beside[1] == alone
    assert beside[0] == beside[2]
    assert served(Engine(model, slots=1), [Request(ids=asked.ids, decoding=other.decoding)])[0] != alone


def test_the_end_of_text_ends_it_unless_it_is_ignored() -> None:
    model = tiny("gpt")
    text = plain(model, (1, 2, 3), 8)
    end = text[4]
    until = text[: text.index(end)]
    engine = Engine(model, slots=1, ends=(end,))
    asked = Request(ids=(1, 2, 3), decoding=Decoding(max_tokens=8))
    assert served(engine, [asked])[0] == (until, "stop")
    on = Request(ids=(1, 2, 3), decoding=Decoding(max_tokens=8, ignore_end=True))
    assert served(engine, [on])[0] == (text, "length")
    least = Request(ids=(1, 2, 3), decoding=Decoding(max_tokens=8, min_tokens=8))
    assert len(served(engine, [least])[0][0]) == 8


def test_what_can_never_run_is_refused_with_all_reasons() -> None:
    engine = Engine(tiny("gpt"), slots=1, context=16, cache="paged", tokens=8, block=4)
    with pytest.raises(ConfigError, match="no tokens") as caught:
        engine.admit(Request(ids=(), decoding=Decoding(max_tokens=20, beams=2)))
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigError, match="outside of the vocabulary"):
        engine.admit(Request(ids=(WORDS,), decoding=Decoding(max_tokens=2)))
    with pytest.raises(ConfigError, match="names a token outside"):
        engine.admit(Request(ids=(1,), decoding=Decoding(max_tokens=2, bias=(f"{WORDS}=1",))))
    with pytest.raises(ConfigError, match="needs the number"):
        Engine(tiny("t5-tiny"), slots=1)
    with pytest.raises(ConfigError, match="does not generate"):
        Engine(create(PRESETS["bert-tiny"], device="meta"))
    assert engine.running == 0


def test_full_slots_and_full_caches_wait() -> None:
    engine = Engine(tiny("gpt"), slots=2, cache="paged", tokens=12, block=4)
    small, large = (Request(ids=(1, 2), decoding=Decoding(max_tokens=most)) for most in (2, 6))
    assert [engine.admit(one) for one in (large, large, small, small)] == [0, None, 1, None]
    assert engine.running == 2
    engine.release(0)
    assert engine.admit(large) == 0


@pytest.mark.parametrize(
    "name", sweep(["gpt", "llama", "alibi", "window", "t5-tiny", "marian-tiny"], ["llama"])
)
def test_compiled_steps_of_all_slots_change_no_token(name: str) -> None:
    model = tiny(name)
    draw = random.Random(2)
    requests = [
        Request(ids=tuple(draw.choices(range(WORDS), k=draw.randint(1, 9))), decoding=Decoding(max_tokens=9))
        for _ in range(7)
    ]
    expected = [plain(model, request.ids, 9) for request in requests]
    engine = Engine(model, slots=3, chunk=4, start=0, compiled=Compiled(model, backend="eager"))
    engine.warm()
    assert engine.running == 0
    assert [text for text, _ in served(engine, requests, late=3)] == expected


def test_compiled_steps_are_narrow_again_after_a_long_text() -> None:
    model = tiny("gpt")
    engine = Engine(model, slots=2, compiled=Compiled(model, backend="eager"))
    long, short = (tuple(draw % WORDS for draw in range(3, 3 + count)) for count in (100, 4))
    widths = []
    for ids in (short, long, short):
        request = Request(ids=ids, decoding=Decoding(max_tokens=9))
        assert served(engine, [request])[0][0] == plain(model, ids, 9)
        widths.append(engine._past.store.width)  # type: ignore[union-attr]
    assert widths == [64, 128, 64]
