"""A run over several inputs: each is seen under its own mask, whatever else is computed with it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.equality import Trained, beside_each, hold_both_ends
from helpers.families import WORDS, batches, loss, small
from helpers.spawn import spawn
from helpers.sweeps import sweep
from penstock.config.graph import Graph
from penstock.config.model import UniversalConfig, preset, with_stacks
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.errors import ConfigError
from penstock.kernels.attention import Scores, attention
from penstock.kernels.documents import AlikeSamples, Batches
from penstock.models import create
from penstock.models.inputs import RunInputs
from penstock.models.masks import visible
from penstock.planner.describe import describe, totals

TINY: Any = small("universal-tiny", head="both")
NARROW = replace(
    TINY, tied=False, understanding=replace(TINY.understanding, width=8, mlp_width=24),
    generating=replace(TINY.generating, width=12, heads=4, head_features=6),
)  # fmt: skip
"""Branches of other widths than the body's."""


def _made(config: UniversalConfig) -> Any:
    torch.manual_seed(0)
    model = create(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5)
    return model


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(seed))


def test_the_published_model_has_as_many_parameters() -> None:
    assert totals(preset("ernie3-10b")).parameters == pytest.approx(10e9, rel=0.01)
    assert totals(NARROW).parameters == sum(p.numel() for p in create(NARROW).parameters())


@pytest.mark.parametrize("config", [TINY, NARROW], ids=["alike", "narrow"])
@pytest.mark.parametrize("order", ["batch_first", "batch_second"])
def test_no_later_token_changes_the_next_ones_logits(config: UniversalConfig, order: str) -> None:
    model = _made(config)
    model.set_token_order(order)
    tokens, hidden = _numbers(3, 9), _numbers(2, 9, seed=1)
    with torch.no_grad():
        before = model(tokens, hidden)
        for place in range(9):
            other = tokens.clone()
            other[:, place] = (other[:, place] + 1) % WORDS
            after = model(other, hidden)
            changed = (after["next"] - before["next"]).abs().amax((0, 2)) > 1e-9
            assert not changed[:place].any()
            assert changed[place:].all()
            for head in ("kind", "masked"):
                torch.testing.assert_close(after[head], before[head])
        # Whoever understands sees all of a text.
        other = hidden.clone()
        other[:, -1] = (other[:, -1] + 1) % WORDS
        assert ((model(tokens, other)["masked"] - before["masked"]).abs().amax((0, 2)) > 1e-9).all()


@pytest.mark.parametrize("attention_", ["plain", "sdpa"])
def test_both_at_once_are_each_alone(attention_: str) -> None:
    """Padding, documents and gradients included."""
    model = _made(NARROW)
    model.set_attention(attention_)
    tokens, hidden, lengths = _numbers(3, 9), _numbers(2, 9, seed=1), torch.tensor([9, 4])
    documents = (torch.arange(9) // 4).expand(3, 9)
    given = {"lengths": lengths, "documents": {"tokens": documents}}
    real = torch.arange(9) < lengths[:, None]

    def computed(*arguments: Any, **more: Any) -> dict[str, Tensor]:
        outputs = model(*arguments, **more)
        return {name: value[real] if name == "masked" else value for name, value in outputs.items()}

    both = computed(tokens, hidden, **given)
    one = computed(tokens, None, documents=documents)
    other = computed(None, hidden, lengths)
    assert (one.keys(), other.keys()) == ({"next"}, {"kind", "masked"})
    for name, value in {**one, **other}.items():
        torch.testing.assert_close(value, both[name])
    every = list(model.parameters())

    def gradients(outputs: dict[str, Tensor]) -> list[Tensor]:
        total = sum(value.sin().sum() for value in outputs.values())
        made = torch.autograd.grad(total, every, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(every, made, strict=True)]

    for found, first, second in zip(gradients(both), gradients(one), gradients(other), strict=True):
        torch.testing.assert_close(found, first + second)


def test_one_branch_is_what_the_model_of_it_computes() -> None:
    model = _made(TINY)
    tokens = _numbers(2, 9)
    for name, given in (("generating", (tokens, None)), ("understanding", (None, tokens))):
        part = create(replace(TINY, branches=(name,)), dtype=torch.float64).eval()
        part.load_state_dict({key: model.state_dict()[key] for key in part.state_dict()})
        found = part(tokens)
        expected = model(*given)
        for head, value in (found if isinstance(found, dict) else {"next": found}).items():
            torch.testing.assert_close(value, expected[head])


def test_batches_with_masks_of_their_own_attend_as_under_one_mask() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(5, 2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    seen = torch.rand(2, 1, 6, 6) < 0.6
    seen |= torch.eye(6, dtype=torch.bool)
    mask = torch.ones(5, 1, 6, 6, dtype=torch.bool)
    mask[:2], mask[2:4] = torch.ones(6, 6, dtype=torch.bool).tril(), seen
    sight = Batches([AlikeSamples(2, True), AlikeSamples(2, False, seen), AlikeSamples(1, False)])
    found, expected = (attention(q, k, v, "sdpa", Scores(mask=each)) for each in (sight, mask))
    torch.testing.assert_close(found, expected)
    ways = (torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in (found, expected))
    for one, other in zip(*ways, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 9, [0] * 4 + [1] * 5])])
