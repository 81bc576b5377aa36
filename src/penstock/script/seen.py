"""The types in which a forward pass was computed, as the autograd graph shows them that it has left."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.dtypes import HALVES
from penstock.script.backward import nodes_behind

_PRODUCTS = re.compile(
    r"(Mm|Addmm|Bmm|Baddbmm|Addbmm|Mv|Addmv|Dot|GroupedMm|\w*Linear|Convolution\w*|ScaledDotProduct\w*|MkldnnRnn\w*"
    r"|CudnnRnn\w*|ThnnFused\w*)Backward\d*"
)
_COMPILED = "CompiledFunctionBackward"


@dataclass(slots=True)
class Seen:
    """Matrix products and compiled graphs behind some backward passes, by their narrowest type."""

    products: Counter[torch.dtype] = field(default_factory=Counter)
    compiled: Counter[torch.dtype] = field(default_factory=Counter)

    def add(self, root: Any) -> set[int]:
        """Look at what is behind the root of a backward pass; returns the ids of the tensors that get a gradient."""
        leaves = set()
        for node in nodes_behind([root.grad_fn if isinstance(root, Tensor) else root.node]):
            name = node.name()
            dtypes = [output.dtype for output in node._input_metadata]
            if (leaf := getattr(node, "variable", None)) is not None:
                leaves.add(id(leaf))
            elif name == _COMPILED:
                with contextlib.suppress(RuntimeError):  # they are freed, and torch will say so
                    dtypes += [tensor.dtype for tensor in node.saved_tensors if tensor is not None]
                self.compiled[_narrowest(dtypes)] += 1
            elif _PRODUCTS.fullmatch(name):
                self.products[_narrowest(dtypes)] += 1
        return leaves

    @property
    def all_wide(self) -> bool:
        """Whether nothing of what was seen was in half precision."""
        everything = {*self.products, *self.compiled}
        return bool(everything) and everything.isdisjoint(HALVES)

    def words(self) -> str:
        """Counts in words, such as "12 of 13 matrix products in bf16"; empty where nothing was seen."""
        parts = []
        for counts, noun in ((self.products, "matrix product"), (self.compiled, "compiled graph")):
            total = counts.total()
            nouns = f"{total:,} {noun}{'s' * (total > 1)}"
            half = [
                f"{counts[dtype]:,} of {nouns} in {name}" for dtype, name in HALVES.items() if counts[dtype]
            ]
            parts += half or [f"{nouns} in fp32"] * bool(total)
        return " and ".join(parts)


def _narrowest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    return min(floats, key=lambda dtype: dtype.itemsize, default=torch.float32)
