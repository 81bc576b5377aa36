"""The attention masks of samples in one pass, in the form that needs the least memory.

Shapes: B samples, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.attention import AttentionMask
from penstock.kernels.documents import AlikeSamples, Batches, Documents
from penstock.kernels.padding import Unpadded, within
from penstock.kernels.varlen import Varlen
from penstock.kernels.windows import Windows
from penstock.models.inputs import RunInputs


def masks_of(
    windows: Sequence[int], widest: int | None, tokens: int, given: RunInputs, documents: Tensor | Unpadded | None,
    bias: Tensor | None, *, causal: bool, **known: Any,
) -> tuple[Tensor | AttentionMask | None, Tensor | AttentionMask | None]:  # fmt: skip
    """The masks of a run's blocks that attend to all tokens, and of those with a window (`widest`); `windows` has the
    window of each block, 0 for none. `known` are `varlen`, `samples`, `device` and `dtype` of `_mask`."""
    lengths, prefixes = given.lengths, given.prefixes

    def seen(window: int | None) -> Tensor | AttentionMask | None:
        if len(given.batches) < 2:
            every = {**known, "lengths": lengths, "prefixes": prefixes}
            return _mask(tokens, window, bias, documents, causal=causal, **every)
        assert not isinstance(documents, Unpadded)
        masks, first = [], 0
        for samples, hides in given.batches:
            some = slice(first, first + samples)
            first += samples
            alone = {
                **known, "samples": samples, "lengths": None if lengths is None or hides else lengths[some],
                "prefixes": None if prefixes is None or not hides else prefixes[some],
            }  # fmt: skip
            inside = None if documents is None else documents[some]
            mask = _mask(tokens, window, bias, inside, causal=hides, **alone)
            masks.append(AlikeSamples(samples, hides, mask))
        return Batches(masks)

    near = seen(widest) if any(windows) else None
    return seen(None) if 0 in windows else None, near


def _mask(
    tokens: int, window: int | None, bias: Tensor | None, documents: Tensor | Unpadded | None = None,
    *, causal: bool, dtype: torch.dtype, varlen: bool = False, prefixes: Tensor | None = None, **known: Any,
) -> Tensor | AttentionMask | None:  # fmt: skip
    """The attention mask, in the form that needs the least memory here."""
    if prefixes is not None:
        assert not isinstance(documents, Unpadded)  # its tokens are not causal
        given = {"lengths": known["lengths"], "documents": documents, "prefixes": prefixes}
        mask = visible(tokens, known["device"], causal=causal, window=window, **given)
        return added(mask if bias is None else biased(bias, mask, causal=causal), dtype)
    if varlen and isinstance(documents, Unpadded):
        return Varlen(*documents.starts(rest=True), causal=causal, window=window)
    if varlen and known["lengths"] is None and (documents is not None or window is not None):
        where = {name: known[name] for name in ("samples", "device")}
        alone: Varlen = Varlen.of(documents, tokens=tokens, causal=causal, window=window, **where)
        return alone
    if documents is not None and (causal or known["lengths"] is None):

        def within_one(length: int) -> Tensor | AttentionMask | None:
            inside = None if bias is None else bias[..., :length, :length]
            alone = {**known, "samples": 1, "lengths": None}
            return _mask(length, window, inside, causal=causal, dtype=dtype, **alone)

        more = window is not None or bias is not None
        separate: Documents | None = Documents.of(documents, causal=causal, mask=within_one if more else None)
        if separate is not None:
            return separate
    assert not isinstance(documents, Unpadded)  # `Documents` serves those
    if window is not None and bias is None and not torch.compiler.is_exporting():
        near = Windows.of(window, causal=causal, tokens=tokens, documents=documents, dtype=dtype, **known)
        if near is not None:
            return near
    device, lengths = known["device"], known["lengths"]
    seen = visible(tokens, device, causal=causal, window=window, lengths=lengths, documents=documents)
    return added(seen if bias is None else biased(bias, seen, causal=causal), dtype)


def visible(
    tokens: int, device: torch.device, *, causal: bool, window: int | None = None,
    lengths: Tensor | None = None, documents: Tensor | None = None, prefixes: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """The attention mask, true where a token attends to another, broadcastable to (B, 1, N, N); None if the kernel's
    own causal mask, or no mask, is enough.

    `lengths` (B,) are the numbers of non-padding tokens of the samples. Padding comes last, so a causal mask hides it
    already. Otherwise a mask of lengths is (B, 1, 1, N). Only a window or packed documents need N² memory, if no other
    form applies: see `penstock.kernels.windows` and `documents`. `prefixes` (B,) are the numbers of first tokens of
    each sample that attend to each other even under a causal mask.
    """
    mask: Tensor | None = None
    ordered: Tensor | None = None
    if causal and (documents is not None or prefixes is not None):
        ordered = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()[None, None]
    if ordered is not None and prefixes is not None:
        ordered = ordered | within(prefixes, tokens)
    # An exported program accepts any number of tokens.
    any_number = torch.compiler.is_exporting()
    limited = window is not None and (any_number or (window if causal else window // 2) < tokens)
    if limited and window is not None:
        places = torch.arange(tokens, device=device)
        behind = places[:, None] - places
        mask = behind.abs() < window if causal else behind.abs() <= window // 2
        mask = mask[None, None]
        if causal:
            mask = mask & ((behind >= 0)[None, None] if ordered is None else ordered)
    if documents is not None:
        same = documents[:, None, :, None] == documents[:, None, None, :]
        mask = same if mask is None else mask & same
    if ordered is not None and not limited:
        mask = ordered if mask is None else mask & ordered
    if lengths is not None and not causal:
        real = within(lengths, tokens)
        # Padding attends to itself: a row of only −∞ would yield NaN, which spreads.
        mask = real if mask is None else (mask & real) | torch.eye(tokens, dtype=torch.bool, device=device)
    return mask


def added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as values to add to scores of this type, computed once for all blocks. Learned biases keep their own type,
    in which their gradients are summed.
    """
    if mask is None or mask.requires_grad:
        return mask
    if mask.is_floating_point():
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def biased(bias: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """A bias of scores, with −∞ where `mask`, or else a causal mask, hides a token."""
    if mask is None and causal:
        tokens = bias.shape[-1]
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=bias.device).tril()
    return bias if mask is None else bias.masked_fill(~mask, -math.inf)
