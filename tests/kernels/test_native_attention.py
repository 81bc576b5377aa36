"""Attention in C++ on CPUs, beside the plain form in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from helpers.native_kernels import changed_terms_are_seen, needs_compiler
from helpers.operators import gradients
from penstock.apply import compile_model
from penstock.build import build
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.cpu import this_cpu
from penstock.errors import ConfigError
from penstock.kernels import native_attention
from penstock.kernels.attention import Scores, attention, packed_attention, plain_attention, split_heads

needs_pairs = pytest.mark.skipif(
    not this_cpu().bf16_pairs, reason="the kernel is made of AVX512-BF16 instructions"
)


def inputs(samples: int, heads: int, groups: int, queries: int, keys: int, width: int) -> list[Tensor]:
    """q, k and v in bf16 with strides of a packed projection: heads of one token lie side by side."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(queries, samples, heads, width, generator=generator)
    kv = torch.randn(keys, samples, groups, 2, width, generator=generator)
    k, v = kv.bfloat16().unbind(3)
    return [q.bfloat16().permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)]


def native(scores: Scores) -> Callable[..., Tensor]:
    return lambda q, k, v: attention(q, k, v, "native", scores)


def errors(ours: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True)]


CASES = {
    "whole": (2, 3, 3, 197, 197, 64, False),
    "causal, shared keys": (2, 4, 2, 130, 130, 64, True),
    "cross, odd": (3, 2, 2, 37, 51, 32, False),
    "one query": (1, 2, 2, 1, 7, 16, False),
    "later queries": (2, 2, 1, 65, 90, 80, True),
}


@needs_pairs
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_errors_are_those_of_bf16_at_most(case: str, padded: bool) -> None:
    _hold_errors(case, padded=padded)


def _hold_errors(case: str, *, padded: bool) -> None:
    *sizes, causal = CASES[case]
    tensors = inputs(*sizes)
    samples, keys = sizes[0], sizes[4]
    scores = Scores(causal=causal)
    if padded:
        seen = torch.arange(keys) < keys - 2 * torch.arange(samples)[:, None]
        scores = scores._replace(mask=seen[:, None, None])
    plain = scores
    if causal:  # the plain form has a causal mask of square scores only
        later = torch.ones(sizes[3], keys, dtype=torch.bool).tril(keys - sizes[3])
        plain = Scores(later[None, None] if scores.mask is None else later & scores.mask)
    by_plain = partial(plain_attention, scores=plain)
    exact, eager = gradients(by_plain, [t.double() for t in tensors]), gradients(by_plain, tensors)
    ours = gradients(native(scores), tensors)
    for own, theirs in zip(errors(ours, exact), errors(eager, exact), strict=True):
        assert own <= 1.5 * theirs + 1e-3, (errors(ours, exact), errors(eager, exact))


@needs_pairs
@pytest.mark.parametrize(("samples", "queries"), [(0, 5), (2, 0)])
def test_without_queries_nothing_is_learned(samples: int, queries: int) -> None:
    tensors = inputs(samples, 2, 2, queries, 7, 16)
    found = gradients(native(Scores()), tensors)
    assert [each.shape for each in found] == [each.shape for each in (tensors[0], *tensors)]
    assert not any(each.any() for each in found[1:])


@needs_pairs
def test_dropout_is_drawn_once_for_both_directions() -> None:
    _hold_dropout()


def _hold_dropout() -> None:
    """Weights are seen where values are the identity; the gradients are those of the weights that were kept. Each is
    kept by chance, whatever happens to its neighbours."""
    share, keys = 0.25, 64
    q, k, _ = tensors = inputs(2, 2, 2, 100, keys, 64)
    unit = torch.eye(keys).bfloat16().expand(2, 2, keys, keys)
    torch.manual_seed(3)
    dropped = attention(q, k, unit, "native", Scores(dropout=share))
    whole = attention(q, k, unit, "native")
    kept = (dropped != 0).double()
    torch.testing.assert_close(dropped.double(), whole.double() * kept / (1 - share), rtol=2e-2, atol=1e-3)
    assert abs(kept.mean() - (1 - share)) < 0.02
    assert (kept.mean((0, 1, 2)) - (1 - share)).abs().max() < 0.1  # 4.6 standard deviations of 400
    neighbours = [(kept[..., 1:, :], kept[..., :-1, :]), (kept[:, 0], kept[:, 1]), (kept[0], kept[1])]
    neighbours += [(kept[..., by:], kept[..., :-by]) for by in (1, 16)]
    for one, other in neighbours:  # alike as often as by chance
        assert abs((one == other).double().mean() - share**2 - (1 - share) ** 2) < 0.02
    torch.manual_seed(3)
    ours = gradients(native(Scores(dropout=share)), tensors)

    def of_the_kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) * kept / (1 - share) @ v

    exact = gradients(of_the_kept, [t.double() for t in tensors])
    assert max(errors(ours, exact)) < 0.01
    torch.manual_seed(3)
    again = attention(*tensors, "native", Scores(dropout=share))
    assert torch.equal(again, ours[0])
    assert not torch.equal(attention(*tensors, "native", Scores(dropout=share)), ours[0])


