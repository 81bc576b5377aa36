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

from helpers.families import small
from helpers.generation import Letters, routed, tiny
from helpers.spawn import pool
from helpers.sweeps import sweep
from penstock.cli import main
from penstock.compress.data import QuantiseData
from penstock.compress.quantise import quantise_folder
from penstock.config.decoding import Decoding
from penstock.config.model import DecoderConfig, Seq2SeqConfig
from penstock.config.plan import Plan
from penstock.config.quantise import QuantiseOptions
from penstock.config.stack import Stack
from penstock.data.text.tokenizers import Bytes
from penstock.decode.engine import Engine, Request
from penstock.decode.speculate import DraftedText
from penstock.errors import ConfigError
from penstock.infer.encode import Embedder
from penstock.infer.generator import Generator
from penstock.infer.load import loaded
from penstock.models import create
from penstock.models.convert import save_pretrained
from penstock.models.experts import mixtures_of
from penstock.parallel import ALONE, dims_of
from penstock.parallel.hosts import attend, rounds_of
from penstock.products.integers import Int4, Int8Weights
from penstock.products.rounded import RoundedInt8
from penstock.products.stored import Stored
from penstock.serve.led import Led, LedVectors

ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
ENDS = (7, 8)
"""Among few words, so that texts end at different steps."""
WORDS = 30
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 10},
    "drawn": {"max_tokens": 8, "temperature": 1.0, "top_p": 0.9, "seed": 3, "best": 2},
    "beams": {"max_tokens": 9, "beams": 4, "best": 2},
    "guessed": {"max_tokens": 8, "speculate": 3, "repetition_penalty": 1.2},
}
FEW = ("greedy", "drawn", "beams")

Texts = dict[tuple[str, str], list[tuple[int, ...]]]


def _texts(line: str, names: list[str], ways: list[str]) -> Texts:
    """The texts of every model, or folder, in every way."""
    found = {}
    for name in names:
        model = name if "/" in name else tiny(name, words=WORDS)
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
    _same("tp=2", ["gpt", "alibi", "t5-tiny", "mixtral", "sigmoid", "deepseek", "gpt-oss"], list(FEW))


