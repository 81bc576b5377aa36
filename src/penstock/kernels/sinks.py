"""Attention with a sink in each head: softmax(q kᵀ / √K) v, with exp s of a learned parameter s added to the softmax's
denominator.

torch's fused kernels have no sinks, but return the log-sum-exp L of each row's scores. With the sink it is M = log(exp
L + exp s), and the output is the kernel's times exp(L − M). The fused backward pass recomputes weights as exp(score −
L), and takes their mean gradient from the output. If it is given M and the output with the sink instead, it returns the
gradients of queries, keys and values with the sink; the gradient of s is the sum over rows of −exp(s − M) · (o · do).

Shapes: B samples, H heads, G KV heads, N queries, M keys, K features per head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fused_with_sums(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """torch's fused attention of q, k and v (B, H, ·, K): the output (B, H, N, K), and each row's log-sum-exp (B, H,
    N), in fp32 or wider. A mask, of values to add to the scores, is supported on a CPU only."""
    if q.is_cuda:
        results = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    else:
        results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
    return results[0], results[1]


def fused_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, mask: Tensor | None, *,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v, from the whole output and its log-sum-exp over all keys."""
    out, grad, logs = out.contiguous(), grad.contiguous(), logs.contiguous()
    if q.is_cuda:
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, logs, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused[:0], scale=scale
        )  # fmt: skip
    else:
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, logs, 0.0, causal, attn_mask=mask, scale=scale
        )
    return gradients[0], gradients[1], gradients[2]


def for_each_query(x: Tensor, heads: int) -> Tensor:
    """Keys or values (B, G, M, K), repeated for each query head that shares them."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def add_sinks(out: Tensor, logs: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add sinks, (H, 1) or (H, N), to the output (B, H, N, K) and the log-sum-exp (B, H, N)."""
    both = torch.logaddexp(logs, sinks.to(logs.dtype))
    return out * (logs - both).exp().unsqueeze(-1).to(out.dtype), both


def sink_gradients(grad: Tensor, out: Tensor, logs: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of sinks, from the output and the log-sum-exp that include them."""
    mean = (grad.to(logs.dtype) * out).sum(-1)
    return -((sinks.to(logs.dtype) - logs).exp() * mean).sum_to_size(sinks.shape).to(sinks.dtype)


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> Tensor:  # fmt: skip
        wide_k, wide_v = (for_each_query(x, q.shape[1]) for x in (k, v))
        out, logs = fused_with_sums(q, wide_k, wide_v, mask, causal=causal, scale=scale)
        out, logs = add_sinks(out, logs, sinks)
        ctx.save_for_backward(q, k, v, sinks, mask, out, logs)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, sinks, mask, out, logs = ctx.saved_tensors
        wide_k, wide_v = (for_each_query(x, q.shape[1]) for x in (k, v))
        dq, dk, dv = fused_gradients(
            grad, q, wide_k, wide_v, out, logs, mask, causal=ctx.causal, scale=ctx.scale
        )
        dk, dv = (
            x if x.shape == k.shape else torch.unflatten(x, 1, (k.shape[1], -1)).sum(2) for x in (dk, dv)
        )
        return dq, dk, dv, sink_gradients(grad, out, logs, sinks), None, None, None


def fused_attention_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None
) -> Tensor:
    """Attention of q (B, H, N, K) to k and v (B, G, M, K) with sinks, (H, 1) or (H, N); see `fused_with_sums`."""
    if mask is not None:
        mask = mask if mask.is_floating_point() else q.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
        mask = mask.to(q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _WithSinks.apply(q, k, v, sinks, mask, causal, scale)  # type: ignore[no-any-return, no-untyped-call]