def test_a_prefix_is_seen_whole_and_hides_what_comes_behind(documents: Tensor | None) -> None:
    """Gradients tell which token sees which; without a prefix, and of one that is all, two plain masks are the same."""
    model = _made(replace(TINY, prefix=0.5))
    tokens, prefixes = _numbers(2, 9), torch.tensor([4, 6])
    x = model.tokens(tokens).detach().requires_grad_()
    given = RunInputs(prefixes=prefixes, documents=documents)
    out = model.generating(model.shared(x, given._replace(batches=((2, True),))), given)
    places = torch.arange(9)
    for sample, prefix in enumerate(prefixes):
        wanted = (places <= places[:, None]) | ((places < prefix) & (places[:, None] < prefix))
        if documents is not None:
            wanted &= documents[sample] == documents[sample][:, None]
        for place in range(9):
            (gradient,) = torch.autograd.grad(out[sample, place].sin().sum(), x, retain_graph=True)
            assert torch.equal(gradient[sample].abs().sum(-1) > 0, wanted[place])
    for seen, hides in (([0, 0], True), ([9, 9], False)):
        found = model.shared(x, given._replace(prefixes=torch.tensor(seen), batches=((2, True),)))
        torch.testing.assert_close(found, model.shared(x, RunInputs(None, documents, batches=((2, hides),))))
    near = visible(9, torch.device("cpu"), causal=True, window=3, prefixes=prefixes)
    assert near is not None
    alone = visible(9, torch.device("cpu"), causal=True, window=3)
    assert alone is not None
    inside = (places < prefixes[:, None, None]) & (places - places[:, None] < 3) & (places > places[:, None])
    assert torch.equal(near[:, 0], alone[0] | inside)
    assert "prefixes" not in _made(TINY).graph.arguments


LAYOUTS = {
    2: ["tp=2 sp=true micro_batch=4", "pp=2 micro_batch=2 accumulate=2", "dp=2 micro_batch=2 sharding=fsdp"],
    4: ["tp=2 pp=2 micro_batch=2 accumulate=2", "pp=4 micro_batch=2 accumulate=2 recompute=full"],
}  # fmt: skip


def _config() -> UniversalConfig:
    """Branches of another width, in which two ranks can share out all that they have."""
    return replace(NARROW, head="words", prefix=0.5)


def _with_prefixes(config: UniversalConfig, step: int, samples: int) -> tuple[Any, ...]:
    *inputs, targets = batches(config, step, samples)
    prefixes = (torch.arange(samples) + step) % 5
    more = [None] * (config.graph.arguments.index("prefixes") - len(inputs))
    return *inputs, *more, prefixes, targets


def _ranks(lines: list[str]) -> list[tuple[str, Trained, Trained]]:
    recipe, given = Recipe(lr=3e-3, eps=1e-4), partial(_with_prefixes, _config())
    return beside_each("universal", _config, lines, steps=2, recipe=recipe, batches=given, loss=loss)


@pytest.mark.parametrize("world", sweep(LAYOUTS, [2]))
@pytest.mark.slow
def test_every_layout_trains_it_as_one_process_does(world: int) -> None:
    hold_both_ends(spawn(_ranks, world, LAYOUTS[world], timeout=280))


def test_its_split_and_its_shares_are_described() -> None:
    whole = totals(TINY)
    assert describe(TINY, Plan(micro_batch=4, tp=2)).parameters < whole.parameters
    half = totals(replace(TINY, continued=0.5, masked=0.5))
    assert 0.4 * whole.model_flops < half.model_flops < 0.6 * whole.model_flops


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan\.cp cannot cut"):
        create(TINY).share_tokens(None)
    with pytest.raises(ConfigError, match=r"equally long, but have tokens 5 and hidden 6 tokens"):
        create(TINY)(_numbers(1, 5), _numbers(1, 6))
    with pytest.raises(ConfigError, match=r"shares the table tokens of 16 features"):
        replace(NARROW, tied=True)
    with pytest.raises(ConfigError, match="relative positions"):
        with_stacks(TINY, lambda stack: replace(stack, positions="relative"))
    with pytest.raises(ConfigError, match="must name each branch once"):
        replace(TINY, branches=())
    with pytest.raises(ConfigError, match=r"model\.continued and model\.masked must both be above 0"):
        replace(TINY, continued=0.0)

    class Headed(UniversalConfig):
        @property
        def graph(self) -> Graph:  # type: ignore[override]
            sound = TINY.graph
            return replace(sound, heads=(*sound.heads[:-1], replace(sound.heads[-1], run="shared")))

    with pytest.raises(ConfigError, match="The head next reads shared, which is over several inputs"):
        Headed()