@pytest.mark.parametrize(
    "name",
    sweep(["deepseek", "gpt-oss", "gemma 2", "gemma", "phi", "olmo", "smollm", "glm"], (), slow=["gemma"]),
)
def test_what_transformers_wrote_is_split_in_every_way(name: str, tmp_path: Path) -> None:
    """Texts are longer than windows, and than the samples from which positions are scaled."""
    transformers = pytest.importorskip("transformers")
    model = tiny(name, words=WORDS, dtype=torch.float32)
    save_pretrained(model, tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    for line in ("tp=2", "pp=2", "dp=2 ep=2", "tp=2 ep=2")[: 4 if mixtures_of(model) else 2]:
        _same(line, [str(tmp_path / "theirs")], list(FEW))


def test_replicas_share_out_the_texts() -> None:
    _same("dp=2", ["gpt", "t5-tiny"], list(FEW))


def test_stages_make_the_same_texts_in_every_way() -> None:
    _same("pp=2", ["llama", "marian-tiny"], list(WAYS))
    _same("pp=2", ["window", "t5-tiny", "mixtral", "sigmoid", "deepseek"], list(FEW))


def test_all_go_together() -> None:
    _same("tp=2 dp=2", ["llama", "marian-tiny"], list(FEW))
    _same("dp=4", ["gpt"], ["greedy"])  # one rank has no text
    _same("pp=2 dp=2", ["marian-tiny"], list(FEW))
    _same("pp=2 tp=2", ["llama", "t5-tiny"], list(FEW))


def test_hosted_experts_make_the_same_texts_in_every_way() -> None:
    _same("dp=2 ep=2", ["mixtral", "nllb-moe-tiny"], list(WAYS))
    _same("dp=2 ep=2", ["sigmoid"], list(FEW))
    _same("tp=2 ep=2", ["mixtral", "nllb-moe-tiny"], [*FEW, "guessed"])
    _same("dp=2 tp=2 ep=4", ["mixtral"], list(FEW))
    _same("dp=4 ep=2", ["mixtral"], list(FEW))  # one rank of a group has no text


def _logits(line: str) -> list[torch.Tensor]:
    """Logits of texts of several lengths on each rank, and of none on the last, by experts on all of them."""
    plan = Plan.parse(line)
    dims = dims_of(plan, "cpu") if plan.gpus > 1 else ALONE
    found = loaded(tiny("mixtral", words=WORDS), plan, weights="plain", tokenizer=None, dims=dims)
    rows = ROWS if dims.alone else ROWS[dims.data_rank : dims.data_rank + 1]
    with torch.inference_mode():
        made = [found.model(torch.tensor([row])) for row in rows]
        # As parts of one batch, of which padding is behind each text.
        longest = max(map(len, rows), default=0)
        padded = [[*row, *[0] * (longest - len(row))] for row in rows]
        made += [found.model(torch.tensor(padded))[i, : len(row)] for i, row in enumerate(rows)]
        for row in rows:  # with a cache: the first token, then the others
            reading = DraftedText(found.model, 16, ())
            made.append(torch.cat([reading.read(part) for part in (row[:1], row[1:]) if part]))
        attend(found.model)
    return made


@pytest.mark.parametrize("line", ["dp=2 ep=2", "dp=4 ep=4"])
def test_logits_do_not_depend_on_who_hosts_experts(line: str) -> None:
    expected = _logits("baseline")
    for rank, made in enumerate(pool(Plan.parse(line).gpus).run(_logits, line)):
        assert len(made) == 3 * (rank < len(ROWS))
        for way, one in enumerate(made):
            torch.testing.assert_close(one, expected[way * len(ROWS) + rank], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(one, made[0].view_as(one), rtol=1e-10, atol=1e-10)


def _rounded(folder: str) -> str:
    quantise_folder(folder, f"{folder}/small-{torch.distributed.get_rank()}", QuantiseOptions(format="int8"))
    with pytest.raises(ConfigError) as refused:
        Generator(f"{folder}/small-{torch.distributed.get_rank()}", Plan(dp=2, ep=2))
    made = Generator(f"{folder}/small-{torch.distributed.get_rank()}", Plan(dp=2, ep=2), weights="plain")
    assert len(made.generate(ROWS, max_tokens=2)) == len(ROWS)
    return str(refused.value)


def test_experts_in_few_bits_are_not_split(tmp_path: Path) -> None:
    save_pretrained(tiny("mixtral", dtype=torch.float32), tmp_path)
    assert all("leave tp and ep out" in said for said in pool(2).run(_rounded, str(tmp_path)))


def _in_few_bits(line: str, folders: list[str]) -> list[tuple[list[tuple[int, ...]], int]]:
    """Texts of each folder in two ways, and how many linears multiply in few bits on this rank."""
    found = []
    for folder in folders:
        with Generator(folder, Plan.parse(line), start=0, ends=ENDS) as made:
            texts = [one.ids for way in ("greedy", "beams") for one in made.generate(ROWS, **WAYS[way])]
            forms = (RoundedInt8, Int8Weights, Int4)
            found.append((texts, sum(isinstance(one, forms) for one in made.model.modules())))
    return found


@pytest.mark.sweep
def test_layers_in_few_bits_are_split_and_make_the_same_texts(tmp_path: Path) -> None:
    """Scales of rows of inputs that ranks each have a part of are those of whole rows."""
    sizes: dict[str, Any] = {"width": 64, "heads": 4, "mlp_width": 128, "depth": 2}
    stack = Stack(**sizes)
    models = {
        "decoder": DecoderConfig(vocabulary=WORDS, sequence=24, mlp="swiglu", kv_heads=2, **sizes),
        "both": Seq2SeqConfig(
            vocabulary=WORDS, sequence=24, decoder_sequence=24, encoder=stack, decoder=stack
        ),
    }
    folders = []
    for name, config in models.items():
        torch.manual_seed(1)
        model = create(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0)
        save_pretrained(model, tmp_path / name)
        draw = torch.randint(0, WORDS, (4, 12), generator=torch.Generator().manual_seed(0))
        given = (draw,) if name == "decoder" else (draw, draw, torch.full((4,), 12))
        for options in (
            QuantiseOptions(format="int8"), QuantiseOptions(format="int8", inputs="static"),
            QuantiseOptions(format="int4"), QuantiseOptions(format="int8_weights"),
        )[: 4 if name == "decoder" else 2]:  # fmt: skip
            folders.append(str(tmp_path / f"{name} {len(folders)}"))
            quantise_folder(tmp_path / name, folders[-1], options, QuantiseData(lambda given=given: [given]))  # type: ignore[misc]
    alone = _in_few_bits("baseline", folders)
    for line in ("tp=2", "pp=2"):
        for rank in pool(2).run(_in_few_bits, line, folders):
            for (texts, count), (expected, whole) in zip(rank, alone, strict=True):
                assert texts == expected, line
                assert count == (whole if "tp" in line else whole // 2) > 0


def _by_label(line: str, label: list[str]) -> list[tuple[int, ...]]:
    made = Generator(routed("gpt"), Plan.parse(line), ends=())
    return [one.ids for one in made.generate(ROWS, label=label, max_tokens=7)]


@pytest.mark.parametrize("line", ["dp=2 ep=2", "tp=2 ep=2"])
def test_labels_choose_experts_on_all_ranks(line: str) -> None:
    for label in (["0", "1", "2"], ["1", "1", "0"]):
        expected = _by_label("baseline", label)
        assert pool(2).run(_by_label, line, label) == [expected] * 2


def _counted() -> tuple[int, list[int], list[int]]:
    """Parameters of experts on this rank, and all ranks' visits; the same after more ranks have had texts."""
    made = Generator(tiny("mixtral"), Plan(dp=2, ep=2), ends=())
    made.generate(ROWS[:1], max_tokens=4)
    rounds = rounds_of(made.model)
    assert rounds is not None
    once = [int(hosts.visits.sum()) for hosts in rounds.hosts]
    made.generate(ROWS[:2], max_tokens=4)
    held = sum(expert.flat.numel() for hosts in rounds.hosts for expert in hosts.experts.values())
    return held, once, [int(hosts.visits.sum()) for hosts in rounds.hosts]


def test_each_rank_holds_its_experts_and_visits_are_counted() -> None:
    model = tiny("mixtral")
    whole = sum(p.numel() for name, p in model.named_parameters() if name.split(".")[-2] in ("up", "down"))
    shared = sum(p.numel() for name, p in model.named_parameters() if ".shared." in name)
    # Two experts for each token of a prompt, and for each new one but the last.
    once, twice = [2 * (3 + 3)] * 2, [2 * (3 + 3 + 3 + 3 + 5 + 3)] * 2
    assert pool(2).run(_counted) == [((whole - shared) // 2, once, twice)] * 2


def _embedded(line: str, count: int) -> torch.Tensor:
    config: Any = small("bert-tiny", experts=4, experts_per_token=2, balance=0.0)
    torch.manual_seed(0)
    model = create(config, dtype=torch.float64)
    rows = [[(3 * n + k) % 13 for k in range(2 + n)] for n in range(count)]
    with Embedder(model, Plan.parse(line), batch=2) as made:  # type: ignore[arg-type]
        if made.dims.alone or count == 1:
            return made.embed(rows)
        led = LedVectors(made)
        if not made.dims.main:
            led.follow()
            return made.embed(rows)
        vectors = [torch.tensor(led(rows)) for _ in range(2)]
        led.dismiss()
        assert torch.equal(*vectors)
        torch.testing.assert_close(made.embed(rows), vectors[0])
        return vectors[0]


@pytest.mark.parametrize(("line", "count"), [("dp=2", 5), ("dp=2 ep=2", 5), ("dp=2 ep=2", 1)])
def test_texts_are_embedded_by_experts_on_all_ranks(line: str, count: int) -> None:
    expected = _embedded("baseline", count)
    for found in pool(2).run(_embedded, line, count):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def _refused(line: str, name: str) -> str:
    with pytest.raises(ConfigError) as refused:
        Generator(tiny(name), Plan.parse(line))
    return str(refused.value)


@pytest.mark.parametrize(
    ("line", "name", "said"),
    [
        ("pp=4", "gpt", "a stack of the model has 2; use at most that"),
        ("dp=4 ep=4", "gpt", "the model has none; use plan.ep=1"),
        ("dp=4 ep=4", "pair", "the model has 2; use at most that"),
    ],
)
def test_ranks_without_a_part_are_refused(line: str, name: str, said: str) -> None:
    assert said in pool(4).run(_refused, line, name)[0]


def _unseeded() -> list[tuple[int, ...]]:
    made = Generator(tiny("gpt"), Plan(tp=2), ends=())
    return [each.ids for each in made.generate(ROWS, max_tokens=8, temperature=1.0)]


def test_ranks_draw_the_same_without_a_seed() -> None:
    one, other = pool(2).run(_unseeded)
    assert one == other
    assert pool(2).run(_unseeded)[0] != one


def _drawn_text(line: str, stop: str) -> list[str]:
    made = Generator(tiny("mixtral"), Plan.parse(line), tokenizer=Letters(), ends=())
    given: dict[str, Any] = {"max_tokens": 24, "temperature": 3.0, "seed": 1, "stop": (stop,)}
    texts = [each.text for each in made.generate(["AB", "C", "DE"], **given)]
    return [*texts, "".join(made.stream("AB", **given))]


@pytest.mark.parametrize("line", ["tp=2", "dp=2", "dp=2 ep=2"])
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
    with pytest.raises(ConfigError, match="in another way than the plan"):
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
        for slot, tokens, finished, _ in engine.step():
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


@pytest.mark.parametrize(
    "name",
    sweep(
        ["llama", "pruned", "marian-tiny", "deepseek", "gpt-oss", "gemma"], ["llama", "pruned", "marian-tiny"]
    ),
)
def test_ranks_follow_the_one_that_serves(name: str) -> None:
    expected = _served(_engine(tiny(name, words=WORDS)), 5)
    assert pool(2).run(_led, name, 5) == [expected, []]


def test_of_several_ranks_that_embed_one_prints(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    config: Any = small("bert-tiny", vocabulary=Bytes.size, experts=4, experts_per_token=2)
    torch.manual_seed(0)
    save_pretrained(create(config), tmp_path)
    Bytes().save(tmp_path)
    words = ["embed", str(tmp_path), "--plan", "dp=2 ep=2"]
    (code, said), other = pool(2).run(_said, words, "ab\nc\ndef\n")
    assert other == (code, "") == (0, "")
    found = torch.tensor([json.loads(line) for line in said.splitlines()])
    torch.testing.assert_close(found, Embedder(tmp_path).embed(["ab", "c", "def"]), rtol=1e-5, atol=1e-6)


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
        ("dp=2 pp=2 ep=2", "could wait for ever"),
        ("dp=2 ep=2 compile=whole", "the ranks of plan.ep=2"),
    ],
)
def test_what_ranks_cannot_do_is_told(line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Generator(tiny("gpt"), Plan.parse(line))


def test_layers_are_split_for_generation_alone() -> None:
    with pytest.raises(ConfigError, match="only to generate text"):
        Embedder(tiny("gpt"), Plan(tp=2))  # type: ignore[arg-type]


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
