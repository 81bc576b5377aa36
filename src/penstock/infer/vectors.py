"""Vectors of texts: the mean of an encoder's features over a text's tokens, of length 1 (Reimers and Gurevych, EMNLP
2019)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from penstock.models.encoder import Encoder


class Vectors:
    """Makes vectors of token numbers with one encoder, whatever its head is."""

    def __init__(self, model: Encoder, *, most: int = 1 << 14) -> None:
        """`most` are the tokens, padding counted, that are computed at once."""
        self.model, self.most = model.eval(), most
        self.device = next(model.parameters()).device

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """One vector for each text, in the order of the texts; those of about one length are computed together."""
        found: dict[int, list[float]] = {}
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
        while order:
            longest = len(rows[order[-1]])
            count = max(1, self.most // longest)
            places, order = order[-count:], order[:-count]
            lengths = torch.tensor([len(rows[place]) for place in places], device=self.device)
            padded = [[*rows[place], *[0] * (longest - len(rows[place]))] for place in places]
            features = self.model.features(torch.tensor(padded, device=self.device), lengths).float()
            real = torch.arange(longest, device=self.device) < lengths[:, None]
            mean = (features * real[:, :, None]).sum(1) / lengths[:, None]
            found |= zip(places, F.normalize(mean, dim=1).tolist(), strict=True)
        return [found[place] for place in range(len(rows))]