@needs_pairs
@pytest.mark.parametrize("sequence_first", [False, True])
def test_a_packed_projection_is_read_in_place(sequence_first: bool) -> None:
    """Results and gradients are those of its three parts, also masked and causal."""
    packed = torch.randn(21, 4, 3 * 3 * 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    samples, tokens = (4, 21) if sequence_first else (21, 4)
    seen = torch.arange(tokens) < tokens - (torch.arange(samples) % 3)[:, None]
    for scores in (Scores(), Scores(causal=True), Scores(seen[:, None, None]), Scores(dropout=0.3)):
        results = []
        for whole in (True, False):
            leaf = packed.clone().requires_grad_()
            torch.manual_seed(1)
            if whole:
                out = packed_attention(leaf, 32, sequence_first=sequence_first, scores=scores)
            else:
                q, k, v = split_heads(leaf, 32)
                order = (1, 2, 0, 3) if sequence_first else (0, 2, 1, 3)
                heads = attention(*(t.permute(order) for t in (q, k, v)), "native", scores)
                out = heads.permute(*((2, 0, 1, 3) if sequence_first else (0, 2, 1, 3))).flatten(2)
            out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16())
            results.append((out.detach(), leaf.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert results[0][1] is not None
        assert torch.equal(results[0][1], results[1][1])


@needs_pairs
def test_compiled_and_built_models_train_alike() -> None:
    images, labels = torch.randn(4, 1, 8, 8), torch.tensor([1, 2, 3, 4])
    losses = {}
    for name, backend in {"plain": "plain", "native": "native", "compiled": "native"}.items():
        built = build(PRESETS["vit-digits"], Plan.parse(f"precision=O1 attention={backend}"), seed=0)
        if name == "compiled":
            compile_model(built.model, Plan(compile="blocks"), backend="aot_eager", fullgraph=True)
        losses[name] = [float(built.step([(images, labels)]).loss) for _ in range(4)]
    plain = losses.pop("plain")
    assert plain[-1] < plain[0]
    for others in losses.values():
        assert others == pytest.approx(plain, rel=2e-2)


def test_what_the_kernel_cannot_take_is_said() -> None:
    q, k, v = (t.float() for t in inputs(1, 2, 2, 5, 5, 16))
    with pytest.raises(ConfigError, match=r"plan\.attention 'native' has no kernel for"):
        attention(q, k, v, "native")
    if this_cpu().bf16_pairs:
        q, k, v = inputs(1, 2, 2, 5, 5, 16)
        biased = Scores(torch.zeros(1, 2, 5, 5).bfloat16())
        with pytest.raises(ConfigError, match="biases of scores"):
            attention(q, k, v, "native", biased)
        with pytest.raises(ConfigError, match="multiples of 16"):
            attention(*inputs(1, 2, 2, 5, 5, 24), "native")


MUTANTS = (
    ("first + r + 1 + s.m - s.n) : s.m;\n      V most", "first + s.m - s.n) : s.m;\n      V most"),
    ("\n        if (m_row) x = _mm512_add_ps", "\n        if (false) x = _mm512_add_ps"),
    ("total = _mm512_add_ps(total, e)", "total = e"),
    ("lse[first + r] = top + std::log(t)", "lse[first + r] = std::log(t)"),
    ("_mm512_set1_ps(0.693359375f)", "_mm512_set1_ps(0.69f)"),
    ("vv = v.data + b * v.sample + h / shared * v.head", "vv = v.data + b * v.sample"),
    ("totals[r] > 0 ? up_scale / totals[r]", "totals[r] > 0 ? 1.0f / totals[r]"),
    ("if (least) e = _mm512_maskz_mov_ps(keeps(seed, first + r, j, least), e);", ""),
    ("u32(row) * 0x9E3779B9u", "u32(row) * 0u"),
    ("_mm512_set1_epi32(int(column))", "_mm512_set1_epi32(0)"),
    ("\n    u32 seed = s.seed + u32(b * s.heads + h)", "\n    u32 seed = s.seed + u32(b * s.heads)"),
    ("_mm512_sub_ps(into, sum)", "into"),
    ("_mm512_mul_ps(_mm512_mul_ps(p, ", "_mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(1.0f), "),
    ("into = _mm512_maskz_mul_ps(kept, into, up_scale)", "into = _mm512_mul_ps(into, up_scale)"),
    ("dropped = _mm512_maskz_mul_ps(kept, p, up_scale)", "dropped = _mm512_mul_ps(p, up_scale)"),
    ("if (r % 2) {", "if (false) {"),
    ("grads2, s.k, dv, s.k, true)", "grads2, s.k, dv, s.k, false)"),
    ("queries2, s.k, dk, s.k, true)", "queries2, s.k, dk, s.k, false)"),
    ("keys, s.k, dq, s.k, false)", "keys_t, s.k, dq, s.k, false)"),
)  # fmt: skip
"""Changes of one term of the kernels, each of which the tests above see."""


def _hold() -> None:
    for case in CASES:
        _hold_errors(case, padded=case == "whole")
    _hold_dropout()


test_a_changed_term_is_seen = needs_compiler(
    changed_terms_are_seen("attention", MUTANTS, [native_attention], _hold, needs_pairs)
)
