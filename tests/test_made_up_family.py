"""A family that no line of the program knows: two inputs, three runs, two heads, unequal layers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from helpers.equality import Trained, beside_each, hold_both_ends
from helpers.generation import served
from helpers.spawn import spawn
from penstock import checkpoint
from penstock.build import build
from penstock.checkpoint import rewrite
from penstock.config import kinds, model
from penstock.config.decoding import Decoding
from penstock.config.graph import ClassHead, Graph, Run, TokenInput, WordHead
from penstock.config.layer import LayerSizes
from penstock.config.load import from_dict, to_dict
from penstock.config.machine import load_machine
from penstock.config.model import ModelFamily
from penstock.config.plan import Plan
from penstock.config.run import DataConfig, Recipe, RunConfig
from penstock.config.stack import Stack
from penstock.config.tasks import TASKS
from penstock.decode.engine import Engine, Request
from penstock.decode.static import Compiled
from penstock.errors import ConfigError
from penstock.infer.generator import Generator
from penstock.kernels.cross_entropy import IGNORED
from penstock.ladder import ladder
from penstock.models import create
from penstock.models.convert import from_pretrained
from penstock.planner import predict
from penstock.planner.describe import describe, totals
from penstock.tasks import _ENROLLED, Translation
from penstock.tasks import enrol as enrol_task

# -- the family, in fewer than 60 lines

WORDS, KINDS = 13, 3


@dataclass(frozen=True, kw_only=True)
class Gist(ModelFamily, where="model"):
    """A reader of a source, which says its kind too; a narrator over the target; and a writer over what the narrator
    makes, which also sees the reader's memory."""

    family: Literal["gist"] = "gist"
    vocabulary: int = WORDS
    sequence: int = 16
    max_positions: int | None = None
    width: int = 16

    def with_lengths(self, *lengths: int) -> Gist:
        return replace(self, sequence=lengths[0])

    @cached_property
    def graph(self) -> Graph:
        sizes: dict[str, Any] = {"width": self.width, "heads": 4, "mlp_width": 32, "head_features": 4}
        layers = (LayerSizes(heads=4, kv=2, hidden=32), LayerSizes(heads=2, kv=2, hidden=16))
        unequal = Stack(**sizes, depth=2, unequal=layers, positions="rotary", norm="rms")
        plain, wide = Stack(**sizes, depth=2), Stack(**sizes, depth=1, mlp="swiglu", kv_heads=2)
        rows = self.max_positions or self.sequence
        run: dict[str, Any] = {"rows": rows, "max_tokens": rows}
        table: dict[str, Any] = {"vocabulary": self.vocabulary, "length": self.sequence}
        return Graph(
            inputs=(TokenInput(name="source", **table), TokenInput(name="target", **table)),
            runs=(
                Run(name="reader", stack=unequal, reads="source", **run),
                Run(name="narrator", stack=plain, reads="target", causal=True, last_norm=False, **run),
                Run(name="writer", stack=wide, reads="narrator", memories=("reader",), causal=True, **run),
            ),
            heads=(
                ClassHead(name="kind", run="reader", classes=KINDS, pool="mean"),
                WordHead(run="writer", vocabulary=self.vocabulary, tied="tokens"),
            ),
        )  # fmt: skip


class Narration(Translation):
    """The words of a target, and the kind of the source: its first token's rest by three."""

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        kinds_ = nn.functional.cross_entropy(
            outputs["kind"].float(), batch.inputs[0][:, 0] % KINDS, reduction="sum"
        )
        return (outputs["head"] + kinds_) / self.targets(batch)

    def tally(self, outputs: Any, batch: Any) -> Tensor:
        return super().tally(outputs["head"], batch)


# -- end of the family

CONFIG = Gist()


@pytest.fixture(autouse=True)
def _enrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_MORE", {})
    for table, name in ((model.FAMILIES, "gist"), (TASKS, "narration"), (_ENROLLED, "narration")):
        monkeypatch.setitem(table, name, None)  # so that it is taken out again
    _enrol()


def _enrol() -> None:
    model.enrol(Gist)
    enrol_task("narration", CONFIG.graph.form, Narration)


class Batch(tuple[Tensor, ...]):
    """What `Narration` takes a batch for, as tensors in a row."""

    inputs = property(lambda self: (*self[:3], self[3], None, 0.0))
    count = property(lambda self: int((self[3] != IGNORED).sum()))


