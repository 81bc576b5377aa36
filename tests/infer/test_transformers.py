"""Token numbers equal those of transformers' `generate`, for drawn models, prompts and settings.

Both choose the largest of nearly equal numbers: where the model's two best differ by less than rounding, either may
win. Such ties are counted, and must stay rare.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.generation import WORDS, tiny
from helpers.sweeps import sweep
from penstock.config.decoding import Decoding
from penstock.infer.generator import Generator
from penstock.infer.usual import usual_in
from penstock.models.convert import save_pretrained

transformers = pytest.importorskip("transformers")
FAMILIES = ("gpt", "llama", "qwen2", "qwen", "gpt-oss", "t5-tiny", "marian-tiny", "bart-tiny")
MORE = ("olmo", "smollm", "glm", "gemma 2", "gemma", "deepseek")
END, PAD = 7, 3
_NAMES = {
    "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "beams": "num_beams",
    "best": "num_return_sequences", "no_repeat_ngram": "no_repeat_ngram_size",
    "repetition_penalty": "repetition_penalty",
    "length_penalty": "length_penalty",
}  # fmt: skip
_STOPPING = {"never": "never", "heuristic": False, "full": True}


@cache
def _folder() -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix="penstock-generate-"))


@cache
def _pair(family: str, seed: int) -> tuple[Generator, Any]:
    """Our model, and transformers' with its weights."""
    # Eager attention of theirs has no finite mask in fp64 for tokens that fill up a prompt.
    dtype = torch.float32 if family == "gemma 2" else torch.float64
    model = tiny(family, seed=seed, dtype=dtype)
    folder = _folder() / f"{family}-{seed}"
    save_pretrained(model, folder)
    kind = transformers.AutoModelForSeq2SeqLM if model.graph.remembered else transformers.AutoModelForCausalLM
    attention = "eager" if family in ("gpt-oss", "gemma 2") else "sdpa"
    forms = {"attn_implementation": attention}
    forms |= {"experts_implementation": "eager"} if family in ("gpt-oss", "deepseek") else {}
    theirs = kind.from_pretrained(folder, dtype=dtype, **forms).eval()
    theirs.generation_config = transformers.GenerationConfig()
    return Generator(model, start=PAD, ends=(END,)), theirs


def drawn(draw: random.Random, *, search: bool) -> dict[str, Any]:
    """Settings of one case."""
    most = draw.randint(1, 14)
    given: dict[str, Any] = {"max_tokens": most}
    if draw.random() < 0.3:
        given["repetition_penalty"] = draw.choice([0.7, 1.2, 2.0])
    if draw.random() < 0.3:
        given["no_repeat_ngram"] = draw.randint(1, 3)
    if draw.random() < 0.3:
        given["min_tokens"] = draw.randint(1, most)
    if search:
        beams = draw.randint(2, 5)
        given |= {"beams": beams, "best": draw.randint(1, beams)}
        given["length_penalty"] = draw.choice([0.0, 0.6, 1.0, 2.0, -1.0])
        given["early_stopping"] = draw.choice(list(_STOPPING))
    return given


def _theirs(model: Any, rows: list[list[int]], given: dict[str, Any]) -> list[list[int]]:
    named = {_NAMES[name]: value for name, value in given.items() if name in _NAMES}
    if "early_stopping" in given:
        named["early_stopping"] = _STOPPING[given["early_stopping"]]
    longest = max(map(len, rows))
    both = model.config.is_encoder_decoder
    padded = [
        ([*row, *[PAD] * (longest - len(row))] if both else [*[PAD] * (longest - len(row)), *row])
        for row in rows
    ]
    mask = [[1] * len(row) for row in rows]
    mask = [[*m, *[0] * (longest - len(m))] if both else [*[0] * (longest - len(m)), *m] for m in mask]
    more = {"decoder_start_token_id": PAD} if both else {}
    found = model.generate(
        torch.tensor(padded), attention_mask=torch.tensor(mask), do_sample=False, eos_token_id=END, pad_token_id=PAD,
        **more, **named,
    )  # fmt: skip
    new = found[:, 1 if both else longest :].tolist()
    return [row[: row.index(END)] if END in row else row for row in new]


