"""Measures of made images against held-out real ones, for `benchmarks/denoise_digits.py`.

| measure | what it is | real images |
|---|---|---|
| `frechet` | Fréchet distance of Gaussians fitted to a judge's features (Heusel et al., NeurIPS 2017) | small |
| `accuracy` | share that the judge, a classifier, gives the class that they were made for | its own |
| `told_apart` | accuracy of telling them from held-out images, by a classifier trained to | 0.5 |
| `density` | neighbourhoods of held-out images that one is in, over those expected | 1 |
| `coverage` | share of held-out images with one in their neighbourhood | 0.97 |
| `copied` | share nearer to a training image than 19 in 20 held-out ones are | 0.05 |
| `nearest` | median distance to the nearest training image, over that of held-out images | 1 |

`told_apart` is the two-sample score of Lopez-Paz & Oquab (ICLR 2017), of a support vector machine on pixels, over five
folds. Density and coverage are those of Naeem et al. (ICML 2020) with 5 neighbours, in the judge's features. Pixels are
(N, S·S) float64 in [-1, 1]; each feature is divided by its deviation over the training set, so that the Fréchet
distance has the same unit for every judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

Floats = NDArray[np.float64]
NEIGHBOURS = 5
FEATURES = 32
FOLDS = 5


@dataclass(frozen=True)
class Images:
    """Images (N, S·S) in [-1, 1] and their classes (N,)."""

    pixels: Floats
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: NDArray[np.int64]) -> Images:
        return Images(self.pixels[rows], self.labels[rows])


class Judge:
    """A small convolutional classifier of square images with one channel, trained on real ones."""

    def __init__(self, train: Images, *, seed: int = 0, epochs: int = 60) -> None:
        self.size = round(train.pixels.shape[1] ** 0.5)
        after = (self.size + 1) // 2
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = nn.Sequential(
                nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU(),
                nn.Flatten(), nn.Dropout(0.2), nn.Linear(64 * after * after, FEATURES), nn.ReLU(),
            )  # fmt: skip
            self.head = nn.Linear(FEATURES, int(train.labels.max()) + 1)
            self._fit(train, epochs)
        self._deviation = np.maximum(self._raw(train.pixels).std(0), 1e-6)

    def _fit(self, train: Images, epochs: int) -> None:
        parameters = [*self.body.parameters(), *self.head.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.05)
        images, labels = self._square(train.pixels), torch.from_numpy(train.labels)
        for epoch in range(epochs):
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * (1 - epoch / epochs)
            for rows in torch.randperm(len(labels)).split(64):
                loss = F.cross_entropy(self.head(self.body(images[rows])), labels[rows], label_smoothing=0.05)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        self.body.eval()

    def _square(self, pixels: Floats) -> torch.Tensor:
        return torch.from_numpy(pixels).float().view(-1, 1, self.size, self.size)

    def _raw(self, pixels: Floats) -> Floats:
        with torch.no_grad():
            return self.body(self._square(pixels)).double().numpy()  # type: ignore[no-any-return]

    def features(self, pixels: Floats) -> Floats:
        """(N, FEATURES), of deviation 1 over the training set."""
        return self._raw(pixels) / self._deviation

    def classes(self, pixels: Floats) -> NDArray[np.int64]:
        """The likeliest class of each."""
        with torch.no_grad():
            return self.head(self.body(self._square(pixels))).argmax(1).numpy()  # type: ignore[no-any-return]


def frechet(some: Floats, others: Floats) -> float:
    """|μ₁ − μ₂|² + tr(Σ₁ + Σ₂ − 2·(Σ₁Σ₂)^½) of features (N, F)."""
    first, second = np.cov(some, rowvar=False), np.cov(others, rowvar=False)
    values, vectors = np.linalg.eigh(first)
    root = vectors * np.sqrt(values.clip(min=0)) @ vectors.T
    # The eigenvalues of Σ₁Σ₂ are those of a symmetric matrix.
    product = np.linalg.eigvalsh(root @ second @ root).clip(min=0)
    apart = some.mean(0) - others.mean(0)
    return float(apart @ apart + np.trace(first) + np.trace(second) - 2 * np.sqrt(product).sum())


def told_apart(made: Floats, real: Floats, *, seed: int = 0) -> float:
    """Accuracy of a support vector machine on held-out folds of made and real images."""
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    x = np.concatenate([made, real])
    y = np.repeat([0, 1], [len(made), len(real)])
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    found = cross_val_score(make_pipeline(StandardScaler(), SVC(C=10.0)), x, y, cv=folds)
    return float(found.mean())


def distances(some: Floats, others: Floats) -> Floats:
    """Euclidean distances (N, M)."""
    squares = (some**2).sum(1)[:, None] + (others**2).sum(1) - 2 * some @ others.T
    return np.sqrt(squares.clip(min=0))  # type: ignore[no-any-return]


def density_and_coverage(made: Floats, real: Floats) -> tuple[float, float]:
    """Naeem et al., section 3, of features (N, F) and (M, F)."""
    radii = np.sort(distances(real, real), axis=1)[:, NEIGHBOURS]  # the nearest is the image itself
    inside = distances(made, real) < radii
    return float(inside.sum() / (NEIGHBOURS * len(made))), float(inside.any(0).mean())


def nearness(made: Images, train: Images, held: Images) -> dict[str, float]:
    """`copied` and `nearest`."""
    ours, usual = (distances(each.pixels, train.pixels).min(1) for each in (made, held))
    return {
        "copied": float((ours < np.quantile(usual, 0.05)).mean()),
        "nearest": float(np.median(ours) / np.median(usual)),
    }


def gaussians(train: Images, labels: NDArray[np.int64], *, seed: int) -> Images:
    """Images of these classes from a Gaussian for each class, with the mean and full covariance of its pixels."""
    chance = np.random.default_rng(seed)
    pixels = np.empty((len(labels), train.pixels.shape[1]))
    for label in np.unique(labels):
        own = train.pixels[train.labels == label]
        rows = labels == label
        drawn = chance.multivariate_normal(
            own.mean(0), np.cov(own, rowvar=False), int(rows.sum()), method="eigh"
        )
        pixels[rows] = drawn.clip(-1, 1)
    return Images(pixels, labels)


def real_again(train: Images, labels: NDArray[np.int64], *, seed: int) -> Images:
    """Training images of these classes, none of them twice: the floor of every measure but of nearness."""
    chance = np.random.default_rng(seed)
    rows = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        own = np.flatnonzero(train.labels == label)
        rows[labels == label] = chance.choice(own, int((labels == label).sum()), replace=False)
    return train.take(rows)


def judged(judge: Judge, made: Images, train: Images, held: Images, *, seed: int = 0) -> dict[str, Any]:
    """All measures of made images, as many as there are held-out ones."""
    ours, real = judge.features(made.pixels), judge.features(held.pixels)
    density, coverage = density_and_coverage(ours, real)
    return {
        "frechet": frechet(ours, real),
        "accuracy": float((judge.classes(made.pixels) == made.labels).mean()),
        "told_apart": told_apart(made.pixels, held.pixels, seed=seed),
        "density": density,
        "coverage": coverage,
        **nearness(made, train, held),
    }
