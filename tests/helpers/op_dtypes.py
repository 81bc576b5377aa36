"""Which types the matrix products and convolutions of a block of code ran in."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_rnn_layer", "linear")


class ProductDtypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, counts the floating types that products give."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") in PRODUCTS:
            first = out[0] if isinstance(out, tuple | list) else out
            self.counts[first.dtype] += 1
        return out
