"""Initialises a model that fits into no process: weights are drawn whole, one by one, and each rank keeps its rows.

Inside `Drawing`, torch's empty tensors have no memory (they are on the meta device). Every operation on such a tensor,
through views or `.data` too, is done on a real tensor of its size; when the next tensor replaces that, the rank keeps
its share of the rows. Random numbers come from the same generator, for the same sizes and in the same order. So the
weights are those of a single process with the same seed, for every model, however it initialises itself.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.containers import replaced, tensors
from penstock.errors import ConfigError
from penstock.parallel.dims import SHARD, ParallelDims

M = TypeVar("M", bound=nn.Module)
_SMALL = 4096
"""Tensors of at most this many elements get memory at once."""
_ROOM = 32 << 20
"""Bytes of whole tensors that may be held besides the current one."""
_ALLOCATES = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})
_OVERWRITES = frozenset(
    {"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "trunc_normal_"}
)


@dataclass(slots=True)
class _Tensor:
    """One allocation without memory."""

    shape: torch.Size
    dtype: torch.dtype
    rows: Tensor | None = None
    """This rank's share of the values so far."""


class Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside this context large empty tensors have no memory; this rank's share of values written to them is kept.

    It is the share of rank `place` of `group.size()`: rows split as by `torch.chunk`, as in FSDP. All ranks must do the
    same.
    """

    def __init__(self, place: int, size: int, group: distributed.ProcessGroup | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place, self._size, self._group = place, size, group
        self._looks = _Looks(self)
        self._tensors: dict[torch.UntypedStorage | None, _Tensor] = {}
        self._whole: OrderedDict[torch.UntypedStorage | None, Tensor] = OrderedDict()

    def __enter__(self) -> Drawing:
        self._looks.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)  # type: ignore[no-untyped-call]
        self._looks.__exit__(*problem)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _ALLOCATES and self._on_host(args, kwargs):
            allocated = func(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": False})
            if allocated.numel() < _SMALL:
                return func(*args, **{**kwargs, "device": torch.device("cpu")})
            self._tensors[_key(allocated)] = _Tensor(allocated.shape, allocated.dtype)
            return allocated
        touched = [tensor for tensor in tensors((args, kwargs)) if self.knows(tensor)]
        if not touched or func.is_view or torch.Tag.inplace_view in func.tags or name == "detach":
            return func(*args, **kwargs)
        overwritten = args[0] if name in _OVERWRITES and args and self._covers(args[0]) else None
        for tensor in touched:
            self._fetch(tensor, fresh=overwritten is not None and _key(tensor) == _key(overwritten))
        real_args, real_kwargs = replaced((args, kwargs), self._real)
        result = func(*real_args, **real_kwargs)
        # An in-place operator returns its argument, not the real tensor.
        written = args[0] if name.endswith("_") else kwargs.get("out")
        return written if isinstance(written, Tensor) and isinstance(result, Tensor) else result

    def knows(self, tensor: Tensor) -> bool:
        return _key(tensor) in self._tensors

    def _on_host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an allocation is on the host, by its device or the device of the tensor that it copies."""
        device = kwargs.get("device")
        if device is None and args and isinstance(args[0], Tensor):
            device = torch.device("cpu") if self.knows(args[0]) else args[0].device
        return device is None or torch.device(device).type == "cpu"

    def _covers(self, tensor: Any) -> bool:
        return (
            isinstance(tensor, Tensor)
            and self.knows(tensor)
            and tensor.numel() == self._tensors[_key(tensor)].shape.numel()
        )

    def _fetch(self, tensor: Tensor, *, fresh: bool) -> None:
        key = _key(tensor)
        if key in self._whole:
            self._whole.move_to_end(key)
            return
        record = self._tensors[key]
        spare = self._make_room(record.shape.numel() * record.dtype.itemsize)
        if record.rows is None or fresh:
            if spare is None or spare.shape != record.shape or spare.dtype != record.dtype:
                spare = torch.empty(record.shape, dtype=record.dtype)
            self._whole[key] = spare
        else:
            self._whole[key] = self._gathered(record)

    def _real(self, tensor: Tensor) -> Tensor:
        if not self.knows(tensor):
            return tensor
        whole = self._whole[_key(tensor)]
        return whole.view(-1).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _make_room(self, needed: int) -> Tensor | None:
        """Reduce whole tensors to their shares; returns the last one for reuse: if freed, it would leave a hole that
        later rows fragment, and a host's memory would grow by a whole tensor each time.
        """
        spare: Tensor | None = None
        held_bytes = needed + sum(t.numel() * t.element_size() for t in self._whole.values())
        while self._whole and held_bytes > max(_ROOM, needed):
            key, spare = self._whole.popitem(last=False)
            held_bytes -= spare.numel() * spare.element_size()
            self._keep(key, spare)
        return spare

    def _keep(self, key: torch.UntypedStorage | None, whole: Tensor) -> None:
        record = self._tensors[key]
        share = _rows(whole, self._place, self._size)
        if record.rows is not None and record.rows.shape == share.shape:
            record.rows.copy_(share)
        else:
            record.rows = share.clone()

    def _gathered(self, record: _Tensor) -> Tensor:
        """The whole tensor from all ranks' rows: it had been reduced to shares, and is now changed again."""
        assert record.rows is not None
        if self._size == 1:
            return record.rows
        longest = -(-record.shape[0] // self._size)
        own_rows = record.rows.new_zeros((longest, *record.shape[1:]))
        own_rows[: len(record.rows)] = record.rows
        parts = [torch.empty_like(own_rows) for _ in range(self._size)]
        distributed.all_gather(parts, own_rows, group=self._group)
        return torch.cat(parts)[: record.shape[0]].contiguous()

    # -- afterwards

    def finish(self) -> None:
        """Keep the rows of tensors that are still whole."""
        while self._whole:
            self._keep(*self._whole.popitem(last=False))

    def rows_of(self, parameter: Tensor) -> Tensor | None:
        """This rank's rows of a tensor allocated inside; None for tensors allocated outside, or with memory."""
        if not self.knows(parameter):
            return None
        record = self._tensors[_key(parameter)]
        if record.rows is None:
            # Allocated and never written: torch.empty guarantees no values, and neither does this.
            zeros = torch.zeros(1, dtype=record.dtype).expand(record.shape)
            record.rows = _rows(zeros, self._place, self._size).clone()
        if record.shape == parameter.shape:
            return record.rows
        return _rows(self._gathered(record).view(parameter.shape), self._place, self._size)


class _Looks(TorchFunctionMode):
    """Makes a tensor without memory look like one with memory: torch's and other initialisers skip meta tensors."""

    def __init__(self, drawing: Drawing) -> None:
        super().__init__()
        self._drawing = weakref.ref(drawing)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        attribute = getattr(func, "__self__", None)  # a property's: its __get__ is a new object each time
        if attribute is Tensor.is_meta or attribute is Tensor.device:
            drawing = self._drawing()
            if drawing is not None and drawing.knows(args[0]):
                return False if attribute is Tensor.is_meta else torch.device("cpu")
        return result


def _rows(whole: Tensor, place: int, size: int) -> Tensor:
    """The rows at `place` in `torch.chunk(whole, size)`; none if there are too few."""
    if whole.ndim == 0:
        return whole
    length = -(-whole.shape[0] // size)
    start = min(place * length, whole.shape[0])
    return whole[start : min(start + length, whole.shape[0])]


def _key(tensor: Tensor) -> torch.UntypedStorage | None:
    # None for sparse tensors and the like, which have no storage.
    return tensor.untyped_storage() if tensor.layout == torch.strided else None


def make(factory: Callable[[], M], drawing: Drawing) -> M:
    """`factory()`, with its large parameters without memory. Raises ConfigError if a buffer has no memory: buffers are
    not sharded, so they must be small or filled by an operator that allocates its own result.
    """
    with drawing:
        model = factory()
        drawing.finish()
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise ConfigError(
            f"The buffer {empty[0]} of {type(model).__name__} was made with torch.empty and is too large to be drawn "
            "at once; make it with torch.zeros, or hand in the finished module instead of its factory."
        )
    return model


def shares(model: nn.Module, drawing: Drawing) -> Iterator[tuple[str, Tensor]]:
    """Name and rows of every parameter that was allocated without memory. Call it before the model is sharded."""
    for name, parameter in model.named_parameters():
        rows = drawing.rows_of(parameter)
        if rows is not None:
            yield name, rows


def drawing_of(dims: ParallelDims) -> Drawing:
    """The `Drawing` of this rank's share, over the group that shards weights with it."""
    place = dims.place()
    return Drawing(
        place["dp_shard"] * dims.cp + place["cp"], dims.degree(*SHARD), dims.shard_mesh().get_group()
    )


def made_in_rows(factory: Callable[[], M], dims: ParallelDims) -> tuple[M, dict[str, Tensor]]:
    """The model of a factory, with large parameters without memory, and this rank's rows of them by name."""
    drawing = drawing_of(dims)
    model = make(factory, drawing)
    return model, dict(shares(model, drawing))


def move_present(model: nn.Module, device: torch.device) -> None:
    """Move all tensors with memory to a device, in place; `Module.to` would require the rest too."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if not buffer.is_meta:
                setattr(module, name, buffer.to(device))
