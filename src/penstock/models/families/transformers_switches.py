"""Fields of a Plan in models of Hugging Face transformers: the attention kernel, the form of the loss over a
vocabulary, and whether padding is computed.

Shapes: B samples, N tokens, T non-padding tokens, D width, H heads, K features per head.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.config.plan import AttentionBackend, LossForm, Padding
from penstock.dtypes import format_of
from penstock.errors import ConfigError
from penstock.kernels.attention import BACKENDS, AttentionMask, Scores, attention, keeps_scores, kernel_for
from penstock.kernels.choices import knows_lengths
from penstock.kernels.deferred import make_at_once, put_off
from penstock.kernels.documents import Documents
from penstock.kernels.padding import Padded, Real, Unpadded
from penstock.kernels.sdpa import Switch, set_sdpa, switch_of, under_sdpa
from penstock.kernels.varlen import Varlen

_AGAIN = "penstock_scores_again"
_LENGTHS = "penstock_lengths"
"""Name, in transformers' registry, of the attention function that skips padding."""
_CONTENT = "penstock_mask"
"""Keyword argument that blocks pass on to this function."""


def set_vit_attention(model: nn.Module, backend: AttentionBackend) -> None:
    """Select the attention kernel in transformers' registry of attention functions, to which Penstock's are added."""
    transformers: Any = sys.modules["transformers"]  # imported: the model is one of its classes
    # By number: transformers takes any name with "flash" in it for a package of its own to import.
    name = "sdpa" if backend == "sdpa" else f"penstock_{BACKENDS.index(backend)}"
    if backend not in BACKENDS or not hasattr(transformers, "AttentionInterface"):
        raise ConfigError(
            f"plan.attention {backend!r} cannot be applied to {type(model).__qualname__}: transformers "
            f"{transformers.__version__} has no registry of attention functions; install transformers>=4.56."
        )
    if backend != "sdpa":
        transformers.AttentionInterface.register(name, _interface(backend))
    model.set_attn_implementation(name)  # type: ignore[operator]


def recompute_vit_scores(model: nn.Module, name: str) -> None:
    """Recompute a block's scores, whether Penstock's or torch's function computes attention."""
    block = model.get_submodule(name)
    for module in block.modules():
        setattr(module, _AGAIN, True)
    set_sdpa(block, Switch("sdpa", again=True))


def _interface(backend: AttentionBackend) -> Any:
    """Penstock's attention in the form that transformers calls: out is (B, N, H, K), and no weights are returned."""

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, dropout: float = 0.0, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if attention_mask is not None or dropout:
            raise ConfigError(
                f"plan.attention {backend!r} takes neither a mask nor dropout of attention weights; set "
                f"attention_probs_dropout_prob to 0 and pass no attention_mask, or use plan.attention sdpa."
            )
        if scaling is not None and abs(scaling * query.shape[-1] ** 0.5 - 1.0) > 1e-6:
            raise ConfigError(f"plan.attention {backend!r} scales by 1/√{query.shape[-1]}, not {scaling}.")
        attend: Callable[..., Tensor] = attention
        again = getattr(module, _AGAIN, False) and torch.is_grad_enabled()
        if again and keeps_scores(backend, query, query.shape[-2], Scores()):
            attend = partial(checkpoint, attention, use_reentrant=False)
        return attend(query, key, value, backend).transpose(1, 2).contiguous(), None

    return forward


def set_loss(model: Any, form: LossForm) -> None:
    """Choose whether logits are computed in chunks inside the loss, whatever code computes it, or by the head."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"plan.loss={form} cannot be applied to {type(model).__qualname__}, which has no linear layer over a "
            "vocabulary; leave plan.loss out."
        )
    (put_off if form == "chunked" else make_at_once)(head)


def set_padding(blocks: Iterable[nn.Module], model: nn.Module, padding: Padding) -> None:
    """Let these blocks of an encoder skip the tokens that their mask hides; outputs for these are zeros."""
    if padding == "keep":
        for block in blocks:
            under_sdpa(block, _around(block))
        return
    _enter_lengths(model)
    known = _Known()
    for block in blocks:
        if not any(
            each.kind is each.VAR_KEYWORD for each in inspect.signature(block.forward).parameters.values()
        ):
            raise ConfigError(
                f"plan.padding=remove cannot be applied to {type(model).__qualname__} of this version of transformers, "
                "whose blocks pass no keyword arguments on to attention; install transformers>=5."
            )
        under_sdpa(block, partial(_unpadded, _around(block), block, known))


def _enter_lengths(model: Any) -> None:
    transformers: Any = sys.modules["transformers"]
    now = model.config._attn_implementation
    if now not in ("sdpa", _LENGTHS):
        raise ConfigError(
            f"plan.padding=remove needs torch's attention, but {type(model).__qualname__} was made with "
            f"attn_implementation={now!r}; make it with 'sdpa'."
        )
    masks, functions = transformers.AttentionMaskInterface, transformers.AttentionInterface
    masks.register(_LENGTHS, masks()["sdpa"])
    functions.register(_LENGTHS, partial(_with_lengths, functions()["sdpa"]))
    model.set_attn_implementation(_LENGTHS)


def _with_lengths(
    usual: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention in the form that transformers calls: query (B, H, N, K), result (B, N, H, K)."""
    handed: tuple[_MaskContent, Switch | None] | None = more.pop(_CONTENT, None)
    if handed is None:
        return usual(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more)  # type: ignore[no-any-return]
    content, switch = handed
    varlen = switch is not None and knows_lengths(
        switch.backend, query.device.type, format_of(query.dtype), dropout=dropout > 0
    )
    attend = content.sight(query.dtype, varlen=varlen).attend
    backend = _backend(switch, query, dropout)
    if switch is not None:
        switch.note()
        if switch.again and backend == "plain" and torch.is_grad_enabled():
            attend = partial(checkpoint, attend, use_reentrant=False)
    scores = Scores(dropout=dropout, scale=scaling)
    return attend(query, key, value, backend, scores).transpose(1, 2).contiguous(), None


