"""Flat buffers: many parameters stored end to end in one tensor, and their gradients in another.

A bucket holds the parameters of one group that share dtype and device. Each parameter's data becomes a view of
`values`; its gradient, as soon as autograd has accumulated it, a view of `gradients`. Buckets are split into segments,
runs of parameters with equal step counters: normally one. A segment's `leaf` is the tensor that the inner optimizer
updates.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from penstock.optim.tensors import dense, local, place, room, sharing, whole

_ALIGN_BYTES = 256
"""Alignment of each parameter's start, for vector loads and GEMM kernels. Gaps stay zero: a zero weight with zero
gradients is a fixed point of every elementwise optimizer."""


@dataclass(eq=False)
class Segment:
    """Parameters `start` up to `stop` of a bucket, as one leaf tensor."""

    start: int
    stop: int
    leaf: Parameter
    gradient: Tensor
    exposed: tuple[int, ...] = field(default=())
    """Identities of the state values that were last exposed as views per parameter."""


class Bucket:
    """The parameters of one group that share dtype and device, flattened. Shapes, strides and values are kept."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        first = parameters[0]
        align = max(_ALIGN_BYTES // first.element_size(), 1)
        self.parameters = list(parameters)
        self.offsets: list[int] = [0]
        for parameter in parameters:
            self.offsets.append(self.offsets[-1] + -(-room(parameter) // align) * align)
        own = [local(parameter) for parameter in parameters]
        self.shapes = [part.shape for part in own]
        self.values = torch.zeros(self.offsets[-1], dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.values)
        # Views have no gaps: they keep a dense parameter's own strides (such as channels_last), else are contiguous.
        dense_parts = (p if dense(p) else torch.empty(p.shape, device="meta") for p in own)
        self.strides = [part.stride() for part in dense_parts]
        self.gradient_views = self.views(self.gradients, 0, len(parameters))
        self.exposed_gradients = [whole(p, view) for p, view in zip(parameters, self.gradient_views)]
        """The same views in the form of each parameter's gradient: sharded if the parameter is."""
        self.segments: list[Segment] = []
        self._handles: list[RemovableHandle] = []
        with torch.no_grad():
            for index, view in enumerate(self.views(self.values, 0, len(parameters))):
                view.copy_(own[index])
                start = self.offsets[index]
                place(parameters[index], view, self.values[start : start + room(parameters[index])])
        self.addresses = [local(parameter).data_ptr() for parameter in parameters]
        self._keep_gradients()

    def _keep_gradients(self) -> None:
        """Move gradients into the buffer as autograd finishes them.

        Autograd gives a parameter without a gradient a fresh tensor, and adds to an existing gradient in place. So only
        the first accumulation after `zero_grad(set_to_none=True)` is moved, while it is still in cache; no zeroing pass
        is needed, and the gradient of an unused parameter stays None.
        """
        # A hook may outlive its optimizer, and must then do nothing and not keep the buffer alive.
        me = weakref.ref(self)
        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
                self._handles.append(register(_adopter(me, index)))

    def release(self) -> None:
        """Stop moving gradients: another bucket takes over."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def adopt_gradient(self, index: int) -> bool:
        """Move the gradient of parameter `index` into the buffer, if it is elsewhere; return whether it has one."""
        parameter, view = self.parameters[index], self.gradient_views[index]
        exposed = self.exposed_gradients[index]
        if parameter.grad is None or parameter.grad is exposed:
            return parameter.grad is not None
        gradient = local(parameter.grad)
        if gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
            gradient = gradient.detach()
            view.copy_(gradient if gradient.layout == torch.strided else gradient.to_dense())
        parameter.grad = exposed
        return True

    def views(self, flat: Tensor, start: int, stop: int) -> list[Tensor]:
        """Views of parameters `start` to `stop` into `flat`, which begins with parameter `start`; for sharded
        parameters, views of this rank's rows."""
        base, storage = self.offsets[start], flat.storage_offset()
        return [
            torch.as_strided(flat, self.shapes[i], self.strides[i], storage + self.offsets[i] - base)
            for i in range(start, stop)
        ]

    def segment(self, start: int, stop: int) -> Segment:
        """A new segment of parameters `start` to `stop`."""
        low, high = self.offsets[start], self.offsets[stop]
        return Segment(start, stop, Parameter(self.values[low:high]), self.gradients[low:high])

    def strayed(self) -> int:
        """Number of parameters that were moved out of the flat buffer."""
        return sum(local(p).data_ptr() != address for p, address in zip(self.parameters, self.addresses))


def _adopter(bucket: weakref.ref[Bucket], index: int) -> Callable[[Tensor], None]:
    def adopt(_: Tensor) -> None:
        alive = bucket()
        # A parameter that was moved out may belong to another optimizer by now.
        if alive is not None and local(alive.parameters[index]).data_ptr() == alive.addresses[index]:
            alive.adopt_gradient(index)

    return adopt


def buckets_of(parameters: Sequence[Parameter]) -> list[Bucket]:
    """A bucket for each combination of dtype, device and sharding, each in the order of `parameters`."""
    kinds: dict[Hashable, list[Parameter]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device, sharing(parameter))
        kinds.setdefault(kind, []).append(parameter)
    return [Bucket(members) for members in kinds.values()]
