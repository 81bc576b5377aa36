"""Chooses the attention kernel of any module that calls `torch.nn.functional.scaled_dot_product_attention`.

torch's own kernels are pinned by `torch.nn.attention.sdpa_kernel`. The plain form replaces the call: torch's MATH
kernel computes half types in fp32, which on a CPU is slower than matrix products in bf16.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from penstock.config.plan import AttentionBackend
from penstock.cpu import this_cpu
from penstock.dtypes import format_of
from penstock.kernels.attention import PINNED, Scores, attention, keeps_scores, raise_without_kernel
from penstock.kernels.choices import auto_attention


def own_sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    backend: AttentionBackend = "plain",
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` by a kernel of ours: (…, L, E), (…, S, E), (…, S, V) → (…, L, V). The plain
    kernel, two matrix products and a softmax in the dtype of its inputs, saves the scores, (…, L, S), for backward."""
    leads = (t.shape[:-3] for t in (query, key, value))
    lead: torch.Size = torch.broadcast_shapes(*leads)  # type: ignore[no-untyped-call]

    def four(tensor: Tensor, heads: tuple[int, ...]) -> Tensor:
        tensor = tensor.expand(*heads, *tensor.shape[-2:])
        return tensor[(None,) * max(0, 4 - tensor.ndim)].flatten(0, -4)

    q, k, v = (four(t, (*lead, *t.shape[-3:-2])) for t in (query, key, value))
    attends: Tensor | None = None
    if attn_mask is not None:
        attn_mask = four(attn_mask, (*lead, *query.shape[-3:-2]) if query.ndim > 4 else attn_mask.shape[:-2])
    if attn_mask is not None and backend == "plain":
        lowest, highest = (False, True) if attn_mask.dtype == torch.bool else (-torch.inf, 0.0)
        if is_causal:
            later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
            attn_mask, is_causal = attn_mask.masked_fill(later, lowest), False
        # A query that attends to no key gets zeros, as from torch's kernels.
        attends = (attn_mask > lowest).any(-1, keepdim=True)
        attn_mask = attn_mask.masked_fill(~attends, highest)
    out = attention(q, k, v, backend, Scores(attn_mask, is_causal, dropout_p, scale))
    out = out if attends is None else out.where(attends, 0.0)
    return out.reshape(*lead, *query.shape[-3:-1], out.shape[-1])


@dataclass(eq=False)
class Switch:
    """The choice of a backend for a module and the blocks in it."""

    backend: AttentionBackend
    again: bool = False
    """Whether the backward pass recomputes scores that would otherwise be saved for it."""
    around: Switch | None = None
    """For a block, the switch of the model around it."""
    used: bool = False
    """Whether torch's attention has been called since. Never reset, so that compiled code needs no guard."""

    def note(self) -> None:
        """Record that attention was called."""
        self.used = True
        if self.around is not None:
            self.around.used = True


class Watch(TorchFunctionMode):
    """Within this mode, calls of torch's attention are recorded, and replaced by our kernel if the backend is ours."""

    def __init__(self, switch: Switch) -> None:
        super().__init__()
        self.switch = switch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **options)
        switch = self.switch
        switch.note()
        query = args[0] if args else options["query"]
        form = query.device.type, format_of(query.dtype), query.shape[-2]
        backend = auto_attention(switch.backend, *form, avx512=this_cpu().avx512)
        own = backend in ("plain", "native")
        attend = functools.partial(own_sdpa, backend=backend) if own else func
        if switch.again and backend in PINNED:  # also pinned when it is recomputed
            attend = functools.partial(_pinned, func, backend)
        if switch.again and torch.is_grad_enabled():
            scores = Scores(
                _given("attn_mask", 3, args, options), dropout=_given("dropout_p", 4, args, options) or 0.0
            )
            if keeps_scores(backend, query, query.shape[-2], scores):
                return checkpoint(attend, *args, use_reentrant=False, **options)
        return attend(*args, **options)


def _pinned(func: Any, backend: AttentionBackend, *args: Any, **kwargs: Any) -> Any:
    with sdpa_kernel(PINNED[backend]):
        return func(*args, **kwargs)


def _given(name: str, place: int, args: Any, options: Any) -> Any:
    return args[place] if len(args) > place else options.get(name)


def set_sdpa(module: nn.Module, switch: Switch) -> None:
    """Let all calls of torch's attention within a module's forward pass use a backend, until another is set."""
    forward: Any = module.forward
    if switch_of(module) is not None:
        forward = forward.args[0]
    # An attribute of the instance: names of parameters stay, a copy of the module calls its own forward pass, and
    # torch.compile compiles the switch with the module, so that two backends do not share compiled code.
    as_it_is = switch.backend == "sdpa" and not switch.again
    wrapped = forward if as_it_is else functools.partial(_switched, forward, switch)
    object.__setattr__(module, "forward", wrapped)


def under_sdpa(module: nn.Module, forward: Any) -> None:
    """Replace a module's forward pass, and keep the switch that is set."""
    switch = switch_of(module)
    wrapped = forward if switch is None else functools.partial(_switched, forward, switch)
    object.__setattr__(module, "forward", wrapped)


def switch_of(module: nn.Module) -> Switch | None:
    """The switch that `set_sdpa` has set, if it changes anything."""
    forward: Any = module.forward
    if isinstance(forward, functools.partial) and forward.func is _switched:
        switch: Switch = forward.args[1]
        return switch
    return None


def _switched(forward: Any, switch: Switch, *args: Any, **kwargs: Any) -> Any:
    try:
        return _watched(forward, switch, *args, **kwargs)
    except RuntimeError as error:
        raise_without_kernel(error, switch.backend, "")
        raise


def _watched(forward: Any, switch: Switch, *args: Any, **kwargs: Any) -> Any:
    pinned = sdpa_kernel(PINNED[switch.backend]) if switch.backend in PINNED else nullcontext()
    if switch.again or switch.backend not in PINNED:
        with Watch(switch), pinned:
            return forward(*args, **kwargs)
    # Torch's own kernel runs. Calls are watched only until the first, because watching costs time for every operator;
    # compiled code does not watch while it runs, and must not depend on what was recorded.
    unseen = torch.compiler.is_compiling() or not switch.used
    with Watch(switch) if unseen else nullcontext(), pinned:
        return forward(*args, **kwargs)