def _backend(switch: Switch | None, query: Tensor, dropout: float) -> AttentionBackend:
    """`plain` if the kernel does not call torch's attention, else `sdpa`: such calls are answered by a block's
    wrapper."""
    backend: AttentionBackend = "sdpa" if switch is None or switch.backend == "auto" else switch.backend
    return "plain" if kernel_for(backend, query, Scores(dropout=dropout)) == "plain" else "sdpa"


class _MaskContent:
    """The content of a mask: which tokens are not padding, and the form of it for each attention kernel."""

    def __init__(self, real: Real, lengths: Tensor, mask: Tensor) -> None:
        self.real, self._lengths, self._mask = real, lengths, mask
        self._sights: dict[tuple[torch.dtype, bool], AttentionMask] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def sight(self, dtype: torch.dtype, *, varlen: bool) -> AttentionMask:
        """The mask for queries of this type, computed once for all blocks. `varlen`: the kernel knows lengths."""
        if (dtype, varlen) not in self._sights:
            self._sights[dtype, varlen] = self._made(dtype, varlen=varlen)
        return self._sights[dtype, varlen]

    def _made(self, dtype: torch.dtype, *, varlen: bool) -> AttentionMask:
        if not Unpadded.pays(self._lengths, dtype, varlen=varlen):
            return Padded(self.real, self._mask)
        unpadded = Unpadded(self.real, self._lengths.tolist(), varlen=varlen)
        if varlen:
            return Varlen(*unpadded.starts(rest=True), causal=False)
        return Documents([unpadded.lengths], causal=False)


class _Known:
    """Cache of the last mask's content, so that it is read once for all blocks."""

    def __init__(self) -> None:
        self._mask: Tensor | None = None
        self._content: _MaskContent | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of(self, mask: Tensor) -> _MaskContent | None:
        """The content of `mask` (B, 1, N, N); None if it hides no padding, or more than padding."""
        if self._mask is not mask:
            self._mask, self._content = mask, _look(mask)
        return self._content


def _look(mask: Tensor) -> _MaskContent | None:
    if mask.stride(2) and not torch.equal(mask, mask[:, :, :1].expand_as(mask)):
        return None  # more than padding is hidden
    seen = mask[:, 0, 0]
    seen = seen if seen.dtype == torch.bool else seen >= 0
    real = Real.but(~seen)
    return None if real is None else _MaskContent(real, seen.sum(dim=1), mask)


def _unpadded(
    forward: Callable[..., Any], block: nn.Module, known: _Known, hidden_states: Tensor, attention_mask: Any = None,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """A block's forward pass of x (B, N, D), computed on its non-padding tokens (1, T, D)."""
    masked = isinstance(attention_mask, Tensor) and attention_mask.ndim == 4
    content = known.of(attention_mask) if masked else None
    if content is None:
        return forward(hidden_states, attention_mask, *args, **kwargs)
    out = forward(
        content.real.take(hidden_states), None, *args, **kwargs, **{_CONTENT: (content, switch_of(block))}
    )
    if isinstance(out, Tensor):
        return content.real.put(out)
    return (content.real.put(out[0]), *out[1:])


def _around(block: nn.Module) -> Callable[..., Any]:
    """A block's own forward pass, inside the wrappers that a Plan has put around it."""
    forward: Any = block.forward
    if switch_of(block) is not None:
        forward = forward.args[0]
    unpads = isinstance(forward, functools.partial) and forward.func is _unpadded
    return forward.args[0] if unpads else forward  # type: ignore[no-any-return]