def cases(family: str, count: int) -> tuple[int, list[Any]]:
    """Runs drawn cases of some prompts each: how many texts there were, and those that differ."""
    draw, texts, odd = random.Random(family), 0, []
    for number in range(count):
        ours, theirs = _pair(family, number % 3)
        given = drawn(draw, search=number % 2 == 1)
        # transformers counts what fills up a prompt among its tokens, so lengths differ only without penalties.
        ragged = bool(ours.model.graph.remembered) or not {"repetition_penalty", "no_repeat_ngram"} & {*given}
        length = draw.randint(1, 9)
        rows = [
            [draw.choice([n for n in range(WORDS) if n not in (END, PAD)])
             for _ in range(draw.randint(1, 9) if ragged else length)]
            for _ in range(4)
        ]  # fmt: skip
        expected = _theirs(theirs, rows, given)
        found = [list(each.ids) for each in ours.generate(rows, Decoding(**given))]
        texts += len(found)
        odd += [
            (given, one, other)
            for one, other in zip(found, _cut(expected, found), strict=True)
            if one != other
        ]
    return texts, odd


def _cut(expected: list[list[int]], found: list[list[int]]) -> list[list[int]]:
    """What transformers fills up texts with that have not ended comes off: its filling is a token like others."""
    return [
        row[: len(one)] if set(row[len(one) :]) == {PAD} else row
        for row, one in zip(expected, found, strict=True)
    ]


@pytest.mark.parametrize(
    "family", sweep([*FAMILIES, *MORE], FAMILIES[:4] + FAMILIES[5:] + MORE[:-1], slow=["gpt-oss", "deepseek"])
)
def test_tokens_equal_those_of_transformers(family: str) -> None:
    texts, odd = cases(family, 8)
    assert texts >= 32
    assert not odd, odd[0]


ASKED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 1, "min_length": 9},
    {"sequence_bias": [[[5], 3.0], [[9, 4], 20.0], [[4, 9], 20.0], [[9, 4, 8], -6.0]]},
    {"suppress_tokens": [*range(10, 40)], "begin_suppress_tokens": [*range(40, 55)]},
    {"forced_bos_token_id": 11, "begin_suppress_tokens": [11, *range(30, 50)], "forced_eos_token_id": END},
    {"forced_eos_token_id": [END], "min_new_tokens": 5, "max_length": 9, "max_new_tokens": None},
    {"length_penalty": -1.0, "early_stopping": True, "num_return_sequences": 2, "num_beams": 3},
    {"early_stopping": "never", "length_penalty": 0.4, "no_repeat_ngram_size": 3, "num_beams": 4},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("family", ["gpt", "llama", "t5-tiny", "marian-tiny"])
def test_what_generation_config_asks_for_is_obeyed(family: str, tmp_path: Path) -> None:
    ours, theirs = _pair(family, 3)
    plain = ours.generate([1, 2, 3, 1, 2], max_tokens=8)[0].ids
    asked = [*ASKED, {"bad_words_ids": [[plain[0]], [END]]}, {"bad_words_ids": [plain[2:4], plain[1:4]]}]
    for number, one in enumerate(
        asked, FAMILIES.index(family)
    ):  # greedy in two families, and searched in two
        settings = {"max_new_tokens": 8, "eos_token_id": END, "num_beams": 1 + 2 * (number % 2)} | one
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
        theirs.generation_config = transformers.GenerationConfig.from_pretrained(tmp_path)
        usual = usual_in(tmp_path, WORDS)
        ours.usual = usual.fields
        for rows in ([[1, 2, 3, 1, 2], [4, 5, 6, 4, 9]], [[9]] if "forced_eos_token_id" in one else []):
            found = [list(each.ids) for each in ours.generate(rows)] if rows else []
            expected = _theirs(theirs, rows, {}) if rows else []
            assert (found, usual.unmet) == (_cut(expected, found), ()), settings


@pytest.mark.slow
@pytest.mark.parametrize("family", sweep(FAMILIES, ["llama"]))
def test_tokens_equal_those_of_transformers_in_five_hundred_cases(family: str) -> None:
    texts, odd = cases(family, 125)
    assert texts >= 500
    assert len(odd) <= texts // 250, odd[0]


def test_longrope_takes_the_factors_of_the_longest_text_that_is_asked_for() -> None:
    """Within the window of training, beyond it, and across: as transformers computes a text that is filled up."""
    ours, theirs = _pair("phi", 0)
    trained = ours.model.config.rotary.trained
    for length, tokens, filled in ((2, trained - 2, 0), (trained + 1, 5, 0), (3, trained, trained)):
        ids = list(range(20, 20 + length))
        found = ours.generate(ids, max_tokens=tokens)[0].ids
        for _ in found:
            with torch.no_grad():
                logits = theirs(torch.tensor([[*ids, *[PAD] * filled]])).logits
            ids.append(int(logits[0, len(ids) - 1].argmax()))
        assert tuple(ids[length:]) == found, length
