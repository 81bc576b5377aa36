"""Custom transforms: a user's function, applied to each batch on its device after augmentation."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError

Transform = Callable[..., tuple[Tensor, Tensor]]
"""`transform(images, targets, training=…)` of a batch returns both again, on the same device.

images (B, C, H, W) float32 in [-1, 1]; targets (B,) int64 or (B, classes) float32; `training` is false in evaluation.
"""


def load_function(path: str, what: str) -> Callable[..., Any]:
    """The function at `package.module:name`, looked for in the working directory too. Raises ConfigError."""
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"The module {module_name} of the {what} {path} cannot be imported: {error}. Run from the folder that "
            f"holds it, or install it."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"The module {module_name} has no function {name!r}; write the {what} as package.module:function."
        )
    return function  # type: ignore[no-any-return]


def per_sample(function: Callable[..., tuple[Tensor, Tensor]]) -> Transform:
    """A transform of batches from a `function(image, target, training=…)` of samples, image (C, H, W)."""

    @functools.wraps(function)
    def transform(images: Tensor, targets: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
        done = [function(image, target, training=training) for image, target in zip(images, targets)]
        return torch.stack([image for image, _ in done]), torch.stack([target for _, target in done])

    return transform


def apply(transform: Transform, images: Tensor, targets: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
    """The batch that `transform` returns. Raises ConfigError unless it has the same number of samples."""
    changed = transform(images, targets, training=training)
    is_pair = isinstance(changed, tuple) and len(changed) == 2 and all(isinstance(x, Tensor) for x in changed)
    if not is_pair or len(changed[0]) != len(images) or len(changed[1]) != len(images):
        returned = [list(part.shape) for part in changed] if is_pair else type(changed).__name__
        raise ConfigError(
            f"data.transform was given {len(images)} images and their targets and must return the same number of "
            f"both, as two tensors, but returned {returned}."
        )
    return changed
