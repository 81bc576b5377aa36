"""Ways to generate, each against what it must equal: a plain loop, an exhaustive search, the model's distribution."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.generation import BOTH, DECODERS, WORDS, Letters, logits_after, tiny
from helpers.models_of_strangers import chain
from helpers.sweeps import sweep
from penstock.config.decoding import Decoding
from penstock.config.plan import Plan
from penstock.data.text.tokenizers import Bytes
from penstock.decode.speculate import Chooser, _accept_or_draw
from penstock.errors import ConfigError
from penstock.infer.generator import Generator
from penstock.infer.text import Spelling, Stream

ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]


def generator(name: str, **given: Any) -> Generator:
    return Generator(tiny(name, **given), start=0, ends=())


@pytest.mark.parametrize(
    "name",
    sweep(
        [
            "gpt", "qwen", "alibi", "window", "gemma", "gemma 2", "phi", "olmo", "smollm", "glm", "gpt-oss",
            "deepseek", "pruned", *BOTH,
        ],
        ["gpt", "alibi", "window", "gemma 2", "gpt-oss", "deepseek", "t5-tiny"],
    ),
)  # fmt: skip
def test_one_beam_is_greedy_and_company_changes_nothing(name: str) -> None:
    made = generator(name)
    greedy = made.generate(ROWS, max_tokens=9)
    assert [made.generate(row, max_tokens=9)[0].ids for row in ROWS] == [each.ids for each in greedy]
    beams = made.generate(ROWS, max_tokens=20, beams=4)
    alone = [made.generate(row, max_tokens=20, beams=4)[0] for row in ROWS]
    assert [each.ids for each in alone] == [each.ids for each in beams]
    assert greedy[0].finished == "length"
    assert all(isinstance(each.score, float) for each in beams)


def test_texts_that_end_leave_the_others_as_they_are() -> None:
    made = generator("gpt")
    rows = [[n, n + 1] for n in range(12)]
    free = [each.ids for each in made.generate(rows, max_tokens=16)]
    end = Counter(token for row in free for token in row[2:9]).most_common(1)[0][0]
    made.ends = (end,)
    found = made.generate(rows, max_tokens=16)
    cut = [row[: row.index(end)] if end in row else row for row in free]
    assert [each.ids for each in found] == cut
    assert {each.finished for each in found} == {"stop", "length"}
    searched = made.generate(rows, max_tokens=16, beams=3)
    assert [made.generate(row, max_tokens=16, beams=3)[0].ids for row in rows] == [
        each.ids for each in searched
    ]


@pytest.mark.parametrize("name", ["gpt", "marian-tiny"])
def test_a_wide_beam_over_a_tiny_vocabulary_finds_the_best_of_all_texts(name: str) -> None:
    made = Generator(tiny(name, words=4), start=0, ends=(3,))
    source = [1, 2, 0]
    begin = [0] if made.model.graph.remembered else source
    scores: dict[tuple[int, ...], float] = {}
    shares: dict[tuple[int, ...], Tensor] = {}
    for text in (text for length in range(5) for text in itertools.product(range(3), repeat=length)):
        total = 0.0
        for place, token in enumerate(text):
            total += float(shares[text[:place]][token])
        if len(text) < 4:
            logits = logits_after(made.model, [*begin, *text], source)
            shares[text] = torch.log_softmax(logits.float(), -1)
            total += float(shares[text][3])
        scores[text] = total / min(len(text) + 1, 4) ** 0.5
    found = made.generate(source, max_tokens=4, beams=64, length_penalty=0.5, early_stopping="never")[0]
    best = max(scores, key=scores.__getitem__)
    assert found.ids == best
    assert found.score == pytest.approx(scores[best], abs=1e-5)


@pytest.mark.parametrize("name", ["gpt", "t5-tiny"])
@pytest.mark.parametrize("draft", [False, True])
def test_speculation_changes_no_token(name: str, draft: bool) -> None:
    plain = generator(name)
    small = tiny(name, seed=0) if draft else None
    made = Generator(plain.model, start=0, ends=(), draft=small)
    rows = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6], [7, 7, 7, 7]]
    for more in ({}, {"repetition_penalty": 1.3}, {"no_repeat_ngram": 2}):
        expected = [each.ids for each in plain.generate(rows, max_tokens=20, **more)]
        assert [each.ids for each in made.generate(rows, max_tokens=20, speculate=4, **more)] == expected


@pytest.mark.parametrize("draft", [False, True])
def test_what_is_checked_has_the_models_probabilities(draft: bool) -> None:
    """Pearson's chi-square test, at a level of one in a thousand."""
    from scipy.stats import chisquare

    settings = Decoding(temperature=1.3, top_p=0.95, seed=3)
    chooser = Chooser(settings, 0, (), torch.device("cpu"))
    own, other = torch.tensor([2.0, 0.0, 1.0, -1.0, 1.5]), torch.tensor([0.0, 1.0, 1.0, 0.5, 2.0])
    wanted, given = chooser.shares(own), chooser.shares(other)
    drafting, drawn = Chooser(settings, 0, (), torch.device("cpu")), Counter[int]()
    drafting.random.seed(4)
    for _ in range(3000):
        guess = drafting.draw(given) if draft else 2
        drawn[_accept_or_draw(chooser, own, guess, given if draft else None)] += 1
    live = [token for token in range(5) if wanted[token] > 0]
    assert set(drawn) <= set(live)
    assert chisquare([drawn[t] for t in live], [float(wanted[t]) * 3000 for t in live]).pvalue > 1e-3


