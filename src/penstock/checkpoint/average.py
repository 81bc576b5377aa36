"""The mean of the weights of several checkpoints of a run, as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.checkpoint.commit import steps
from penstock.checkpoint.reader import Checkpoint, open_verified
from penstock.checkpoint.rewrite import export_model, read_weights
from penstock.errors import ConfigError


def newest(path: Path, count: int) -> list[Checkpoint]:
    """The `count` newest checkpoints of a run, verified, oldest first.

    Raises:
        ConfigError: there are fewer. CheckpointError: one of them cannot be trusted.
    """
    folder = path if steps(path) else path / "checkpoints"
    saved_steps = steps(folder)
    if count < 2:
        raise ConfigError(f"--last is {count}, but a mean is of 2 checkpoints or more.")
    if len(saved_steps) < count:
        raise ConfigError(
            f"{path} has {len(saved_steps)} checkpoint{'' if len(saved_steps) == 1 else 's'}, but --last is {count}. "
            f"Train with --keep {count} to keep as many."
        )
    return [open_verified(folder / f"step-{step}") for step in saved_steps[-count:]]


def average(checkpoints: Sequence[Checkpoint], which: str = "weights") -> dict[str, Tensor]:
    """The mean of each weight in fp32: summed and divided in fp64, and rounded once. One set is in memory beside the
    sums, which take 8 bytes per weight. Whole numbers, such as frozen weights in few bits, are those of the last.

    (Izmailov et al., "Averaging Weights Leads to Wider Optima", UAI 2018; Vaswani et al., NeurIPS 2017, section 6.1.)

    Raises:
        ConfigError: they are not of one model, or have no such set.
    """
    sums: dict[str, Tensor] = {}
    for checkpoint in checkpoints:
        weights = read_weights(checkpoint, which)
        first = checkpoint is checkpoints[0]
        if not first and {name: tensor.shape for name, tensor in sums.items()} != {
            name: tensor.shape for name, tensor in weights.items()
        }:
            raise ConfigError(
                f"{checkpoint.path} holds another model than {checkpoints[0].path}, so they have no mean."
            )
        for name, tensor in weights.items():
            if not tensor.is_floating_point():
                sums[name] = tensor
            elif first:
                sums[name] = tensor.to(torch.float64, copy=True)
            else:
                sums[name] += tensor
    return {
        name: total.div_(len(checkpoints)).float() if total.is_floating_point() else total
        for name, total in sums.items()
    }


def export_average(path: Path, folder: Path, *, count: int, which: str = "weights") -> list[Checkpoint]:
    """Write the mean of the `count` newest checkpoints in `path` as a Hugging Face folder; returns what it is of."""
    checkpoints = newest(path, count)
    export_model(checkpoints[-1], folder, which, state=average(checkpoints, which))
    return checkpoints
