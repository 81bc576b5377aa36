"""A small call of each operation that the op lists or torch.autocast name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Make:
    """Makes floating tensors of a shape on a device, of the given types in turn; each value lies in (0, 1)."""

    def __init__(self, device: torch.device | str, *dtypes: torch.dtype) -> None:
        self.device = device
        self._dtypes = dtypes
        self._made = 0

    def __call__(self, *shape: int) -> Tensor:
        dtype = self._dtypes[self._made % len(self._dtypes)]
        self._made += 1
        return torch.full(shape, 0.5, device=self.device, dtype=dtype)


_PAIR_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss poisson_nll_loss hinge_embedding_loss soft_margin_loss"
)
_POINTWISE = "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan"
_TOTALS = "sum prod norm logsumexp quantile nanquantile"


def call(name: str, make: Make) -> Any:
    """Run the operation `name` on tensors from `make`, and return its (first) result."""
    function: Any = torch
    for part in name.split(".")[1:]:
        function = getattr(function, part)
    last = name.rpartition(".")[2]
    if last in _PAIR_LOSSES.split():
        return function(make(4, 4), make(4, 4))
    if last in _POINTWISE.split():
        return function(make(4, 4))
    if name.startswith("torch.fft."):
        return function(make(4, 4))
    if last in _TOTALS.split():
        return function(*_totals(last, make))
    return _CALLS[last](function, make)


def _totals(last: str, make: Make) -> tuple[Any, ...]:
    x = make(4, 4)
    return {"logsumexp": (x, 0), "quantile": (x, 0.5), "nanquantile": (x, 0.5)}.get(last, (x,))


def _labels(make: Make, *values: int) -> Tensor:
    return torch.tensor(values, device=make.device)


def _cell(function: Any, make: Make, gates: int) -> Any:
    x, h = make(2, 4), make(2, 4)
    weights = (make(4 * gates, 4), make(4 * gates, 4), make(4 * gates), make(4 * gates))
    out = function(x, (h, make(2, 4)) if gates == 4 else h, *weights)
    return out[0] if isinstance(out, tuple) else out


def _ctc(function: Any, make: Make) -> Any:
    lengths = {"input_lengths": _labels(make, 4), "target_lengths": _labels(make, 2)}
    return function(make(4, 1, 4).log_softmax(-1), _labels(make, 1, 2).view(1, 2), **lengths)


def _index_put(function: Any, make: Make) -> Any:
    return function(make(4), (_labels(make, 0, 1),), make(2))


_CALLS: dict[str, Callable[[Any, Make], Any]] = {
    "linear": lambda f, m: f(m(2, 4), m(4, 4)), "conv1d": lambda f, m: f(m(1, 2, 4), m(2, 2, 1)),
    "conv2d": lambda f, m: f(m(1, 2, 4, 4), m(2, 2, 1, 1)),
    "conv3d": lambda f, m: f(m(1, 2, 4, 4, 4), m(2, 2, 1, 1, 1)),
    "conv_transpose1d": lambda f, m: f(m(1, 2, 4), m(2, 2, 1)),
    "conv_transpose2d": lambda f, m: f(m(1, 2, 4, 4), m(2, 2, 1, 1)),
    "conv_transpose3d": lambda f, m: f(m(1, 2, 4, 4, 4), m(2, 2, 1, 1, 1)),
    "conv_tbc": lambda f, m: f(m(4, 1, 2), m(1, 2, 2), m(2)), "matmul": lambda f, m: f(m(4, 4), m(4, 4)),
    "mm": lambda f, m: f(m(4, 4), m(4, 4)), "bmm": lambda f, m: f(m(2, 4, 4), m(2, 4, 4)),
    "mv": lambda f, m: f(m(4, 4), m(4)), "addmm": lambda f, m: f(m(4, 4), m(4, 4), m(4, 4)),
    "addmv": lambda f, m: f(m(4), m(4, 4), m(4)), "addr": lambda f, m: f(m(4, 4), m(4), m(4)),
    "addbmm": lambda f, m: f(m(4, 4), m(2, 4, 4), m(2, 4, 4)),
    "baddbmm": lambda f, m: f(m(2, 4, 4), m(2, 4, 4), m(2, 4, 4)),
    "einsum": lambda f, m: f("ij,jk->ik", m(4, 4), m(4, 4)), "chain_matmul": lambda f, m: f(m(4, 4), m(4, 4)),
    "multi_dot": lambda f, m: f([m(4, 4), m(4, 4)]), "vecdot": lambda f, m: f(m(4), m(4)),
    "scaled_dot_product_attention": lambda f, m: f(m(1, 2, 4, 4), m(1, 2, 4, 4), m(1, 2, 4, 4)),
    "prelu": lambda f, m: f(m(4, 4), m(1)), "lstm_cell": lambda f, m: _cell(f, m, 4),
    "gru_cell": lambda f, m: _cell(f, m, 3), "rnn_tanh_cell": lambda f, m: _cell(f, m, 1),
    "rnn_relu_cell": lambda f, m: _cell(f, m, 1), "pow": lambda f, m: f(m(4, 4), 2),
    "cumsum": lambda f, m: f(m(4, 4), 0), "cumprod": lambda f, m: f(m(4, 4), 0),
    "vector_norm": lambda f, m: f(m(4, 4)), "matrix_norm": lambda f, m: f(m(4, 4)),
    "dist": lambda f, m: f(m(4), m(4)), "cdist": lambda f, m: f(m(4, 4), m(4, 4)), "pdist": lambda f, m: f(m(4, 4)),
    "renorm": lambda f, m: f(m(4, 4), 2, 0, 1.0), "trace": lambda f, m: f(m(4, 4)),
    "cosine_similarity": lambda f, m: f(m(4, 4), m(4, 4)), "softplus": lambda f, m: f(m(4, 4)),
    "softmax": lambda f, m: f(m(4, 4), -1), "softmin": lambda f, m: f(m(4, 4), -1),
    "log_softmax": lambda f, m: f(m(4, 4), -1), "layer_norm": lambda f, m: f(m(4, 4), (4,), m(4), m(4)),
    "native_layer_norm": lambda f, m: f(m(4, 4), (4,), m(4), m(4), 1e-5)[0],
    "rms_norm": lambda f, m: f(m(4, 4), (4,), m(4)), "group_norm": lambda f, m: f(m(4, 4), 2, m(4), m(4)),
    "interpolate": lambda f, m: f(m(1, 2, 4, 4), scale_factor=2.0, mode="bilinear"),
    "cross_entropy": lambda f, m: f(m(4, 4), _labels(m, 0, 1, 2, 3)),
    "nll_loss": lambda f, m: f(m(4, 4), _labels(m, 0, 1, 2, 3)),
    "multi_margin_loss": lambda f, m: f(m(4, 4), _labels(m, 0, 1, 2, 3)),
    "multilabel_margin_loss": lambda f, m: f(m(1, 4), _labels(m, 0, 1, -1, -1).view(1, 4)),
    "margin_ranking_loss": lambda f, m: f(m(4), m(4), m(4)),
    "triplet_margin_loss": lambda f, m: f(m(4, 4), m(4, 4), m(4, 4)),
    "cosine_embedding_loss": lambda f, m: f(m(4, 4), m(4, 4), _labels(m, 1, 1, -1, 1)),
    "binary_cross_entropy_with_logits": lambda f, m: f(m(4, 4), m(4, 4)),
    "binary_cross_entropy": lambda f, m: f(m(4, 4), m(4, 4)),
    "kl_div": lambda f, m: f(m(4, 4), m(4, 4), reduction="batchmean"), "ctc_loss": _ctc,
    "addcdiv": lambda f, m: f(m(4), m(4), m(4)), "addcmul": lambda f, m: f(m(4), m(4), m(4)),
    "atan2": lambda f, m: f(m(4), m(4)), "cross": lambda f, m: f(m(4, 3), m(4, 3), dim=1),
    "dot": lambda f, m: f(m(4), m(4)), "vdot": lambda f, m: f(m(4), m(4)), "inner": lambda f, m: f(m(4, 4), m(4, 4)),
    "tensordot": lambda f, m: f(m(4, 4), m(4, 4), dims=1), "index_put": _index_put,
    "index_add": lambda f, m: f(m(4), 0, _labels(m, 0, 1), m(2)),
    "scatter": lambda f, m: f(m(4), 0, _labels(m, 0, 1), m(2)),
    "masked_scatter": lambda f, m: f(m(4), torch.ones(4, dtype=torch.bool, device=m.device), m(4)),
    "lerp": lambda f, m: f(m(4), m(4), 0.5), "index_copy": lambda f, m: f(m(4), 0, _labels(m, 0, 1), m(2)),
    "scatter_add": lambda f, m: f(m(4), 0, _labels(m, 0, 1), m(2)),
    "bilinear": lambda f, m: f(m(2, 4), m(2, 4), m(4, 4, 4)),
    "grid_sample": lambda f, m: f(m(1, 2, 4, 4), m(1, 4, 4, 2), align_corners=False),
    "cat": lambda f, m: f([m(4), m(4)]), "stack": lambda f, m: f([m(4), m(4)]),
    "avg_pool3d": lambda f, m: f(m(1, 2, 4, 4, 4), 2), "max_pool3d": lambda f, m: f(m(1, 2, 4, 4, 4), 2),
    "adaptive_avg_pool3d": lambda f, m: f(m(1, 2, 4, 4, 4), 2),
    "stft": lambda f, m: f(m(16), 8, window=torch.ones(8, device=m.device), return_complex=True),
    "gelu": lambda f, m: f(m(4, 4)),
}  # fmt: skip
