"""Applying op lists to calls: casts, and the mode that intercepts functions torch.autocast treats differently."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from penstock.containers import replaced, tensors
from penstock.dtypes import HALVES
from penstock.errors import ConfigError
from penstock.precision.lists.op_lists import CASTABLE, OpLists, intercepted, register

# The devices whose tensors op lists cast. Tensors in fp64 and fp8 are left as the model made them.
_DEVICES = ("cpu", "cuda")

# Note: checkpoints and compilation. torch's activation checkpointing runs a module's forward a second time inside the
# backward pass, where it restores autocast's state but no function mode. So `apply_modules` makes every module with
# children enter the region if it is not active. Inside compiled code a checkpoint is a graph of its own that runs
# without modes, and where none may be entered: there we break the graph before it, or, with fullgraph=True, end with
# the message below.
_CHECKPOINT = (
    "activation checkpointing inside compiled code cannot follow op lists that differ from torch.autocast's. Compile "
    "the modules inside the checkpoint instead (plan.compile=blocks), or compile without fullgraph, or use the default "
    "op lists."
)


@torch.compiler.disable(reason=_CHECKPOINT)  # type: ignore[untyped-decorator, no-untyped-call]
def _break_graph() -> None:
    """Ends the graph that torch.compile is recording."""


def region(lists: OpLists | None, device_type: str, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Context in which operations on `device_type` follow `lists`, with `dtype` as the half type; to be entered inside
    torch.autocast.

    If nothing differs from torch.autocast's own choices, or `lists` is None, the context does nothing. It is inert
    wherever autocast is off. Entering it again in a nested module changes nothing.

    Raises:
        ConfigError: it is entered inside a region with other lists.
    """
    if lists is None:
        return nullcontext()
    if (device_type, dtype) not in lists.modes:
        prepare(lists, (device_type, *_DEVICES), (dtype, *HALVES))
    mode = lists.modes[device_type, dtype]
    if mode is None:
        return nullcontext()
    for other in _active.modes:
        if other is mode:
            return nullcontext()
        if other.device_type == device_type:
            raise ConfigError(
                "A model with op lists of its own runs inside another one that has others, so an operation would "
                "follow both. Give both the same OpLists object and dtype, or accelerate only the outer one."
            )
    return mode  # type: ignore[no-any-return]


def prepare(
    lists: OpLists, devices: tuple[str, ...] = _DEVICES, dtypes: tuple[torch.dtype, ...] = tuple(HALVES)
) -> None:
    """Create the modes that `region` enters, before compilation, inside which that is impossible."""
    if "cpu" in devices:
        register()
    for device_type in devices:
        rules = intercepted(lists, device_type)
        for dtype in dtypes:
            if (device_type, dtype) not in lists.modes:
                mode = ListMode(lists, rules, device_type, dtype) if rules else None
                lists.modes[device_type, dtype] = mode


class ListMode(TorchFunctionMode):
    """Casts the arguments of the functions in `rules`; all other functions are unchanged.

    A torch function written in Python is treated as a whole: the calls inside, say,
    torch.nn.functional.multi_head_attention_forward follow torch.autocast.
    """

    def __init__(self, lists: OpLists, rules: dict[Any, Any], device_type: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.rules = rules
        self.messages = dict(lists.banned)
        self.device_type = device_type
        self.dtype = dtype

    def __enter__(self) -> ListMode:
        _active.modes.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _active.modes.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is checkpoint:  # seen in compiled code only: see the note above
            _break_graph()
        rule = self.rules.get(func)
        if rule is None or not torch.is_autocast_enabled(self.device_type):
            return func(*args, **kwargs)
        policy, name = rule
        if kwargs.get("dtype") is not None or kwargs.get("out") is not None:
            return func(*args, **kwargs)  # the caller has said which type
        if policy == "banned":
            if any(t.dtype != torch.float32 for t in castable((args, kwargs), self.device_type)):
                raise ConfigError(self.messages[name])
            return func(*args, **kwargs)
        to = chosen_type(policy, (args, kwargs), self.device_type, self.dtype)
        if to is None:
            return func(*args, **kwargs)
        with torch.autocast(self.device_type, enabled=False):
            return func(*cast(args, to, self.device_type), **cast(kwargs, to, self.device_type))


class _Active(threading.local):
    """The modes that this thread has entered; torch's own stack of modes is per thread, too."""

    def __init__(self) -> None:
        self.modes: list[ListMode] = []


_active = _Active()


def chosen_type(policy: str, values: Any, device_type: str, half: torch.dtype) -> torch.dtype | None:
    """The type in which an operation on `values` runs by its list: fp32, the half type, the widest tensor's (`promote`)
    or the first tensor's (`keep`); None if there is none.
    """
    if policy in ("fp32", "half"):
        return half if policy == "half" else torch.float32
    dtypes = [tensor.dtype for tensor in castable(values, device_type)]
    if not dtypes:
        return None
    # fp16 has more precision and bf16 more range, so the type that holds both is fp32.
    return dtypes[0] if policy == "keep" or len(set(dtypes)) == 1 else torch.float32


def castable(values: Any, device_type: str) -> Iterator[Tensor]:
    """The tensors of a nested structure that autocast would cast."""
    for tensor in tensors(values):
        if tensor.device.type == device_type and tensor.dtype in CASTABLE:
            yield tensor


def cast(values: Any, dtype: torch.dtype, device_type: str) -> Any:
    """A nested structure with its castable tensors in another type; container types do not change."""

    def change(tensor: Tensor) -> Tensor:
        castable_here = tensor.device.type == device_type and tensor.dtype in CASTABLE
        return tensor.to(dtype) if castable_here else tensor

    return replaced(values, change)


def device_type_of(values: Any) -> str | None:
    """The device of the first floating tensor of a nested structure."""
    return next((tensor.device.type for tensor in tensors(values) if tensor.is_floating_point()), None)
