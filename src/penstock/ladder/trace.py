"""The operations of any model, recorded during one forward and backward pass, as the roofline needs them.

Matrix products are recognised by torch's own FLOP formulas (`torch.utils.flop_counter`); everything else counts as
memory traffic. Views cost nothing and are left out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from penstock.config.fused import FUSED_FORM
from penstock.config.plan import Plan
from penstock.containers import tensors
from penstock.errors import ConfigError
from penstock.kernels.linear_cross_entropy import in_chunks
from penstock.models.anatomy import anatomy_of, set_switch
from penstock.models.roles import Experts
from penstock.planner.operators import Module, Op, OpKind, Workload
from penstock.planner.traced import recorded

_KINDS: tuple[tuple[str, OpKind], ...] = (
    ("norm", "norm"), ("softmax", "softmax"),
    ("bernoulli", "torch_dropout"),
    ("clone", "copy"), ("copy", "copy"), ("cat", "copy"),
    ("sum", "reduce"), ("mean", "reduce"),
)  # fmt: skip


SAFE_SOFTMAX_KERNELS, SAFE_SOFTMAX_READ, SAFE_SOFTMAX_WRITTEN = 4, 4 + 1 + 4, 1 + 4
"""Kernels of torch's softmax when masks may hide whole rows, and bytes per score that it moves in addition to a plain
softmax: scores are compared with −∞, one byte each, each row is reduced to one such byte, and rows are selected by it
(`_safe_softmax` in torch's SoftMax.cpp)."""
_COMPUTING = ("norm", "activation")
"""Kinds whose first output has the number of computed elements; further outputs are only bookkeeping."""
_LOSSES = ("log_softmax", "nll_loss")
"""Parts of the names of operations that compute a loss from logits."""
_FUSED = ("add_norm", "bias_activation")
"""Prefixes of the names of kernels that `Plan.fuse` selects."""
_ALLOCATING = ("empty", "new_empty")
_LOOKING_UP = ("embedding", "index_select", "gather", "index")


def trace(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor], samples: int, *, units: int = 1
) -> Workload:
    """Run `loss(model, batch)` and its backward once, unchanged, and return the work that they did.

    `units` is the number of repeated blocks, which are gathered one by one if weights are sharded.

    Gradients of the run are cleared. Raises whatever the model raises.
    """
    recorder, saved = _Recorder(model, batch), _SavedBytes(model)
    with recorder:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            value = loss(model, batch)
        saved.release()
        recorder.forward = False
        value.backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return recorded(
        recorder.operators, samples=samples, parameters=sum(parameter.numel() for parameter in trained),
        tensors=len(trained), kept=saved.bytes, working=max(0, recorder.peak - saved.bytes), units=units,
    )  # fmt: skip


def number_of_blocks(model: nn.Module) -> int:
    """Number of repeated blocks, which are gathered one by one if weights are sharded; 1 if none are found."""
    try:
        return len(anatomy_of(model).blocks)
    except ConfigError:
        return 1


def supported_switches(
    model: nn.Module, switches: Mapping[str, Sequence[str]], *, attention: bool
) -> dict[str, tuple[str, ...]]:
    """The values in `switches`, by field of the Plan, that a model supports; afterwards each has its default again.
    For attention there are none unless `attention` says that the model calls torch's."""

    def supports(name: str, value: str) -> bool:
        try:
            set_switch(model, name, value)
            set_switch(model, name, getattr(Plan(), name))
        except ConfigError:
            return False
        return True

    return {
        name: tuple(value for value in values if (attention or name != "attention") and supports(name, value))
        for name, values in switches.items()
    }


