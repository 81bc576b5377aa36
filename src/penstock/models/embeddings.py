"""Stems, which map images to the vectors of their patches (Dosovitskiy et al., ICLR 2021, "An Image is Worth 16x16
Words"), and positions of tokens: tables, rotation, and biases of scores by distance.

Shapes: B samples, C channels, N patches, or tokens as queries, M tokens as keys, D width, H heads, K features per head.
`places` are the positions of tokens: (N,), or (B, N) where documents are packed into samples.

No positions are kept as a buffer, which a cast of the model to half precision would round: angles are computed again in
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


class PatchStem(nn.Module):
    """One linear map per patch (Dosovitskiy et al., ICLR 2021, eq. 1): (B, C, S, S) → (B, N, D).

    A convolution whose stride is its kernel is this matrix product, and the product is faster; the weight is
    (D, C·P·P), the convolution's kernel flattened.
    """

    def __init__(self, images: PatchInput, width: int, **where: Any) -> None:
        super().__init__()
        self.patch = images.patch_size
        self.proj = nn.Linear(images.channels * images.patch_size**2, width, bias=images.bias, **where)

    def forward(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        p = self.patch
        patches = images.view(batch, channels, height // p, p, width // p, p)
        rows = patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * p * p)
        return self.proj(rows)  # type: ignore[no-any-return]


def images_of(patches: Tensor, images: PatchInput) -> Tensor:
    """The inverse of `PatchStem`'s split of images: patches (B, N, C·P·P) to images (B, C, S, S)."""
    p, side = images.patch_size, images.image_size // images.patch_size
    pixels = patches.view(-1, side, side, images.channels, p, p)
    return pixels.permute(0, 3, 1, 4, 2, 5).reshape(-1, images.channels, side * p, side * p)


class ConvStem(nn.Module):
    """Stride-2 3×3 convolutions with batch norm and ReLU, then one linear map (Xiao et al., NeurIPS 2021,
    §4).

    There is one convolution per halving of the image, log₂(patch) in all; widths double up to D.
    """

    def __init__(self, images: PatchInput, width: int, **where: Any) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = images.channels
        for wider in images.stem_widths(width):
            layers += [
                nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False, **where),
                nn.BatchNorm2d(wider, **where),
                nn.ReLU(),
            ]
            channels = wider
        self.layers = nn.Sequential(*layers)
        self.proj = nn.Linear(channels, width, bias=images.bias, **where)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.layers(images).flatten(2)  # (B, C', N)
        # Contiguous, so that the product is one matrix product of all rows and its bias is added inside.
        return self.proj(maps.transpose(1, 2).contiguous())  # type: ignore[no-any-return]


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
    """Radians per position of each pair of features: (K/2,), fp32, scaled as `rotary.scaling` says; not for `longrope`,
    which depends on the samples' lengths."""
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
