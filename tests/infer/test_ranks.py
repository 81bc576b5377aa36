"""Ranks that generate together: their texts are those of one process."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.generation import Letters, tiny
from helpers.rank_pool import pool
from penstock.cli import main
from penstock.config.decoding import Decoding
from penstock.config.plan import Plan
from penstock.data.text.tokenizers import Bytes
from penstock.decode.engine import Engine, Request
from penstock.errors import ConfigError
from penstock.infer.encode import Embedder
from penstock.infer.generator import Generator
from penstock.infer.load import loaded
from penstock.models.convert import save_pretrained
from penstock.parallel import dims_of
from penstock.products.stored import Stored
from penstock.serve.led import Led

ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
ENDS = (7, 8)
"""Among few words, so that texts end at different steps."""
WORDS = 30
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 10},
    "drawn": {"max_tokens": 8, "temperature": 1.0, "top_p": 0.9, "seed": 3, "best": 2},
    "beams": {"max_tokens": 9, "beams": 4, "best": 2},
    "groups": {"max_tokens": 7, "beams": 4, "beam_groups": 2, "diversity_penalty": 1.0},
    "covering": {"max_tokens": 6, "beams": 3, "coverage_penalty": 3.0},
    "contrastive": {"max_tokens": 6, "contrastive": 0.6, "top_k": 4},
    "guessed": {"max_tokens": 8, "speculate": 3, "repetition_penalty": 1.2},
}
FEW = ("greedy", "drawn", "beams")

Texts = dict[tuple[str, str], list[tuple[int, ...]]]


def _texts(line: str, names: list[str], ways: list[str]) -> Texts:
    """The texts of every model in every way."""
    found = {}
    for name in names:
        model = tiny(name, words=WORDS)
        with Generator(model, Plan.parse(line), start=0, ends=ENDS, draft=model) as made:  # type: ignore[arg-type]
            for way in ways:
                found[name, way] = [each.ids for each in made.generate(ROWS, **WAYS[way])]
    return found


def _same(line: str, names: list[str], ways: list[str]) -> None:
    expected = _texts("baseline", names, ways)
    assert any(len({len(text) for text in texts}) > 1 for texts in expected.values()), "texts end early"
    for rank, found in enumerate(pool(Plan.parse(line).gpus).run(_texts, line, names, ways)):
        for case, texts in expected.items():
            assert found[case] == texts, f"rank {rank} of {line}: {case}"


def test_split_layers_make_the_same_texts_in_every_way() -> None:
    _same("tp=2", ["llama", "marian-tiny"], list(WAYS))
    _same("tp=2", ["gpt", "alibi", "t5-tiny", "mixtral", "sigmoid"], list(FEW))


def test_replicas_share_out_the_texts() -> None:
    _same("dp=2", ["gpt", "t5-tiny"], list(FEW))


def test_stages_make_the_same_texts_in_every_way() -> None:
    _same("pp=2", ["llama", "marian-tiny"], list(WAYS))
    _same("pp=2", ["window", "t5-tiny", "mixtral", "sigmoid"], list(FEW))


def test_all_go_together() -> None:
    _same("tp=2 dp=2", ["llama", "marian-tiny"], list(FEW))
    _same("dp=4", ["gpt"], ["greedy"])  # one rank has no text
    _same("pp=2 dp=2", ["marian-tiny"], list(FEW))
    _same("pp=2 tp=2", ["llama", "t5-tiny"], [*FEW, "groups"])


def _too_many_stages() -> str:
    with pytest.raises(ConfigError) as refused:
        Generator(tiny("gpt"), Plan(pp=4))
    return str(refused.value)


def test_a_stage_has_a_block() -> None:
    assert "a stack of the model has 2; use at most that" in pool(4).run(_too_many_stages)[0]


def _unseeded() -> list[tuple[int, ...]]:
    made = Generator(tiny("gpt"), Plan(tp=2), ends=())
    return [each.ids for each in made.generate(ROWS, max_tokens=8, temperature=1.0)]


def test_ranks_draw_the_same_without_a_seed() -> None:
    one, other = pool(2).run(_unseeded)
    assert one == other
    assert pool(2).run(_unseeded)[0] != one


def _drawn_text(line: str, stop: str) -> list[str]:
    made = Generator(tiny("gpt"), Plan.parse(line), tokenizer=Letters(), ends=())
    given: dict[str, Any] = {"max_tokens": 24, "temperature": 3.0, "seed": 1, "stop": (stop,)}
    texts = [each.text for each in made.generate(["AB", "C", "DE"], **given)]
    return [*texts, "".join(made.stream("AB", **given))]


@pytest.mark.parametrize("line", ["tp=2", "dp=2"])
def test_texts_before_a_stop_text_and_in_pieces_are_the_same(line: str) -> None:
    whole = _drawn_text("baseline", " ")[0]
    expected = _drawn_text("baseline", whole[5:7])
    assert expected[0] == expected[-1] == whole[: whole.index(whole[5:7])]
    assert pool(2).run(_drawn_text, line, whole[5:7]) == [expected, expected]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers")
    found = tmp_path_factory.mktemp("model")
    save_pretrained(tiny("llama", words=Bytes.size, dtype=torch.float32), found)
    Bytes().save(found)
    return found


def _opened(folder: Path) -> tuple[int, int, list[tuple[int, ...]]]:
    """Numbers that the linears hold, those that are packed, and texts."""
    made = Generator(folder, Plan(tp=2), ends=())
    packed = [module for module in made.model.modules() if isinstance(module, Stored)]
    held = sum(module.in_features * module.out_features for module in packed)
    for weights in ("int8", "int4"):
        with pytest.raises(ConfigError, match="weights=auto"):
            Generator(folder, Plan(tp=2), weights=weights)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="2 processes were started, but the plan is for 4"):
        Generator(folder, Plan(tp=2, dp=2))
    with pytest.raises(ConfigError, match="otherwise than the plan"):
        Generator(made.model, Plan(dp=2))
    return held, len(packed), [each.ids for each in made.generate(ROWS, max_tokens=10)]


def test_a_rank_packs_its_part_of_what_a_folder_holds(folder: Path) -> None:
    alone = Generator(folder, ends=())
    packed = [module for module in alone.model.modules() if isinstance(module, Stored)]
    held = sum(module.in_features * module.out_features for module in packed)
    expected = [each.ids for each in alone.generate(ROWS, max_tokens=10)]
    found = pool(2).run(_opened, folder)
    assert [texts for _, _, texts in found] == [expected, expected]
    assert [count for _, count, _ in found] == [len(packed)] * 2
    parts = [part for part, _, _ in found]
    assert sum(parts) == held
    assert max(parts) < 0.6 * held


def _engine(model: Any) -> Engine:
    return Engine(model, slots=2, context=40, cache="paged", start=0, ends=ENDS, chunk=3)


def _served(engine: Any, texts: int) -> list[list[int]]:
    """The tokens of some texts, which come as slots get free; one is drawn, and one is given up on its way."""
    found: list[list[int]] = [[] for _ in range(texts)]
    slots: dict[int, int] = {}
    waiting = list(range(texts))
    while waiting or slots:
        while waiting:
            drawn = Decoding(max_tokens=9, temperature=float(waiting[0] == 1), seed=2)
            slot = engine.admit(Request(ids=tuple(range(1, 5 + waiting[0])), decoding=drawn))
            if slot is None:
                break
            slots[slot] = waiting.pop(0)
        for slot, tokens, finished in engine.step():
            text = found[slots[slot]]
            text += tokens
            if finished or (slots[slot] == 2 and len(text) == 4):
                engine.release(slot)
                del slots[slot]
    return found


def _led(name: str, texts: int) -> list[list[int]]:
    dims = dims_of(Plan(tp=2), "cpu")
    found = loaded(tiny(name, words=WORDS), Plan(tp=2), weights="auto", tokenizer=None, dims=dims)
    engine = Led(_engine(found.model), dims)
    if dims.rank:
        engine.follow()
        return []
    made = _served(engine, texts)
    engine.dismiss()
    return made


@pytest.mark.parametrize("name", ["llama", "pruned", "marian-tiny"])
def test_ranks_follow_the_one_that_serves(name: str) -> None:
    expected = _served(_engine(tiny(name, words=WORDS)), 5)
    assert pool(2).run(_led, name, 5) == [expected, []]


def _said(words: list[str], typed: str) -> tuple[int, str]:
    """What a command that was piped something ends with, and what it prints."""
    before, sys.stdin = sys.stdin, io.StringIO(typed)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            return main(words), said.getvalue()
    finally:
        sys.stdin = before


def test_of_several_ranks_one_reads_and_one_prints(folder: Path) -> None:
    words = ["generate", str(folder), "--max_tokens", "9"]
    expected = [each.ids for each in Generator(folder).generate(["ab", "c", "de"], max_tokens=9)]
    for line in ("tp=2", "dp=2"):
        given = [*words, "--plan", line, "--batch", "1", "--json"]
        (code, said), other = pool(2).run(_said, given, "ab\nc\nde\n")
        assert other == (code, "") == (0, "")
        assert [tuple(json.loads(text)["ids"]) for text in said.splitlines()] == expected
    one = pool(2).run(_said, [*words, "ab", "--plan", "tp=2"], "")
    assert one == [(0, Generator(folder).generate("ab", max_tokens=9)[0].text + "\n"), (0, "")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tp=2", r"start them with `penstock launch --procs 2 -- generate MODEL --plan \"tp=2\""),
        ("dp=2 tp=2", "takes 4 processes"),
        ("cp=2", "plan.cp=2 splits the tokens of a text"),
        ("tp=2 sp=true", "use plan.sp=false"),
        ("dp=2 sharding=fsdp", "use plan.sharding=ddp"),
        ("dp=2 ep=2", "use plan.ep=1"),
    ],
)
def test_what_ranks_cannot_do_is_told(line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Generator(tiny("gpt"), Plan.parse(line))


def test_vectors_are_made_on_one_device() -> None:
    with pytest.raises(ConfigError, match="Only text is generated on several devices"):
        Embedder(tiny("gpt"), Plan(dp=2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan", "tp=two"], "plan.tp"),
        (["--plan", "precision=O3 tp=2", "--dtype", "bf16"], "keep one"),
        (["--plan", "tp=2"], "penstock launch --procs 2"),
    ],
)
def test_a_wrong_plan_is_told(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(folder), "text", *words]) == 2
    assert said in capsys.readouterr().err