def test_drawn_texts_are_those_of_the_draft_where_both_models_are_one() -> None:
    model = tiny("gpt")
    made = Generator(model, ends=(), draft=model)
    read: list[int] = []
    hook = model.decoder.register_forward_pre_hook(lambda _, given: read.append(given[0].shape[1]))  # type: ignore[operator]
    found = made.generate([1, 2], max_tokens=10, temperature=1.0, seed=1, speculate=4)
    hook.remove()
    assert len(found[0].ids) == 10
    assert read.count(5) >= 1, (
        "all guesses of a model for itself stay, so that it reads five tokens at a time"
    )


@pytest.mark.parametrize("name", sweep(DECODERS, ["llama"]))
def test_a_seed_draws_the_same_texts_and_texts_of_one_call_differ(name: str) -> None:
    made = generator(name)
    given: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "seed": 5}
    one = made.generate([1, 2], **given)[0].ids
    several = made.generate([[1, 2], [1, 2]], best=2, **given)
    assert several[0].ids == one
    assert len({each.ids for each in several}) == 4
    assert made.generate([1, 2], **given)[0].ids == one
    assert made.generate([1, 2], **{**given, "seed": 6})[0].ids != one


def test_stop_texts_end_a_text_and_are_left_out() -> None:
    made = Generator(tiny("gpt"), tokenizer=Letters(), ends=())
    whole = made.generate(["AB", "C"], max_tokens=24, temperature=3.0, seed=1)
    stop = whole[0].text[5:7]
    found = made.generate(["AB", "C"], max_tokens=24, temperature=3.0, seed=1, stop=(stop,))
    assert found[0].text == whole[0].text[: whole[0].text.index(stop)]
    assert found[0].finished == "stop"
    assert found[1].text == whole[1].text.partition(stop)[0]
    pieces = list(made.stream("AB", max_tokens=24, temperature=3.0, seed=1, stop=(stop,)))
    assert "".join(pieces) == found[0].text
    assert "".join(made.stream("AB", max_tokens=24)) == made.generate("AB", max_tokens=24)[0].text


@pytest.mark.parametrize("text", ["plain", "größer 日本 🙂🙃 end", "aXbXXc"])
def test_streams_tell_whole_characters_and_hold_back_what_may_be_a_stop(text: str) -> None:
    tokenizer = Bytes()
    tokens = tokenizer.encode([text])[0].tolist()
    stream = Stream(tokenizer)
    told = [stream.add([token]) for token in tokens]
    assert "".join([*told, stream.end()]) == text == stream.text
    assert not any("\ufffd" in piece for piece in told)
    stopping = Stream(tokenizer, ("XXc", "end"))
    told = [stopping.add([token]) for token in tokens] + [stopping.end()]
    assert "".join(told) == stopping.text == text.partition("XXc")[0].partition("end")[0]
    assert stopping.stopped == (stopping.text != text)


def test_prompts_that_do_not_fit_are_refused_with_the_remedy() -> None:
    made = generator("gpt")
    for prompts, given, words in (
        ([1] * 120, {"max_tokens": 20}, "128 positions"),
        ([WORDS], {"max_tokens": 4}, "outside of the model's vocabulary"),
        ([[]], {}, "no tokens"),
        ("text", {}, "without one"),
        ([1], {"stop": ("x",), "max_tokens": 4}, "needs a tokenizer"),
        ([1], {"bias": ("60=1",), "max_tokens": 4}, "decoding names"),
        ([1], {"beams": 2, "temperature": 1.0}, "draws none"),
    ):
        with pytest.raises(ConfigError, match=words):
            made.generate(prompts, **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="decoder begins with"):
        Generator(tiny("t5-tiny"))
    with pytest.raises(ConfigError, match="but only one is running"):
        Generator(tiny("gpt"), Plan(tp=2))
    assert math.isfinite(generator("t5-tiny").generate([1, 2], beams=2, max_tokens=3)[0].score or math.nan)


