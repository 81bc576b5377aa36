"""Costs of a training step's operators on a CPU, other than matrix products and memory: exponentials, sums, dispatch.

On a CPU the exponentials of GELU and softmax and the sums of norms take longer than moving their elements. Attention's
matrix products are too small to reach the rate of large ones. And every operator of a training step pays for its
module, its views and autograd's bookkeeping.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.activations import Mlp
from penstock.config.fused import FUSED_FORM
from penstock.config.machine import KernelSample
from penstock.config.plan import Matmul
from penstock.cpu import this_cpu
from penstock.kernels.bias_activation import bias_activation
from penstock.kernels.dropout import dropout
from penstock.kernels.native_blocks import attend_samples, computes_blocks
from penstock.probe.rates import seconds
from penstock.process import matmul_precision
from penstock.products.int8 import rounded

log = logging.getLogger(__name__)

_ATTENTION = ((16, 32, 192), (64, 32, 48), (64, 64, 24), (197, 64, 12), (577, 64, 4))
"""Tokens, features of a head, and pairs of sample and head: digits, small images, ViT at 224 and at 384 pixels."""
_TOKEN_ATTENTION = ((64, 64, 96), (512, 64, 96))
"""Keys, features of a head and pairs of attention for one query of each pair, as when texts are generated."""
_ATTENTION_QUICK = (_ATTENTION[0], _ATTENTION[1], _ATTENTION[3])
_TYPES: tuple[tuple[str, torch.dtype, Matmul], ...] = (
    ("fp32", torch.float32, "highest"),
    ("fp32_medium", torch.float32, "medium"),
    ("bf16", torch.bfloat16, "highest"),
    ("fp16", torch.float16, "highest"),
)
"""A type's name, the dtype of the operands, and the precision setting of fp32 products."""
_ROWS, _WIDTH = 512, 384
_SCORES = ((12608, 16), (1024, 197), (100, 2017))
"""Rows of softmax and their length: an element of a short row takes longer, most of all in half types, whose vector
registers such a row does not fill."""
_FUSED: tuple[Mlp, ...] = ("gelu", "gelu_tanh", "silu")
"""Activations that take longer to compute than to move, as `plan.fuse` computes them."""
_LAYERS = 8
_OPERATORS_PER_LAYER = 8
"""Operators as the planner counts them: a norm and its gradient, a linear layer and its three gradients, GELU and its
gradient."""
_BACKWARD_PRODUCTS = 2.5
"""Products of fused attention's backward pass, relative to its forward pass: it computes the scores again."""


def kernel_samples(device: torch.device, quick: bool, budget: float) -> list[KernelSample]:
    """Elements per second of operators, and FLOP/s of attention by tokens and features of a head, in each type.

    A type that this CPU cannot compute in is left out.
    """
    samples: list[KernelSample] = []
    for name, dtype, matmul in _TYPES:
        if matmul == "medium" and this_cpu().bf16 is False:
            continue  # torch computes as for `highest`
        kernels = _Kernels(name, dtype, device, budget)
        with matmul_precision(matmul):
            try:
                if matmul == "highest":
                    samples += kernels.elementwise()
                samples += kernels.attention(_ATTENTION_QUICK if quick else _ATTENTION)
                samples += kernels.token_attention(_TOKEN_ATTENTION[:1] if quick else _TOKEN_ATTENTION)
                if name == "fp32" and computes_blocks() and device.type == "cpu":
                    samples += kernels.block_attention(_ATTENTION_QUICK if quick else _ATTENTION)
            except (RuntimeError, NotImplementedError) as error:
                log.info("%s kernels do not run on %s: %s", name, device, str(error).partition("\n")[0])
    return samples


