"""Attention in parts (windows, packed documents, blocks of a causal mask) equals that under a mask of all tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.model import PRESETS
from penstock.config.plan import AttentionBackend
from penstock.kernels import varlen
from penstock.kernels.attention import BACKENDS, Scores, attention, plain_attention
from penstock.kernels.choices import CAUSAL_BLOCK
from penstock.kernels.documents import Documents
from penstock.kernels.windows import Windows
from penstock.models import create, stack
from penstock.models.masks import added, visible
from penstock.models.model import Model

TOKENS = 333
DEVICE = torch.device("cpu")


def _heads() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, TOKENS, 8, dtype=torch.double, requires_grad=True) for heads in (4, 2, 2)]


def _with_gradients(out: Tensor, inputs: list[Tensor], counted: Tensor) -> list[Tensor]:
    """Outputs and gradients of what counts: what padding sees is its own business."""
    torch.manual_seed(1)
    asked = torch.randn_like(out) * counted
    return [out * counted, *torch.autograd.grad(out, inputs, asked)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 5, 70])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_windows_in_blocks_equal_a_mask(causal: bool, window: int, padded: bool, packed: bool) -> None:
    inputs = _heads()
    lengths = torch.tensor([TOKENS, 201]) if padded else None
    documents = (torch.arange(TOKENS) // torch.tensor([[50], [117]])) if packed else None
    known: dict[str, Any] = {"causal": causal, "lengths": lengths, "documents": documents}
    near = Windows.of(window, samples=2, tokens=TOKENS, device=DEVICE, dtype=torch.double, **known)
    assert near is not None
    assert near.mask.numel() < 2 * TOKENS**2 / 2
    counted = torch.ones(2, 1, TOKENS, 1)
    if padded and not causal:
        counted[1, :, 201:] = 0
    masked = plain_attention(*inputs, Scores(visible(TOKENS, DEVICE, window=window, **known)))
    expected = _with_gradients(masked, inputs, counted)
    for backend in ("plain", "sdpa"):
        found = attention(*inputs, backend, Scores(near))  # type: ignore[arg-type]
        torch.testing.assert_close(_with_gradients(found, inputs, counted), expected)


def test_windows_that_save_nothing_have_no_blocks() -> None:
    given: dict[str, Any] = {"samples": 1, "device": DEVICE, "dtype": torch.float32}
    assert Windows.of(150, causal=True, tokens=TOKENS, **given) is None
    assert Windows.of(2, causal=False, tokens=100, **given) is None


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 20])
def test_documents_one_by_one_equal_a_mask(causal: bool, window: int | None) -> None:
    inputs = _heads()
    documents = (torch.arange(TOKENS) // torch.tensor([[120], [333]])) * 7 % 5

    def inside(tokens: int) -> Tensor | None:
        return visible(tokens, DEVICE, causal=causal, window=window)

    one_by_one = Documents.of(documents, causal=causal, mask=None if window is None else inside)
    assert one_by_one is not None
    assert one_by_one.runs == [[120, 120, 93], [333]]
    mask = visible(TOKENS, DEVICE, causal=causal, window=window, documents=documents)
    counted = torch.ones(())
    expected = _with_gradients(plain_attention(*inputs, Scores(mask)), inputs, counted)
    for backend in ("plain", "sdpa"):
        found = attention(*inputs, backend, Scores(one_by_one))  # type: ignore[arg-type]
        torch.testing.assert_close(_with_gradients(found, inputs, counted), expected)


def test_short_documents_are_told_apart_by_a_mask() -> None:
    assert Documents.of(torch.arange(TOKENS)[None] // 8, causal=True) is None
    assert Documents.of(torch.zeros(1, 640, device="meta"), causal=True) is None


def test_causal_blocks_of_the_plain_form_equal_a_mask() -> None:
    inputs = _heads()
    assert TOKENS >= 2 * CAUSAL_BLOCK
    assert TOKENS % CAUSAL_BLOCK
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
    expected, found = (plain_attention(*inputs, scores) for scores in (Scores(mask), Scores(causal=True)))
    counted = torch.ones(())
    torch.testing.assert_close(
        _with_gradients(found, inputs, counted), _with_gradients(expected, inputs, counted)
    )


def test_masks_are_made_numbers_once_unless_they_learn() -> None:
    seen = torch.tensor([[True, False]])
    assert added(seen, torch.bfloat16).tolist() == [[0.0, float("-inf")]]  # type: ignore[union-attr]
    learned = torch.zeros(2, requires_grad=True)
    assert added(learned, torch.bfloat16) is learned
    assert added(None, torch.bfloat16) is None
    assert {"plain", "sdpa"} <= set(BACKENDS)


def _kernel_of_lengths(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, longest: int, longest_keys: int,
    scale: float | None, reach: tuple[int, int],
) -> Tensor:  # fmt: skip
    """What torch's kernel computes, one sequence after the other."""
    assert starts.dtype == key_starts.dtype == torch.int32
    sizes, key_sizes = starts.diff().tolist(), key_starts.diff().tolist()
    assert max(sizes) <= longest
    assert max(key_sizes) <= longest_keys
    found = []
    pieces = zip(q.split(sizes), *(t[: sum(key_sizes)].split(key_sizes) for t in (k, v)), strict=True)
    for one, keys, values in pieces:
        behind = torch.arange(len(one))[:, None] - torch.arange(len(keys))
        seen = torch.ones_like(behind, dtype=torch.bool)
        for side, distance in zip(reach, (behind, -behind)):
            seen &= (distance <= side) | (side < 0)
        heads = [t.transpose(0, 1)[None] for t in (one, keys, values)]
        found.append(plain_attention(*heads, Scores(seen[None, None], scale=scale))[0].transpose(0, 1))
    return torch.cat(found)


