"""The precision of fp32 matrix products: a global switch of torch, set only for the duration of a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from penstock.config.plan import Matmul


@contextmanager
def matmul_precision(setting: Matmul) -> Iterator[None]:
    """Inside, fp32 products have the given precision; afterwards the former one is restored, even after an error.

    `highest` means fp32 everywhere, so it also turns off the TF32 that cuDNN uses for convolutions by default: else a
    baseline would be faster than its name says. `high` and `medium` allow it.
    """
    before = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    # torch also stores the choice per library, and setting the word does not restore a library's initial "none".
    libraries: tuple[Any, ...] = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    choices = [getattr(library, "fp32_precision", None) for library in libraries]
    torch.set_float32_matmul_precision(setting)
    torch.backends.cudnn.allow_tf32 = setting != "highest"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions
        for library, choice in zip(libraries, choices):
            if choice is not None:
                library.fp32_precision = choice
