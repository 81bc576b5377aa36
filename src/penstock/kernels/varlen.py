"""Attention over concatenated sequences of different lengths, by torch's variable-length flash kernel.

`attention=flash` uses it on a GPU in half precision in place of a mask that separates packed documents, limits a
window, or hides padding: no mask of N² values is made, and no masked score is computed. The kernel supports neither
dropout nor biases; with these, and with other backends, a mask is used, which is the reference.

Shapes: B samples, H heads, G KV heads, N tokens, K features per head; S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.config.plan import AttentionBackend
from penstock.kernels.attention import Scores


class Varlen:
    """Start offsets of the sequences in a batch flattened to one row; an `AttentionMask`."""

    def __init__(self, starts: Tensor, longest: int, *, causal: bool, window: int | None = None) -> None:
        self.starts = starts
        """(S + 1,) int32: where each sequence begins, and where the last ends."""
        self.longest = longest
        """Upper bound on the tokens of a sequence."""
        self.before, self.after = -1, 0 if causal else -1
        """How many tokens before and after itself a token attends to; −1: all."""
        if window is not None:
            self.before = window - 1 if causal else window // 2
            self.after = 0 if causal else window // 2

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of(
        cls, documents: Tensor | None, *, samples: int, tokens: int, device: torch.device, causal: bool,
        window: int | None,
    ) -> Varlen:  # fmt: skip
        """Sequences are the runs of equal numbers in `documents` (B, N), else whole samples. Waits for the device."""
        first = torch.zeros(samples, tokens, dtype=torch.bool, device=device)
        first[:, 0] = True
        if documents is not None:
            first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        begins = first.flatten().nonzero().squeeze(1)
        starts = torch.cat([begins, begins.new_full((1,), samples * tokens)]).int()
        return cls(starts, tokens, causal=causal, window=window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend, scores: Scores) -> Tensor:
        """The same as `attention`: q (B, H, N, K), k and v (B, G, N, K); returns (B, H, N, K)."""
        ends = (self.starts, self.longest)
        return varlen_attention(q, k, v, ends, ends, (self.before, self.after), scores.scale)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, queries: tuple[Tensor, int], keys: tuple[Tensor, int],
    reach: tuple[int, int], scale: float | None,
) -> Tensor:  # fmt: skip
    """Attention of each sequence of queries to the sequence of keys with the same number: q (B, H, M, K), k and v (B',
    G, T, K), whose samples are flattened to one row; returns (B, H, M, K). `queries` and `keys` say where sequences
    begin and how long the longest is; `reach` is the number of tokens before and after itself that a query attends to,
    −1: all."""
    samples, heads, tokens, _ = q.shape
    if k.shape[1] != heads:  # not every supported torch has grouped KV heads here
        k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    out = _kernel(q, k, v, queries[0], keys[0], queries[1], keys[1], scale, reach)
    return torch.unflatten(out, 0, (samples, tokens)).transpose(1, 2)


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, longest: int, longest_keys: int,
    scale: float | None, reach: tuple[int, int],
) -> Tensor:  # fmt: skip
    """torch's kernel: q (T, H, K), k and v (T', H, K)."""
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(q, k, v, starts, key_starts, longest, longest_keys, scale=scale, window_size=reach)
    assert isinstance(out, Tensor)
    return out
