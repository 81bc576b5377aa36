"""Which operator ran in which type, in which layer, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from penstock.precision.follower import Follower, tensors_of

Phase = Literal["forward", "backward"]

_NAMES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8",
}  # fmt: skip
_CASTS = ("_to_copy", "to_copy")
# Names for the same data, which compute nothing and have no precision.
_NOTHING = (
    "detach", "alias", "lift_fresh", "empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """How often an operator of PyTorch (`addmm`, `native_layer_norm`; `cast` for a change of type) ran in a layer."""

    name: str
    dtype: str
    """Types of its floating arguments: `fp16`, or `fp16+fp32`; `fp16→fp32` where the result has another."""
    layer: str
    """Innermost module, by its qualified name; empty for what ran outside the model: the loss."""
    forward: int
    backward: int
    """What checkpointing computes again in the backward pass counts there."""


class _Owners(Follower):
    """Knows the owner of the node whose backward pass is under way."""

    present = ""

    def found(self, node: Node, layer: str) -> RemovableHandle:
        def hook(gradients: Any) -> None:
            self.present = layer

        return node.register_prehook(hook)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every operator that computes with floating numbers, below autocast and autograd, while active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[tuple[str, str, str, Phase]] = Counter()
        self.phase: Phase = "forward"
        self._owners = _Owners()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._count(func, (*args, *(kwargs or {}).values()), result)
        return result

    def _count(self, func: Any, arguments: tuple[Any, ...], result: Any) -> None:
        name = func.overloadpacket.__name__
        if func.is_view or name.removesuffix("_") in _NOTHING or name in _NOTHING:
            return
        given = list(dict.fromkeys(_NAMES.get(t.dtype, str(t.dtype)) for t in tensors_of(arguments)))
        made = [_NAMES.get(t.dtype, str(t.dtype)) for t in tensors_of(result)]
        if not given and not made:
            return
        dtype = "+".join(sorted(given)) or made[0]
        if given and made and made[0] not in given:
            dtype = f"{dtype}→{made[0]}"
        if name in _CASTS:
            if "→" not in dtype:
                return  # a copy, or a move to another device
            name = "cast"
        if self._owners.running:  # in the backward pass too: what checkpointing computes again
            layer = self._owners.running[-1]
        else:
            layer = self._owners.present if self.phase == "backward" else ""
        self.counts[(name, dtype, layer, self.phase)] += 1

    @contextmanager
    def attributing(self, model: nn.Module) -> Iterator[None]:
        """Inside, operators are counted for the module that runs them, or whose backward pass they belong to."""
        self._owners.follow([model])
        try:
            yield
        finally:
            self._owners.let_go()

    def turn_back(self, loss: Tensor) -> None:
        """The forward pass is over: what no module made of the graph of `loss` is the loss's own."""
        self._owners.own([loss], "")
        self.phase = "backward"

    def operations(self) -> tuple[Operation, ...]:
        """What was counted, in the order in which each first ran."""
        merged: dict[tuple[str, str, str], Counter[Phase]] = {}
        for (name, dtype, layer, phase), count in self.counts.items():
            merged.setdefault((name, dtype, layer), Counter())[phase] += count
        return tuple(
            Operation(
                name=name, dtype=dtype, layer=layer, forward=counts["forward"], backward=counts["backward"]
            )
            for (name, dtype, layer), counts in merged.items()
        )