LENGTHS = {
    "packed decoder": replace(PRESETS["llama-tiny"], vocabulary=50, sequence=96),
    "packed window": replace(PRESETS["gpt-tiny"], vocabulary=50, sequence=96, window=7, dropout=0.0),
    "window": replace(PRESETS["gpt-tiny"], vocabulary=50, sequence=96, window=7, dropout=0.0),
    "packed encoder": replace(PRESETS["modernbert-tiny"], vocabulary=50, sequence=96, dropout=0.0),
    "padded encoder": replace(PRESETS["modernbert-tiny"], vocabulary=50, sequence=96, window=9, dropout=0.0),
    "padded translator": replace(PRESETS["marian-tiny"], vocabulary=50, sequence=96),
}
"""Models, and how their samples come."""


def _outputs(name: str, backend: AttentionBackend, device: str, dtype: torch.dtype) -> list[Tensor]:
    """What a model gives of tokens that count, and all gradients."""
    torch.manual_seed(0)
    model = create(LENGTHS[name]).to(device, dtype).eval()
    assert isinstance(model, Model)
    model.set_attention(backend)
    if name.startswith("padded"):
        model.set_padding("remove")
    tokens = torch.randint(0, 50, (3, 96), device=device)
    lengths = torch.tensor([96, 40, 71], device=device)
    documents = (torch.arange(96) // torch.tensor([[30], [50], [96]])).to(device)
    counted = torch.ones(3, 96, 1, dtype=torch.bool, device=device)
    if name == "padded translator":
        out = model(tokens, torch.randint(0, 50, (3, 20), device=device), lengths)
        counted = counted[:, :20]
    elif name == "padded encoder":
        out = model(tokens, lengths)
        counted = (torch.arange(96, device=device) < lengths[:, None])[..., None]
    elif name == "packed encoder":
        out = model(tokens, None, None, documents)
    else:
        out = model(tokens, documents if name.startswith("packed") else None)
    out = out * counted
    out.backward(torch.randn(out.shape, dtype=torch.double).to(device, dtype) * counted)
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", LENGTHS)
def test_a_kernel_of_lengths_takes_the_place_of_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _outputs(name, "plain", "cpu", torch.double)
    calls = []

    def counting(*given: Any) -> Tensor:
        calls.append(given[3].tolist())
        return _kernel_of_lengths(*given)

    monkeypatch.setattr(varlen, "_kernel", counting)
    monkeypatch.setattr(
        stack, "knows_lengths", lambda backend, *_, biased, **__: backend == "flash" and not biased
    )
    found = _outputs(name, "flash", "cpu", torch.double)
    torch.testing.assert_close(found, expected)
    wanted = {
        "packed": [0, 30, 60, 90, 96, 146, 192, 288],
        "window": [0, 96, 192, 288],
        "padded": [0, 96, 136, 207, 216],
    }
    assert calls[0] == wanted[name.split()[0]]
    if name == "padded translator":
        assert [0, 20, 40, 60] in calls


@pytest.mark.gpu
@pytest.mark.parametrize("name", LENGTHS)
def test_torchs_kernel_of_lengths_takes_the_place_of_masks(name: str) -> None:
    expected = _outputs(name, "plain", "cuda", torch.float32)
    found = _outputs(name, "flash", "cuda", torch.bfloat16)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.05, atol=0.03 * float(other.abs().max()))