class _SavedBytes:
    """Counts the bytes that autograd saves for backward, each storage once, without weights."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes = 0
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._alive: list[Tensor] = []
        """The saved tensors, kept alive so that no address is reused while counting."""

    def release(self) -> None:
        """Release saved tensors once all are counted: backward frees them as it goes."""
        self._alive.clear()

    def pack(self, saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._alive.append(saved.detach())
            self.bytes += storage.nbytes()
        return saved


class TensorMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that operators return while it is active, each once, until it is freed.

    Existing tensors in `held` count too; those in `ignored`, such as the caller's batch, never do. Temporary memory
    inside an operator is not counted. The process's growth would say little about a small model, because allocators
    keep memory, libraries cache, and pages are shared.
    """

    def __init__(self, held: Iterable[Tensor] = (), ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        for tensor in ignored:
            self._known.add(tensor.untyped_storage())
        for tensor in held:
            self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.bytes -= size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors(out):
            self._add(tensor)
        return out


class _Recorder(TensorMemory):
    """Records every operation that computes or copies, and counts the memory of its results."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        super().__init__(ignored=[*model.parameters(), *model.buffers(), *tensors(batch)])
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._linears = _sizes_of_linears(model)
        self.operators: list[Op] = []
        self.forward = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.penstock.linear_cross_entropy.default:
            with self, _Parts():  # type: ignore[no-untyped-call]  # one operator, but several products
                return in_chunks(*args, **(kwargs or {}))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        read = list(tensors((args, kwargs)))
        written = list(tensors(out))
        computes = any(tensor.numel() for tensor in written)  # a product without rows only shows a type
        if func.overloadpacket.__name__.startswith(_ALLOCATING):
            return out
        if read and computes and not (_is_view(read, written) and not _in_place(func, kwargs)):
            self.operators.append(self._op(func, args, kwargs or {}, out, read, written))
        return out

    def _op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, read: list[Tensor],
        written: list[Tensor],
    ) -> Op:  # fmt: skip
        name = func.overloadpacket.__name__
        kind, (batch, m, n, k) = _product(func, name, args, kwargs, out)
        function = _function(name, args, kwargs)
        kind = "activation" if function else kind
        count = sum(tensor.numel() for tensor in written)
        # Only the looked-up rows of a table are read.
        once = {id(tensor): tensor.numel() for tensor in read}
        reads = count if name in _LOOKING_UP else sum(once.values())
        # In backward, a product that reads no weight computes a weight's gradient.
        learns = kind == "gemm" and not self.forward
        learns = learns and not any(tensor.untyped_storage().data_ptr() in self._weights for tensor in read)
        safe = name == "_safe_softmax"
        sides = (m, n) if learns else (n, k)
        module: Module = "attention" if kind in ("bmm", "attention") else ""
        module = "loss" if any(part in name for part in _LOSSES) else module
        return Op(
            name, kind, self.forward, batch, m, n, k,
            4.0 * reads + SAFE_SOFTMAX_READ * count * safe, 4.0 * count + SAFE_SOFTMAX_WRITTEN * count * safe,
            batch * m * k if kind == "attention" else written[0].numel() if kind in _COMPUTING else count,
            weights=m * n if learns else 0, narrow=kind == "gemm" and frozenset(sides) in self._linears,
            module=module, in_place=_in_place(func, kwargs), launches=SAFE_SOFTMAX_KERNELS if safe else 1,
            row=_row(name, args, written[0]) if kind == "softmax" else 0, function=function,
            fused=name.startswith(_FUSED),
        )  # fmt: skip


def _row(name: str, args: tuple[Any, ...], result: Tensor) -> int:
    """Elements per row of a softmax or its gradient; 0 if the call does not name the dimension."""
    place = 2 if "backward" in name else 1  # backward takes the gradient and the output first
    return result.shape[args[place]] if len(args) > place and result.dim() else 0


def _function(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The activation function of an operation, forward or backward; "" for other operations."""
    if name.startswith("bias_activation"):
        return FUSED_FORM + next(arg for arg in args if isinstance(arg, str))
    base = name.rstrip("_").removesuffix("_backward")
    if base == "gelu":
        return "gelu_tanh" if kwargs.get("approximate") == "tanh" else "gelu"
    return "relu" if base == "threshold" else base if base in ("silu", "relu", "tanh", "sigmoid") else ""


class _Parts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Decomposes composite operators such as `linear`, since autograd does not when an operator calls them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self:
            parts = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if parts is NotImplemented else parts


def _in_place(func: Any, kwargs: dict[str, Any] | None) -> bool:
    """Whether an operation writes to one of its arguments."""
    return func.overloadpacket.__name__.endswith("_") or "out" in (kwargs or {})


def _sizes_of_linears(model: nn.Module) -> set[frozenset[int]]:
    """Input and output sizes of the weights that are multiplied in 8 bits: linears of blocks except routers. Empty for
    a model whose blocks are not known."""
    try:
        anatomy = anatomy_of(model)
    except ConfigError:
        return set()
    routers = set() if anatomy.unknown else {e.router.name for e in anatomy.parts(Experts) if e.router}
    return {
        frozenset(linear.weight.shape)
        for block in anatomy.blocks
        for name, linear in model.get_submodule(block).named_modules(prefix=block)
        if isinstance(linear, nn.Linear) and name not in routers
    }


def _is_view(read: list[Tensor], written: list[Tensor]) -> bool:
    """Whether the result shares its memory with an argument."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in read}
    return all(tensor.untyped_storage().data_ptr() in addresses for tensor in written)


def _product(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[OpKind, tuple[int, int, int, int]]:
    """The kind of an operation, and (batch, m, n, k) if it is a matrix product."""
    if "scaled_dot_product" in name:
        first = 1 if "backward" in name else 0  # backward takes the gradient of the output before q, k, v
        q, k = args[first], args[first + 1]
        return "attention", (q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3])
    formula = flop_registry.get(torch.ops.aten.addmm if name == "addmm_" else func.overloadpacket)
    if formula is None:
        return next((kind for part, kind in _KINDS if part in name), "pointwise"), (1, 0, 0, 0)
    flops = int(formula(*args, **kwargs, out_val=out))
    result = next(tensors(out)) if "backward" not in name else args[0]
    if "bmm" in name:
        batch, m, n = result.shape
        return "bmm", (batch, m, n, flops // max(2 * batch * m * n, 1))
    if "convolution" in name:
        m, n = result.numel() // result.shape[1], result.shape[1]
        return "conv", (1, m, n, flops // max(2 * m * n, 1))
    m, n = result.shape[0], result.numel() // max(result.shape[0], 1)
    return "gemm", (1, m, n, flops // max(2 * m * n, 1))
