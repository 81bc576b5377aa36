"""What the operators of a training step cost on a CPU besides products and memory: exponentials, sums, dispatch.

On a CPU the exponentials of GELU and softmax and the sums of norms take longer than moving their numbers. Attention's
products are too small to reach the rate of large ones. And every operator of a training step pays for its module, its
views and autograd's bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.machine import KernelSample
from penstock.probe.rates import seconds

_ATTENTION = ((16, 32, 192), (64, 32, 48), (64, 64, 24), (197, 64, 12), (577, 64, 4))
"""Tokens, features of a head, and pairs of sample and head: digits, small images, ViT at 224 and at 384 pixels."""
_ATTENTION_QUICK = (_ATTENTION[0], _ATTENTION[3])
_ROWS, _WIDTH = 512, 384
_SCORES = (1024, 197)
_LAYERS = 8
_OPERATORS_PER_LAYER = 8
"""As the planner counts: a norm and its gradient, a linear layer and its three gradients, GELU and its gradient."""
_BACKWARD_PRODUCTS = 2.5
"""Products of fused attention's backward pass, relative to its forward pass: it computes the scores again."""


def kernel_samples(device: torch.device, quick: bool, budget: float) -> list[KernelSample]:
    """Rates in fp32: elements per second of operators, FLOP/s of attention by tokens and features of a head."""
    generator = torch.Generator(device=device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    def timed(call: Callable[[], object]) -> float:
        return seconds(call, device, budget)

    return [
        *_elementwise(random, timed),
        *_products(random, timed, _ATTENTION_QUICK if quick else _ATTENTION),
    ]


def _elementwise(
    random: Callable[..., Tensor], timed: Callable[[Callable[[], object]], float]
) -> Iterator[KernelSample]:
    x, gradient, weight = random(_ROWS, _WIDTH), random(_ROWS, _WIDTH), random(_WIDTH)
    _, mean, root = torch.native_layer_norm(x, [_WIDTH], weight, weight, 1e-6)
    scores = random(*_SCORES)
    shares = scores.softmax(-1)
    calls: dict[str, tuple[Tensor, Callable[[], object]]] = {
        "gelu": (x, lambda: F.gelu(x)),
        "gelu_backward": (x, lambda: torch.ops.aten.gelu_backward(gradient, x)),
        "norm": (x, lambda: F.layer_norm(x, [_WIDTH], weight, weight)),
        "norm_backward": (
            x,
            lambda: torch.ops.aten.native_layer_norm_backward(
                gradient, x, [_WIDTH], mean, root, weight, weight, [True, True, True]
            ),
        ),
        "softmax": (scores, lambda: scores.softmax(-1)),
        "softmax_backward": (
            scores,
            lambda: torch.ops.aten._softmax_backward_data(scores, shares, -1, torch.float32),
        ),
    }
    for name, (over, call) in calls.items():
        yield KernelSample(name=name, per_second=over.numel() / timed(call))


def _products(
    random: Callable[..., Tensor],
    timed: Callable[[Callable[[], object]], float],
    shapes: tuple[tuple[int, int, int], ...],
) -> Iterator[KernelSample]:
    for tokens, features, pairs in shapes:
        q, k, v = (random(1, pairs, tokens, features).requires_grad_() for _ in range(3))
        gradient = random(1, pairs, tokens, features)

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

        flops = 4.0 * pairs * tokens * tokens * features
        with torch.enable_grad():
            out = forward()

        def backward(
            out: Tensor = out, gradient: Tensor = gradient, inputs: tuple[Tensor, ...] = (q, k, v)
        ) -> object:
            return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

        at = {"tokens": tokens, "features": features}
        yield KernelSample(name="attention", per_second=flops / timed(forward), **at)
        yield KernelSample(
            name="attention_backward", per_second=_BACKWARD_PRODUCTS * flops / timed(backward), **at
        )
        with torch.no_grad():
            a, b, shares = q[0], k[0].transpose(1, 2), random(pairs, tokens, tokens)
            both = timed(lambda a=a, b=b: torch.bmm(a, b)) + timed(  # type: ignore[misc]
                lambda a=a, shares=shares: torch.bmm(shares, a)  # type: ignore[misc]
            )
        yield KernelSample(name="bmm", per_second=flops / both, **at)


class _Layer(nn.Module):
    """A Transformer's operators, so small that only their overhead takes time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.activation = nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.linear(self.norm(x)))
        return out


def operator_seconds(device: torch.device) -> float:
    """The cost of one small operator in a training step, forward or backward, with its module and autograd."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        layers = nn.Sequential(*(_Layer() for _ in range(_LAYERS))).to(device)
        x = torch.ones(1, 8, device=device, requires_grad=True)

        def step() -> None:
            for parameter in layers.parameters():
                parameter.grad = None
            layers(x).sum().backward()

        return seconds(step, device, 0.1) / (_LAYERS * _OPERATORS_PER_LAYER)
