"""Positions of tokens (tables, rotation, and biases of scores by distance), and masks of attention.

Shapes: B samples, N tokens as queries, M tokens as keys, D width, H heads, K features per head. `places` are the
positions of tokens: (N,), or (B, N) where documents are packed into samples.

Nothing here is kept as a buffer, which a cast of the model to half precision would round: angles are computed again in
fp32 once per pass, and all blocks share them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.graph import Input, PatchInput
from penstock.config.layer import Rotary
from penstock.config.stack import Stack
from penstock.errors import ConfigError


class Learned(nn.Embedding):
    """A table with one learned vector per position, to be added to tokens. `unplaced` are the index of the first token
    without a position and the number of such tokens."""

    def __init__(self, rows: int, width: int, unplaced: tuple[int, int] = (0, 0), **where: Any) -> None:
        super().__init__(rows, width, **where)
        self.unplaced = unplaced

    def forward(self, places: Tensor | int) -> Tensor:
        """The vectors of `places`; an int means that number of first positions."""
        tokens = places if isinstance(places, int | torch.SymInt) else places.shape[-1]
        first, without = self.unplaced
        if without:
            begin, rest = self.weight[:first], self.weight[first:]
            table = torch.cat([begin, begin.new_zeros(without, self.embedding_dim), rest])
            return F.embedding(places, table) if isinstance(places, Tensor) else table[:tokens]
        if tokens > self.num_embeddings:
            raise ConfigError(
                f"The model has {self.num_embeddings} learned positions, but was given samples of {tokens} tokens; "
                "shorten them, or set model.max_positions."
            )
        # A slice saves nothing for the backward pass; a lookup would save the places.
        return super().forward(places) if isinstance(places, Tensor) else self.weight[:tokens]


class Sinusoidal(nn.Module):
    """Sines of falling frequency in the first half of the features, cosines in the second (Vaswani et al., NeurIPS
    2017, section 3.5, where they alternate). fairseq's translators count from 2, and their last rate is 1 / 10000.
    """

    def __init__(self, width: int, *, fairseq: bool = False) -> None:
        super().__init__()
        self.width = width
        self.first = 2 if fairseq else 0
        self.last: float = max(1, width // 2 - 1) if fairseq else width / 2

    def forward(self, places: Tensor) -> Tensor:
        half = self.width // 2
        rates = torch.arange(half, dtype=torch.float32, device=places.device) * (-1.0 / self.last)
        angles = (places + self.first).unsqueeze(-1) * torch.pow(10000.0, rates)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of each position's angles for `rotate`, in fp32, broadcastable over heads and samples."""


Grid = tuple[int, int]
"""The index of the first patch among an image's tokens, and the number of patches per row."""
Turns = tuple[tuple[Rotary, int, Grid | None, tuple[str, ...]], ...]
"""Rotary positions, the features of a head, the grid if they are axial, and the fields of `Context` to set."""


def turns_of(sizes: Stack, one: Input | None) -> Turns:
    """The rotary positions of a stack's layers over an input."""
    grid = None
    if sizes.positions == "axial" and isinstance(one, PatchInput):
        grid = one.learned_tokens, one.image_size // one.patch_size
    entries: dict[tuple[Rotary, int], dict[str, None]] = {}
    for layer in sizes.kinds:
        if layer.rotary is not None:
            name = "near_rotation" if layer.window else "rotation"
            entries.setdefault((layer.rotary, layer.rotary_width), {})[name] = None
    return tuple((*key, grid, tuple(names)) for key, names in entries.items())


def rotations(
    turns: Turns, places: Tensor, *, sequence_first: bool, last: Tensor | None = None
) -> dict[str, Rotation]:
    """The fields of a stack's `Context` for rotary positions; empty for stacks without. `last` (1,) or (B, 1) are the
    last positions of the samples; None: the last of `places`."""
    made = [_rotation(*turn[:3], places, last, sequence_first=sequence_first) for turn in turns]
    return {name: rotation for (*_, names), rotation in zip(turns, made) for name in names}


