"""Any elementwise torch optimizer over flat buffers: one launch per group and dtype instead of one per tensor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.errors import ConfigError
from penstock.optim.clip import folded
from penstock.optim.flat import Bucket, Segment, buckets_of
from penstock.optim.tensors import flat_like, local, loss_of, whole

_log = logging.getLogger(__name__)

# Optimizers that update each element independently of all other elements (torch/optim, 2.11 to 2.13).
_ELEMENTWISE = frozenset({
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
})  # fmt: skip
_REASONS = {
    "Adafactor": "factors the second moment of each matrix into rows and columns",
    "LBFGS": "takes inner products over all parameters and searches along a line",
    "Muon": "orthogonalises each matrix as a whole",
    "SparseAdam": "updates only the rows that a sparse gradient names",
}
_FUSED: frozenset[type[Optimizer]] = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD})
_SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
"""State that torch stores once per parameter, whatever its shape; a 0-d parameter would make it ambiguous."""
_EXECUTION = ("foreach", "fused", "capturable", "differentiable")
"""Group entries that control how a step runs, not what it computes."""


def contiguous(
    optimizer_class: type[Optimizer], params: Iterable[Any], *, elementwise: bool = False, **options: Any
) -> Contiguous:
    """`optimizer_class(params, **options)` over flat buffers, with the same results, groups and state dict.

    Works with every torch optimizer whose update is elementwise; Adam, AdamW and SGD run in their fused form unless
    `options` says otherwise. Pass `elementwise=True` for your own class if its update is elementwise. Raises
    ConfigError for optimizers that combine several elements, such as LBFGS, Muon or Adafactor.
    """
    name, module = optimizer_class.__name__, optimizer_class.__module__
    torchs = module.partition(".")[0] == "torch"
    if not (elementwise or (torchs and name in _ELEMENTWISE)):
        why = (
            f"Penstock does not know {module}.{name}; pass elementwise=True if each element's update depends on that "
            "element, its gradient and its state alone, else use it without contiguous"
        )
        if torchs and name in _REASONS:
            why = f"{name} {_REASONS[name]}, which is impossible in a flat buffer; use it without contiguous"
        raise ConfigError(
            f"contiguous cannot hold {name}: {why}. It can hold {', '.join(sorted(_ELEMENTWISE))}."
        )
    if options.get("differentiable"):
        raise ConfigError(
            "contiguous updates weights in place, so differentiable=True cannot work; leave it out."
        )
    return Contiguous(optimizer_class, params, options)


class Contiguous(Optimizer):
    """A torch optimizer whose parameters, gradients and state are stored in flat buffers. Made by `contiguous`.

    It behaves like the optimizer that it wraps: `param_groups` hold the model's parameters (learning-rate schedulers,
    `add_param_group` and GradScaler work on them), `state` and `state_dict()` are per parameter and have the wrapped
    class's form, so that either loads the other's. Inside, an inner optimizer of the wrapped class steps over one
    tensor per group and dtype.

    Parameters that receive no gradient in a step do not change, as in torch. If something replaces the storage of a
    parameter (`model.to(…)`, `p.data = …`), the next step logs a warning and rebuilds the buffers.
    """

    def __init__(
        self, optimizer_class: type[Optimizer], params: Iterable[Any], options: dict[str, Any]
    ) -> None:
        if optimizer_class in _FUSED and options.get("fused") is None and not options.get("foreach"):
            options = {**options, "fused": True}
        self._class = optimizer_class
        self._options = options
        self._buckets: list[list[Bucket]] = []  # by group
        self._inner: Optimizer
        self.generation = 0
        """Counts how often the buffers were built; older views are stale."""
        super().__init__(params, optimizer_class([torch.zeros(1)], **options).defaults)
        self._lay_out()

    # -- what the user of an optimizer calls

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns the closure's loss."""
        loss = loss_of(closure)
        with torch.no_grad():
            self._collect()
            inner = self._inner
            for own_group, inner_group in zip(self.param_groups, inner.param_groups):
                inner_group.update({k: v for k, v in own_group.items() if k not in ("params", "param_names")})
            scaling = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
            with folded(inner, **scaling):  # set by GradScaler and clipped_step, during the step only
                inner.step()
            self._expose_state()
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients. With `set_to_none` nothing is written, and the next backward pass overwrites the buffer;
        without it, one launch zeroes each flat buffer."""
        for bucket in self.buckets():
            if set_to_none:
                for parameter in bucket.parameters:
                    parameter.grad = None
            else:
                with torch.no_grad():
                    bucket.gradients.zero_()
                for parameter, gradient in zip(bucket.parameters, bucket.exposed_gradients):
                    if parameter.grad is not None:
                        parameter.grad = gradient

    def flat_gradients(self) -> list[Tensor]:
        """Flat gradients of everything that the next step will update; other gradients are moved in first."""
        self._collect()
        return [
            flat_like(b.parameters[0], s.gradient)
            for b in self.buckets()
            for s in b.segments
            if s.leaf.grad is not None
        ]

    def buckets(self) -> list[Bucket]:
        """The buffers and their parameters; valid until `generation` changes."""
        return [bucket for buckets in self._buckets for bucket in buckets]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; the buffers are rebuilt."""
        super().add_param_group(param_group)
        if self._buckets:
            self._lay_out()

    def lay_out_again(self) -> None:
        """Rebuild the buffers now, after parameters were cast or moved; their state follows them."""
        with torch.no_grad():
            self._lay_out_moved()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "A contiguous optimizer cannot be copied or pickled: its buffers are the model's own storage. Build a new "
            "one over the copied model and give it this one's state_dict()."
        )

    def state_dict(self) -> dict[str, Any]:
        """The state dict in the form of `optimizer_class`: state per parameter, in the parameters' shapes."""
        packed = super().state_dict()
        for index, state in packed["state"].items():
            # Parameters of one segment share a step counter; in a file each has its own.
            packed["state"][index] = {k: _own(v) if k in _SCALARS else v for k, v in state.items()}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this or of the wrapped class, in any of its forms; this optimizer keeps its own form."""
        super().load_state_dict(in_own_form(self, state_dict))
        self._lay_out()

    # -- buffers

    def _lay_out(self) -> None:
        """Rebuild buffers from `param_groups` and `state`; correct buffers are kept."""
        self.generation += 1
        with torch.no_grad():
            for index, group in enumerate(self.param_groups):
                if index == len(self._buckets):
                    self._buckets.append(buckets_of(group["params"]))
                elif not _laid_out(self._buckets[index], group["params"]):
                    for bucket in self._buckets[index]:
                        bucket.release()
                    self._buckets[index] = buckets_of(group["params"])
            per_parameter = {p: self.state.get(p, {}) for b in self.buckets() for p in b.parameters}
            for bucket in self.buckets():
                bucket.segments = list(_segments(bucket, per_parameter))
            self._inner = inner = self._class(self._inner_groups(), **self._options)
            for bucket in self.buckets():
                for segment in bucket.segments:
                    states = [per_parameter[p] for p in bucket.parameters[segment.start : segment.stop]]
                    if states[0]:
                        inner.state[segment.leaf] = _joined(bucket, segment, states)
            self._step_supports_amp_scaling = getattr(inner, "_step_supports_amp_scaling", False)
            self._expose_state()

    def _inner_groups(self) -> list[dict[str, Any]]:
        return [
            {
                **{k: v for k, v in group.items() if k != "param_names"},
                "params": [segment.leaf for bucket in buckets for segment in bucket.segments],
            }
            for group, buckets in zip(self.param_groups, self._buckets)
        ]

    def _collect(self) -> None:
        """Update the leaves: move values and gradients into the buffers, and leave unused parts out."""
        strayed = sum(bucket.strayed() for bucket in self.buckets())
        if strayed:
            _log.warning(
                "%d parameters are no longer in the flat buffers of the contiguous optimizer: something replaced their "
                "storage after it was built (model.to(...), model.half(), p.data = ...). The buffers are rebuilt, "
                "which is slow in every step; move or cast the model before building the optimizer.",
                strayed,
            )
            self._lay_out_moved()
        split = False
        for bucket in self.buckets():
            active = [bucket.adopt_gradient(index) for index in range(len(bucket.parameters))]
            for segment in list(bucket.segments):
                share = active[segment.start : segment.stop]
                if all(share) or not any(share):
                    segment.leaf.grad = segment.gradient if share[0] else None
                else:
                    self._split(bucket, segment, share)
                    split = True
        if split:
            for group, fresh in zip(self._inner.param_groups, self._inner_groups()):
                group["params"] = fresh["params"]

    def _lay_out_moved(self) -> None:
        """Rebuild buffers after parameters moved: their state follows them to their dtype and device."""
        fused = any(group.get("fused") or group.get("capturable") for group in self.param_groups)
        for parameter, state in self.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and key not in _SCALARS and value.is_floating_point():
                    state[key] = value.to(device=parameter.device, dtype=parameter.dtype)
                elif isinstance(value, Tensor) and (value.device.type != "cpu" or (fused and key == "step")):
                    state[key] = value.to(device=parameter.device)
        gradients = [(p, p.grad) for b in self.buckets() for p in b.parameters]
        self._lay_out()
        for parameter, gradient in gradients:
            placement = (parameter.device, parameter.dtype)
            if gradient is not None and (gradient.device, gradient.dtype) == placement:
                parameter.grad = gradient

    def _split(self, bucket: Bucket, segment: Segment, active: list[bool]) -> None:
        """Split a segment where parameters with and without a gradient meet: their step counters will differ."""
        state = self._inner.state.pop(segment.leaf, {})
        edges = [0, *(i for i in range(1, len(active)) if active[i] != active[i - 1]), len(active)]
        at = bucket.segments.index(segment)
        parts = []
        origin = bucket.offsets[segment.start]
        for low, high in pairwise(edges):
            part = bucket.segment(segment.start + low, segment.start + high)
            part.leaf.grad = part.gradient if active[low] else None
            span = slice(bucket.offsets[part.start] - origin, bucket.offsets[part.stop] - origin)
            if state:
                self._inner.state[part.leaf] = {
                    key: (value[span] if _elementwise(key, value, segment.leaf) else _own(value))
                    for key, value in state.items()
                }
            parts.append(part)
        bucket.segments[at : at + 1] = parts

    def _expose_state(self) -> None:
        """Expose the inner optimizer's flat state as views per parameter; cheap if nothing was added."""
        for bucket in self.buckets():
            for segment in bucket.segments:
                state = self._inner.state.get(segment.leaf, {})
                identity = tuple(map(id, state.values()))
                if identity == segment.exposed:
                    continue
                segment.exposed = identity
                members = bucket.parameters[segment.start : segment.stop]
                views = {
                    key: bucket.views(value, segment.start, segment.stop)
                    for key, value in state.items()
                    if _elementwise(key, value, segment.leaf)
                }
                for index, parameter in enumerate(members):
                    own = {key: whole(parameter, each[index]) for key, each in views.items()}
                    self.state[parameter] = {key: own.get(key, value) for key, value in state.items()}