def test_settings_are_those_of_a_record_with_changes() -> None:
    made = generator("gpt")
    short = Decoding(max_tokens=3)
    assert len(made.generate([1], short)[0].ids) == 3
    assert len(made.generate([1], short, max_tokens=4)[0].ids) == 4


def test_where_nobody_says_texts_are_as_long_as_positions_allow() -> None:
    model = tiny("gpt")
    room = model.config.sequence
    (short,) = Generator(model).generate([1, 2, 3])
    assert len(short.ids) == min(128, room - 3)
    with pytest.raises(ConfigError, match="lower max_tokens"):
        Generator(model).generate([1, 2, 3], max_tokens=room)


def test_the_first_word_of_a_continuation_keeps_its_space(tmp_path: Path) -> None:
    """In tokenizers of sentencepiece's kind, decoded as transformers decodes: with the prompt, which is taken off."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = chain(tmp_path / "chain")
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("The river", return_tensors="pt")
    ids = theirs.generate(**prompt, max_new_tokens=4, do_sample=False)[0]
    expected = tokenizer.decode(ids, skip_special_tokens=True).removeprefix("The river")
    assert expected == " runs tos STOP"
    made = Generator(folder)
    for how in ({}, {"beams": 2}, {"speculate": 2}):
        assert made.generate("The river", max_tokens=4, **how)[0].text == expected
    assert "".join(made.stream("The river", max_tokens=4)) == expected
    for stop, text in ((" to", " runs"), (" runs", ""), ("s STOP", " runs to")):
        assert made.generate("The river", max_tokens=4, stop=(stop,))[0].text == text
    spelling = Spelling(made.tokenizer)
    assert [spelling(n) for n in (made.encode(" runs")[-1], 3 + 0xE2, 1)] == [
        (" runs", b" runs"), ("bytes:\\xe2", b"\xe2"), ("<s>", b"<s>")
    ]  # fmt: skip


def test_a_prompt_that_ends_within_a_character_is_continued() -> None:
    tokens = Bytes().encode(["日本"])[0].tolist()
    for cut in range(len(tokens)):
        stream = Stream(Bytes(), (), tokens[:cut])
        told = "".join([*(stream.add([token]) for token in tokens[cut:]), stream.end()])
        assert told == "日本"[cut // 3 :]


def test_what_a_folder_asks_for_is_obeyed_or_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    from penstock.cli import main

    folder = chain(tmp_path / "chain")
    file = folder / "generation_config.json"
    plain = file.read_text()

    def asked(**more: Any) -> Generator:
        caplog.clear()
        file.write_text(json.dumps(json.loads(plain) | more))
        return Generator(folder)

    def written(*options: str) -> str:
        caplog.clear()
        assert main(["generate", str(folder), "The river", *options]) == 0
        return capsys.readouterr().out.rstrip("\n")

    made = asked(num_beams=1, do_sample=False, temperature=0.6, max_new_tokens=3)
    assert made.generate("The river")[0].text == written() == " runs tos"
    assert not caplog.records
    made = asked(
        do_sample=True, temperature=100.0, max_new_tokens=40, num_beams=2, guidance_scale=3, typical_p=0.9
    )
    (record,) = caplog.records
    for words in (
        "guidance_scale=3 (not supported)",
        "typical_p=0.9",
        "num_beams='2' (decoding.beams above 1",
    ):
        assert words in record.getMessage()
    assert made.usual == {"temperature": 100.0, "top_k": 50, "max_tokens": 40}
    usual = " runs tos STOP"
    assert made.generate("The river")[0].text != usual
    assert made.generate("The river", temperature=0)[0].text == usual
    assert made.generate("The river", Decoding())[0].text == written("--temperature", "0") == usual
    made = asked(num_beams=2, bad_words_ids=[[999]], min_new_tokens=2, forced_bos_token_id=5)
    assert "bad_words_ids" in caplog.records[0].getMessage()
    for _ in range(2):
        assert "".join(made.stream("The river", max_tokens=1)) == " runs"
    assert [record.getMessage() for record in caplog.records][1:] == [
        "Settings of the model's folder that do not fit this call are ignored: beams."
    ]
    assert written("--temperature", "0.001", "--max_tokens", "1") == " runs"
    assert "beams" in caplog.records[0].getMessage()