def _rotation(
    rotary: Rotary, features: int, grid: Grid | None, places: Tensor, last: Tensor | None, *,
    sequence_first: bool,
) -> Rotation:  # fmt: skip
    features = rotary.turned(features)
    rates = frequencies(rotary, features if grid is None else features // 2, places.device)
    if rotary.scaling == "longrope":
        last = places.amax(-1, keepdim=True) if last is None else last
        short, long = (rates.new_tensor(factors) for factors in (rotary.short, rotary.long))
        rates = rates / torch.where(last.unsqueeze(-1) < rotary.trained, short, long)
    angles = places.unsqueeze(-1) * rates if grid is None else _axial(rates, *grid, places)  # (…, N, K/2)
    if angles.dim() == 2:
        angles = angles.unsqueeze(0)
    if sequence_first:
        angles = angles.transpose(0, 1)
    angles = angles.unsqueeze(2)  # over heads
    both = rotary.mscale and rotary.mscale_all
    longer = rotary.growth(rotary.mscale) / rotary.growth(rotary.mscale_all) if both else rotary.growth()
    if rotary.scaling == "longrope":
        longer = math.sqrt(1 + math.log(rotary.factor) / math.log(rotary.trained))
    return angles.cos() * longer, angles.sin() * longer


def _axial(rates: Tensor, first: int, side: int, places: Tensor) -> Tensor:
    """Angles of patches by row and by column, (…, N, K/2), from rates (K/4,); 0 for tokens before the first patch."""
    patches = places - first
    centres = torch.stack([patches // side, patches % side], dim=-1) * (2 / side) + (1 / side - 1)
    angles = (2 * math.pi * centres[..., None] * rates).flatten(-2)
    return angles.where((patches >= 0)[..., None], 0.0)


def frequencies(rotary: Rotary, features: int, device: torch.device) -> Tensor:
    """Radians per position of each pair of features: (K/2,), fp32, scaled as `rotary.scaling` says, if it says so for
    samples of all lengths."""
    exponents = torch.arange(0, features, 2, dtype=torch.float32, device=device) / features
    rates = torch.pow(rotary.base, -exponents)
    if rotary.scaling in ("none", "longrope"):
        return rates
    slow = rates / rotary.factor
    if rotary.scaling == "linear":
        return slow
    if rotary.scaling == "llama3":
        turns = rotary.trained * rates / (2 * math.pi)
        share = ((turns - rotary.low) / (rotary.high - rotary.low)).clamp(0, 1)
        return slow + share * (rates - slow)
    # YaRN blends by the pair's number, between the pairs that turn `high` and `low` times (its section 3.2).
    first, last = (_pair_that_turns(turns, rotary, features) for turns in (rotary.high, rotary.low))
    if rotary.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, features - 1)
    pairs = torch.arange(features // 2, dtype=torch.float32, device=device)
    share = 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return slow + share * (rates - slow)


def _pair_that_turns(turns: float, rotary: Rotary, features: int) -> float:
    """Index of the pair of features that makes `turns` rotations over the positions seen in training."""
    return features * math.log(rotary.trained / (turns * 2 * math.pi)) / (2 * math.log(rotary.base))


class Relative(nn.Embedding):
    """T5's learned biases of scores: one per head for each bucket of distances (Raffel et al., JMLR 2020, section
    2.1)."""

    def __init__(self, sizes: Stack, *, causal: bool, **where: Any) -> None:
        super().__init__(sizes.relative_buckets, sizes.heads, **where)
        self.causal, self.furthest = causal, sizes.relative_distance

    def forward(self, looking: int, seen: int) -> Tensor:  # type: ignore[override]
        """Biases of scores, (1, H, N, M)."""
        ahead = torch.arange(1 - looking, seen, device=self.weight.device)
        return _by_distance(super().forward(self._buckets(ahead)).T, looking, seen)

    def _buckets(self, ahead: Tensor) -> Tensor:
        """The table's row for each distance: half of the rows are for single distances, the rest for spans that grow
        with the distance; without a causal mask each direction has half of all rows.
        """
        count = self.num_embeddings
        behind, start = (-ahead).clamp(min=0), torch.zeros_like(ahead)
        if not self.causal:
            count //= 2
            behind, start = ahead.abs(), (ahead > 0) * count
        exact = count // 2
        spans = torch.log(behind.clamp(min=1).float() / exact) / math.log(self.furthest / exact)
        wide = (exact + spans * (count - exact)).long().clamp(max=count - 1)
        return start + torch.where(behind < exact, behind, wide)


def alibi(heads: int, looking: int, seen: int, device: torch.device) -> Tensor:
    """Biases that fall with the distance, with a different slope for each head: (1, H, N, M) in fp32 (Press et al.,
    ICLR 2022, "Train Short, Test Long", section 3).
    """
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    slopes += [2.0 ** (-4.0 * i / whole) for i in range(1, 2 * (heads - whole) + 1, 2)]
    distances = torch.arange(1 - looking, seen, device=device).abs()
    return _by_distance(-torch.tensor(slopes, device=device).outer(distances), looking, seen)


def _by_distance(values: Tensor, looking: int, seen: int) -> Tensor:
    """Values of the distances 1 − N … M − 1, (H, N + M − 1), laid out for each pair of tokens: (1, H, N, M)."""
    if torch.compiler.is_exporting():  # a window of `unfold` has one size in a program
        ahead = (
            torch.arange(seen, device=values.device) - torch.arange(looking, device=values.device)[:, None]
        )
        return values[:, ahead + looking - 1][None]
    # Rows must be contiguous, else torch on a GPU does not use its fused kernels, and computes attention in fp32.
    return values.contiguous().unfold(1, seen, 1).flip(1)[None, :, :looking]


def places_of(tokens: int, documents: Tensor | None, device: torch.device) -> Tensor:
    """Positions 0 … N − 1, (N,); or (B, N), restarting at 0 wherever the number in `documents` (B, N) changes."""
    places = torch.arange(tokens, device=device)
    if documents is None:
        return places
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - torch.where(first, places, 0).cummax(dim=1).values


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


def is_real(lengths: Tensor, tokens: int) -> Tensor:
    """Mask of the non-padding tokens, (B, N)."""
    return torch.arange(tokens, device=lengths.device) < lengths[:, None]


def within(lengths: Tensor, tokens: int) -> Tensor:
    """Mask of the non-padding tokens in the shape of scores, (B, 1, 1, N)."""
    return is_real(lengths, tokens)[:, None, None]


def biased(bias: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """A bias of scores, with −∞ where `mask`, or else a causal mask, hides a token."""
    if mask is None and causal:
        tokens = bias.shape[-1]
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=bias.device).tril()
    return bias if mask is None else bias.masked_fill(~mask, -math.inf)