def in_own_form(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict with this optimizer's own execution flags, so that loading it does not change how steps run."""
    groups = [dict(group) for group in state_dict["param_groups"]]
    for own_group, loaded_group in zip(optimizer.param_groups, groups):
        loaded_group.update({flag: own_group[flag] for flag in _EXECUTION if flag in own_group})
    return {**state_dict, "param_groups": groups}


def _laid_out(buckets: Iterable[Bucket], parameters: list[Parameter]) -> bool:
    """Whether the buffers hold exactly these parameters, and none was moved out."""
    buffered = {id(parameter) for bucket in buckets for parameter in bucket.parameters}
    return buffered == {id(p) for p in parameters} and not any(bucket.strayed() for bucket in buckets)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _elementwise(key: str, value: Any, like: Tensor) -> bool:
    return isinstance(value, Tensor) and key not in _SCALARS and value.shape == like.shape


def _segments(bucket: Bucket, states: dict[Parameter, dict[str, Any]]) -> Iterable[Segment]:
    """Runs of adjacent parameters whose state has the same entries and equal scalars, and can be shared."""
    signatures = [_signature(parameter, states[parameter]) for parameter in bucket.parameters]
    start = 0
    for stop in range(1, len(signatures) + 1):
        if stop == len(signatures) or signatures[stop] != signatures[start]:
            yield bucket.segment(start, stop)
            start = stop


def _signature(parameter: Parameter, state: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(
        (key, value.dtype) if _elementwise(key, value, parameter)
        else (key, value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
        for key, value in sorted(state.items())
    )  # fmt: skip


def _joined(bucket: Bucket, segment: Segment, states: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of a whole segment, joined from the states of its parameters."""
    joined: dict[str, Any] = {}
    for key, value in states[0].items():
        if _elementwise(key, value, bucket.parameters[segment.start]):
            flat = torch.zeros(segment.leaf.shape, dtype=value.dtype, device=segment.leaf.device)
            for view, state in zip(bucket.views(flat, segment.start, segment.stop), states):
                view.copy_(local(state[key]))
            joined[key] = flat
        else:
            joined[key] = _own(value)
    return joined