class _Kernels:
    """Measures the operators in one type."""

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device, budget: float) -> None:
        self.name, self.dtype, self.device, self.budget = name, dtype, device, budget
        self.generator = torch.Generator(device=device).manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, generator=self.generator).to(self.dtype)

    def sample(
        self, name: str, amount: float, call: Callable[[], object], tokens: int = 0, features: int = 0
    ) -> KernelSample:
        """The rate of a `call` that does an `amount` of FLOPs or elements."""
        rate = amount / seconds(call, self.device, self.budget)
        return KernelSample(name=name, per_second=rate, tokens=tokens, features=features, dtype=self.name)

    def elementwise(self) -> Iterator[KernelSample]:
        x, gradient, weight = self.random(_ROWS, _WIDTH), self.random(_ROWS, _WIDTH), self.random(_WIDTH)
        aten = torch.ops.aten
        _, mean, root = torch.native_layer_norm(x, [_WIDTH], weight, weight, 1e-6)
        calls: dict[str, tuple[Tensor, Callable[[], object]]] = {
            "gelu": (x, lambda: F.gelu(x)),
            "gelu_backward": (x, lambda: aten.gelu_backward(gradient, x)),
            "dropout": (x, lambda: dropout(x, 0.1, generator=self.generator)),
            # As F.dropout does it, which would draw from the generator of the program.
            "torch_dropout": (
                x,
                lambda: x * torch.empty_like(x).bernoulli_(0.9, generator=self.generator).div_(0.9),
            ),
            "norm": (x, lambda: F.layer_norm(x, [_WIDTH], weight, weight)),
            "norm_backward": (
                x,
                lambda: aten.native_layer_norm_backward(
                    gradient, x, [_WIDTH], mean, root, weight, weight, [True, True, True]
                ),
            ),
            "gelu_tanh": (x, lambda: F.gelu(x, approximate="tanh")),
            "gelu_tanh_backward": (x, lambda: aten.gelu_backward(gradient, x, approximate="tanh")),
            "silu": (x, lambda: F.silu(x)),
            "silu_backward": (x, lambda: aten.silu_backward(gradient, x)),
            "tanh": (x, lambda: torch.tanh(x)),
            "tanh_backward": (x, lambda: aten.tanh_backward(gradient, x)),
            "sigmoid": (x, lambda: torch.sigmoid(x)),
            "sigmoid_backward": (x, lambda: aten.sigmoid_backward(gradient, x)),
            "relu": (x, lambda: F.relu(x)),
            "relu_backward": (x, lambda: aten.threshold_backward(gradient, x, 0.0)),
        }
        for function in _FUSED:
            ahead, behind = _fused(x, weight, gradient, function)
            name = f"{FUSED_FORM}{function}"
            calls |= {name: (x, ahead), f"{name}_backward": (x, behind)}
        for name, (over, call) in calls.items():
            yield self.sample(name, over.numel(), call)
        yield self.sample("quantize", x.numel(), lambda: rounded(x))
        with torch.random.fork_rng(devices=[]):  # noise is drawn from the generator of the program
            sample = self.sample("quantize_backward", x.numel(), lambda: rounded(x, noisy=True))
        yield sample
        for rows, length in _SCORES:
            scores = self.random(rows, length)
            for name, call in _softmax(scores).items():
                yield self.sample(name, scores.numel(), call, length)

    def attention(self, shapes: tuple[tuple[int, int, int], ...]) -> Iterator[KernelSample]:
        """Fused attention and the batched products of plain attention, forward and backward."""
        for tokens, features, pairs in shapes:
            q, k, v, gradient = (self.random(1, pairs, tokens, features) for _ in range(4))
            weights = self.random(pairs, tokens, tokens)
            factors = q[0], k[0], v[0], gradient[0], weights
            flops = 4.0 * pairs * tokens * tokens * features
            inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
            fused = partial(F.scaled_dot_product_attention, *inputs)
            with torch.enable_grad():
                out = fused()
            fused_backward = partial(torch.autograd.grad, out, inputs, gradient, retain_graph=True)
            calls: tuple[tuple[str, float, Callable[[], object]], ...] = (
                ("attention", 1.0, fused),
                ("attention_backward", _BACKWARD_PRODUCTS, fused_backward),
                ("bmm", 1.0, partial(_plain, *factors)),
                ("bmm_backward", 2.0, partial(_plain_backward, *factors)),
            )
            for name, times, call in calls:
                yield self.sample(name, times * flops, call, tokens, features)

    def token_attention(self, shapes: tuple[tuple[int, int, int], ...]) -> Iterator[KernelSample]:
        """Fused attention with one query per pair, which spends most of its time starting each pair."""
        for tokens, features, pairs in shapes:
            q, k, v = (self.random(1, pairs, count, features) for count in (1, tokens, tokens))
            call = partial(F.scaled_dot_product_attention, q, k, v)
            yield self.sample("attention_token", 4.0 * pairs * tokens * features, call, tokens, features)

    def block_attention(self, shapes: tuple[tuple[int, int, int], ...]) -> Iterator[KernelSample]:
        """Attention in one call, as int8 blocks compute it."""
        for tokens, features, pairs in shapes:
            call = partial(attend_samples, self.random(tokens, pairs * 3 * features), features, [tokens])
            flops = 4.0 * pairs * tokens * tokens * features
            yield self.sample("attention_block", flops, call, tokens, features)


def _plain(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, weights: Tensor) -> object:
    """The products of plain attention: scores, and the weighted values."""
    return torch.bmm(q, k.transpose(1, 2)), torch.bmm(weights, v)


def _plain_backward(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, weights: Tensor) -> object:
    """The products of their gradients."""
    turned = weights.transpose(1, 2)
    scores = torch.bmm(gradient, v.transpose(1, 2)), torch.bmm(turned, gradient)
    return *scores, torch.bmm(weights, k), torch.bmm(turned, q)


def _fused(
    product: Tensor, bias: Tensor, gradient: Tensor, function: Mlp
) -> tuple[Callable[[], object], Callable[[], object]]:
    """An activation with its bias as `plan.fuse` computes it, and the gradients of both."""
    with torch.enable_grad():
        leaves = product.clone().requires_grad_(), bias.clone().requires_grad_()
        out = bias_activation(*leaves, function)
    return (
        lambda: bias_activation(product, bias, function),
        lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True),
    )


def _softmax(scores: Tensor) -> dict[str, Callable[[], object]]:
    """A softmax over rows, and its gradient."""
    with torch.enable_grad():
        leaf = scores.clone().requires_grad_()
        shares = leaf.softmax(-1)
    return {
        "softmax": lambda: scores.softmax(-1),
        "softmax_backward": lambda: torch.autograd.grad(shares, leaf, scores, retain_graph=True),
    }


class _Layer(nn.Module):
    """A Transformer block so small that only the overhead of its operators takes time."""

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
