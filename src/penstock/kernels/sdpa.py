"""Chooses the attention kernel of any module that calls `torch.nn.functional.scaled_dot_product_attention`.

torch's own kernels are pinned by `torch.nn.attention.sdpa_kernel`. The plain form takes the call's place: torch's MATH
kernel computes half types in fp32, which for bf16 on a CPU is slower than products in bf16.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.overrides import TorchFunctionMode

from penstock.config.plan import AttentionBackend
from penstock.kernels.attention import PINNED, Scores, chosen_backend, plain_attention


def plain_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` as two products and a softmax in the type of its inputs: (…, L, E), (…, S, E),
    (…, S, V) → (…, L, V). The scores, (…, L, S), are kept for the backward pass.
    """
    lead = query.shape[:-2]

    def four(tensor: Tensor) -> Tensor:
        missing = max(0, 4 - tensor.ndim)
        return tensor[(None,) * missing].flatten(0, -4)

    if attn_mask is not None:
        attn_mask = four(attn_mask.expand(*lead, *attn_mask.shape[-2:]) if query.ndim > 4 else attn_mask)
    scores = Scores(attn_mask, is_causal, dropout_p, scale)
    out = plain_attention(four(query), four(key), four(value), scores)
    return out.reshape(*lead, *out.shape[-2:])


class _Instead(TorchFunctionMode):
    """Inside, calls of torch's attention are answered by ours."""

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__()
        self.backend = backend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            query = args[0] if args else kwargs["query"]
            backend = chosen_backend(self.backend, query.device, query.dtype, query.shape[-2])
            if backend == "plain":
                return plain_sdpa(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class CallsOfSdpa(TorchFunctionMode):
    """Inside, counts the calls of torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def set_sdpa(module: nn.Module, backend: AttentionBackend) -> None:
    """Let all calls of torch's attention within a module's forward pass take a backend, until another is set."""
    forward: Any = module.forward
    if isinstance(forward, functools.partial) and forward.func is _switched:
        forward = forward.args[0]
    # An attribute of the instance: names of parameters stay, copies of the module call the copy's own forward, and
    # torch.compile compiles the switch with the module, so that compiled code of two backends is told apart.
    wrapped = forward if backend == "sdpa" else functools.partial(_switched, forward, backend)
    object.__setattr__(module, "forward", wrapped)


def _switched(forward: Any, backend: AttentionBackend, *args: Any, **kwargs: Any) -> Any:
    with _inside(backend):
        return forward(*args, **kwargs)


def _inside(backend: AttentionBackend) -> AbstractContextManager[Any]:
    if backend in ("auto", "plain"):
        return _Instead(backend)
    return sdpa_kernel(PINNED[backend])
