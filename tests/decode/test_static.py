"""Compiled steps against eager ones: the same texts in every family, few graphs, each past its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.generation import BOTH, DECODERS, Letters, tiny
from helpers.sweeps import sweep
from penstock.config.decoding import bucket
from penstock.config.plan import Plan
from penstock.decode.engine import Engine
from penstock.decode.static import Compiled
from penstock.errors import ConfigError
from penstock.infer.generator import Generated, Generator
from penstock.models.convert import save_pretrained

ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11]]
WAYS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 20},
    {"max_tokens": 28, "beams": 3},
    {"max_tokens": 9, "beams": 4, "repetition_penalty": 1.2},
    {"max_tokens": 9, "temperature": 1.0, "seed": 3, "best": 2},
)
"""The second needs two buckets, and leaves columns and texts out on its way."""


def made(
    generator: Generator, rows: list[list[int]] = ROWS, ways: Sequence[dict[str, Any]] = WAYS
) -> list[list[Generated]]:
    return [generator.generate(rows, **way) for way in ways]


def same(found: list[list[Generated]], expected: list[list[Generated]]) -> None:
    for one, other in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert one.ids == other.ids
        assert (one.score or 0.0) == pytest.approx(other.score or 0.0, rel=1e-5)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs that were made since; they run operation after operation."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    monkeypatch.setattr("penstock.decode.static.BACKEND", backend)
    return graphs


@pytest.mark.parametrize("name", sweep([*DECODERS, *BOTH], ["gpt"]))
def test_compiled_steps_make_the_same_texts(name: str, traced: list[Any]) -> None:
    model = tiny(name)
    eager = Generator(model, start=0, ends=(7,))
    compiled = Generator(model, Plan(compile="whole"), start=0, ends=(7,))
    same(made(compiled), made(eager))
    count = len(traced)
    assert 0 < count <= 4, "tokens and beams, of several texts and of one that is left"
    same(made(compiled, ROWS[::-1] * 2), made(eager, ROWS[::-1] * 2))
    assert len(traced) <= count + 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor imports torch.jit
@pytest.mark.parametrize("weights", sweep(["packed", "int8", "int4"], ()))
def test_inductor_makes_the_same_texts(weights: Any, tmp_path: Path) -> None:
    """In fp32, whose ties these few texts do not have; with weights that compiled code cannot look into. One block and
    texts that all last to the end keep it at two graphs."""
    save_pretrained(tiny("marian-tiny", depth=1, dtype=torch.float32), tmp_path)
    given: dict[str, Any] = {"weights": weights, "start": 0, "ends": ()}
    compiled = Generator(tmp_path, Plan(compile="blocks"), **given)
    same(made(compiled, ways=WAYS[:2]), made(Generator(tmp_path, **given), ways=WAYS[:2]))


class Recorder:
    """Stands for CUDA graphs: what it plays back reads and writes the tensors that it was recorded with."""

    def __init__(self) -> None:
        self.recorded = self.played = 0

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        self.recorded += 1
        logits = run().clone()

        def play() -> None:
            self.played += 1
            logits.copy_(run())

        return play, logits


def recorded(name: str, **given: Any) -> tuple[Generator, Recorder]:
    generator, recorder = Generator(tiny(name), start=0, **given), Recorder()
    generator._compiled = Compiled(generator.model, backend="eager", record=recorder)
    return generator, recorder


@pytest.mark.parametrize("name", sweep(["gpt", "qwen", "pruned", "marian-tiny", "t5-tiny"], ["gpt"]))
def test_recorded_steps_make_the_same_texts(name: str) -> None:
    generator, recorder = recorded(name, ends=(7,))
    expected = made(Generator(generator.model, start=0, ends=(7,)))
    same(made(generator), expected)
    first, before = recorder.recorded, recorder.played
    assert 0 < first < before / 3
    same(made(generator), expected)
    assert recorder.recorded == first, "each bucket is recorded once"


def test_texts_that_take_turns_do_not_write_over_each_other() -> None:
    generator, recorder = recorded("gpt", ends=(), tokenizer=Letters())
    expected = [generator.generate(text, max_tokens=20)[0].text for text in ("AB", "CD")]
    turns = zip(*(generator.stream(text, max_tokens=20) for text in ("AB", "CD")), strict=True)
    assert ["".join(pieces) for pieces in zip(*turns, strict=True)] == expected
    assert recorder.played > 30


def test_buckets_are_few_and_hold_what_they_must() -> None:
    sizes = [bucket(count) for count in range(1, 5000)]
    assert all(count <= size for count, size in enumerate(sizes, 1))
    assert all(size <= 1.25 * count for count, size in enumerate(sizes, 1) if count > 256)
    assert len(set(sizes)) < 25
    assert [bucket(size) for size in sizes] == sizes


def test_what_cannot_be_compiled_is_refused() -> None:
    model = tiny("gpt")
    with pytest.raises(ConfigError, match="cache=slots"):
        Engine(model, cache="paged", compiled=Compiled(model))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt", "qwen", "marian-tiny"])
def test_cuda_graphs_make_the_same_texts(name: str) -> None:
    model = tiny(name).cuda()
    eager = Generator(model, start=0, ends=(7,), device="cuda")
    compiled = Generator(model, Plan(compile="whole"), start=0, ends=(7,), device="cuda")
    for _ in range(2):
        same(made(compiled), made(eager))