def batches(step: int, samples: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(step)

    def numbers(count: int, *shape: int) -> Tensor:
        return torch.randint(0, count, shape, generator=generator)

    targets, ends = numbers(WORDS, samples, 6), numbers(6, samples) + 1
    lengths = numbers(9, samples) + 1
    targets = targets.where(torch.arange(6) < ends[:, None], IGNORED)
    return numbers(WORDS, samples, 9), numbers(WORDS, samples, 6), lengths, targets


class Given(Narration):
    """`Narration` of plain tuples of tensors."""

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return Batch(batch).inputs  # type: ignore[no-any-return]

    def targets(self, batch: Any) -> int:
        return Batch(batch).count  # type: ignore[no-any-return]

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return super().loss(outputs, Batch(batch))


def test_it_takes_fewer_than_60_lines_and_none_of_the_program() -> None:
    _, family, _ = re.split(r"(?m)^# -- .*$", Path(__file__).read_text(encoding="utf-8"))
    assert CONFIG.family in family
    assert len(family.strip().splitlines()) < 60
    for file in Path(model.__file__).parents[2].rglob("*.py"):
        assert not re.search(rf"\b{CONFIG.family}\b", file.read_text(encoding="utf-8"), re.IGNORECASE), file


def test_its_parameters_and_bytes_are_predicted() -> None:
    built = create(CONFIG)
    assert totals(CONFIG).parameters == sum(p.numel() for p in built.parameters())
    assert predict(CONFIG, load_machine("h100"), Plan(micro_batch=4)).iteration_seconds > 0
    assert describe(CONFIG, Plan(micro_batch=4, tp=2)).parameters < totals(CONFIG).parameters
    with pytest.raises(Exception, match=r"cannot split the model's 4 attention heads|2 attention heads"):
        predict(CONFIG, load_machine("h100"), Plan(tp=8))


LAYOUTS = {
    2: ["dp=2 micro_batch=2 sharding=fsdp recompute=full", "tp=2 sp=true micro_batch=4",
        "pp=2 micro_batch=2 accumulate=4", "cp=2 micro_batch=4"],
    4: ["tp=2 pp=2 sp=true micro_batch=2 accumulate=2", "pp=4 micro_batch=1 accumulate=4",
        "pp=2 dp=2 micro_batch=1 accumulate=2 sharding=zero1 recompute=operators"],
}  # fmt: skip


def _ranks(lines: list[str]) -> list[tuple[str, Trained, Trained]]:
    _enrol()
    recipe = Recipe(lr=3e-3, eps=1e-4)
    return beside_each("gist", lambda: CONFIG, lines, steps=3, recipe=recipe, batches=batches, loss=Given())


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_every_layout_trains_it_as_one_process_does(world: int) -> None:
    hold_both_ends(spawn(_ranks, world, LAYOUTS[world], timeout=280))


def test_it_is_saved_and_reloaded(tmp_path: Path) -> None:
    settings = to_dict(RunConfig(model=CONFIG))
    assert from_dict(RunConfig, settings).model == CONFIG
    built = build(CONFIG, Plan(micro_batch=4), loss=Given())
    built.step([batches(0, 4)])
    checkpoint.save(
        tmp_path / "checkpoints", checkpoint.Snapshot(1, {"weights": built.model.state_dict()}, {}, settings)
    )
    rewrite.export_model(rewrite.open_newest(tmp_path), tmp_path / "export", "weights")
    again = from_pretrained(tmp_path / "export").eval()
    source, target, lengths, _ = batches(1, 2)
    with torch.no_grad():
        for name, value in built.model.eval()(source, target, lengths).items():
            assert torch.equal(again(source, target, lengths)[name], value)


@pytest.mark.parametrize("cache", ["slots", "pages"])
def test_it_generates_what_it_says_token_by_token(cache: Any) -> None:
    torch.manual_seed(0)
    made = create(CONFIG, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5)
    texts, expected = [[3, 1, 4, 1, 5], [9, 2]], []
    for text in texts:
        said = [0]
        for _ in range(6):
            logits = made.logits(torch.tensor([text]), torch.tensor([said]), torch.tensor([len(text)]))
            said.append(int(logits[0, -1].argmax()))
        expected.append(said[1:])
    engine = Engine(made, slots=2, start=0, cache=cache)
    requests = [Request(ids=tuple(text), decoding=Decoding(max_tokens=6)) for text in texts]
    assert [tokens for tokens, _ in served(engine, requests)] == expected
    found = Generator(made, start=0, device="cpu").generate(texts, max_tokens=6)
    assert [list(one.ids) for one in found] == expected


@pytest.mark.sweep
def test_a_compiled_step_makes_the_same_tokens() -> None:
    made = create(CONFIG, dtype=torch.float64).eval()
    outputs = [
        served(
            Engine(made, slots=2, start=0, compiled=compiled),
            [Request(ids=(3, 1, 4), decoding=Decoding(max_tokens=5))],
        )
        for compiled in (None, Compiled(made, backend="eager"))
    ]
    assert outputs[0] == outputs[1]


def test_a_graph_that_cannot_be_is_refused_when_its_configuration_is_made() -> None:
    class Broken(Gist):
        @cached_property
        def graph(self) -> Graph:
            sound = Gist().graph
            heads = (WordHead(run="source", vocabulary=WORDS), *sound.heads[1:])
            return replace(sound, runs=sound.runs[1:], heads=heads)

    with pytest.raises(ConfigError) as caught:
        Broken()
    assert [problem.split(",")[0] for problem in caught.value.problems] == [
        "The run writer reads reader", "The head head reads source"
    ]  # fmt: skip


def test_two_sources_are_trained_with_and_not_generated_from() -> None:
    class Pair(Gist):
        @cached_property
        def graph(self) -> Graph:
            sound = Gist().graph
            other = replace(sound.runs[1], name="other", reads="aside", causal=False)
            return replace(
                sound,
                inputs=(*sound.inputs, TokenInput(name="aside", vocabulary=WORDS, length=16)),
                runs=(*sound.runs[:2], other, replace(sound.runs[2], memories=("reader", "other"))),
            )

    made = create(Pair())
    source, target, lengths, _ = batches(0, 2)
    assert made(source, target, source, lengths)["head"].shape == (2, 6, WORDS)
    with pytest.raises(ConfigError, match="does not generate text"):
        Engine(made, slots=1, start=0)


@pytest.mark.sweep
def test_the_ladder_climbs_with_it() -> None:
    report = ladder(
        CONFIG, data=DataConfig(source="numbers:en,de"), rungs=("optimizer-fused", "half-bf16"), budget=20.0,
        device="cpu", batch=8, loss_steps=4, round_seconds=0.02, rounds=2,
    )  # fmt: skip
    assert {"optimizer-fused", "half-bf16"} <= {rung.name for rung in report.rungs}
    assert all(rung.status not in ("failed", "refused") for rung in report.rungs), report.rungs
