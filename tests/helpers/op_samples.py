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


_SHAPES = {
    "4,4": """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan sum prod norm logsumexp quantile
        nanquantile pow cumsum cumprod vector_norm matrix_norm pdist trace softplus softmax softmin log_softmax gelu
    """,
    "4,4 4,4": """
        mse_loss l1_loss smooth_l1_loss huber_loss poisson_nll_loss hinge_embedding_loss soft_margin_loss matmul mm
        cdist cosine_similarity binary_cross_entropy_with_logits binary_cross_entropy inner
    """,
    "4,4 4,4 4,4": "addmm triplet_margin_loss", "2,4 4,4": "linear", "4,4 4": "mv", "4,4 1": "prelu",
    "4 4,4 4": "addmv", "4,4 4 4": "addr", "4,4 2,4,4 2,4,4": "addbmm", "2,4 2,4 4,4,4": "bilinear",
    "4 4": "vecdot dist atan2 dot vdot lerp", "4 4 4": "margin_ranking_loss addcdiv addcmul", "2,4,4 2,4,4": "bmm",
    "2,4,4 2,4,4 2,4,4": "baddbmm", "1,2,4,4 1,2,4,4 1,2,4,4": "scaled_dot_product_attention",
    "1,2,4 2,2,1": "conv1d conv_transpose1d", "1,2,4,4 2,2,1,1": "conv2d conv_transpose2d",
    "1,2,4,4,4 2,2,1,1,1": "conv3d conv_transpose3d", "4,1,2 1,2,2 2": "conv_tbc",
    "1,2,4,4,4": "avg_pool3d max_pool3d adaptive_avg_pool3d",
}  # fmt: skip
"""Names of operations that take tensors of these shapes and, where `_LAST` has one, a number."""
_LAST = {
    "pow": 2, "cumsum": 0, "cumprod": 0, "softmax": -1, "softmin": -1, "log_softmax": -1, "logsumexp": 0,
    "quantile": 0.5, "nanquantile": 0.5, "lerp": 0.5, "avg_pool3d": 2, "max_pool3d": 2, "adaptive_avg_pool3d": 2,
}  # fmt: skip
_PLAIN = {name: shapes for shapes, names in _SHAPES.items() for name in names.split()}


def call(name: str, make: Make) -> Any:
    """Run the operation `name` on tensors from `make`, and return its (first) result."""
    function: Any = torch
    for part in name.split(".")[1:]:
        function = getattr(function, part)
    last = name.rpartition(".")[2]
    shapes = "4,4" if name.startswith("torch.fft.") else _PLAIN.get(last)
    if shapes is None:
        return _CALLS[last](function, make)
    tensors = [make(*map(int, shape.split(","))) for shape in shapes.split()]
    return function(*tensors, *([_LAST[last]] if last in _LAST else []))


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
    "einsum": lambda f, m: f("ij,jk->ik", m(4, 4), m(4, 4)), "chain_matmul": lambda f, m: f(m(4, 4), m(4, 4)),
    "multi_dot": lambda f, m: f([m(4, 4), m(4, 4)]), "lstm_cell": lambda f, m: _cell(f, m, 4),
    "gru_cell": lambda f, m: _cell(f, m, 3), "rnn_tanh_cell": lambda f, m: _cell(f, m, 1),
    "rnn_relu_cell": lambda f, m: _cell(f, m, 1), "renorm": lambda f, m: f(m(4, 4), 2, 0, 1.0),
    "layer_norm": lambda f, m: f(m(4, 4), (4,), m(4), m(4)),
    "native_layer_norm": lambda f, m: f(m(4, 4), (4,), m(4), m(4), 1e-5)[0],
    "rms_norm": lambda f, m: f(m(4, 4), (4,), m(4)), "group_norm": lambda f, m: f(m(4, 4), 2, m(4), m(4)),
    "interpolate": lambda f, m: f(m(1, 2, 4, 4), scale_factor=2.0, mode="bilinear"),
    "cross_entropy": lambda f, m: f(m(4, 4), _labels(m, 0, 1, 2, 3)),
    "nll_loss": lambda f, m: f(m(4, 4), _labels(m, 0, 1, 2, 3)),
    "multi_margin_loss": lambda f, m: f(m(4, 4), _labels(m, 0, 1, 2, 3)),
    "multilabel_margin_loss": lambda f, m: f(m(1, 4), _labels(m, 0, 1, -1, -1).view(1, 4)),
    "cosine_embedding_loss": lambda f, m: f(m(4, 4), m(4, 4), _labels(m, 1, 1, -1, 1)),
    "kl_div": lambda f, m: f(m(4, 4), m(4, 4), reduction="batchmean"), "ctc_loss": _ctc,
    "cross": lambda f, m: f(m(4, 3), m(4, 3), dim=1), "tensordot": lambda f, m: f(m(4, 4), m(4, 4), dims=1),
    "index_put": _index_put, "index_add": lambda f, m: f(m(4), 0, _labels(m, 0, 1), m(2)),
    "scatter": lambda f, m: f(m(4), 0, _labels(m, 0, 1), m(2)),
    "masked_scatter": lambda f, m: f(m(4), torch.ones(4, dtype=torch.bool, device=m.device), m(4)),
    "index_copy": lambda f, m: f(m(4), 0, _labels(m, 0, 1), m(2)),
    "scatter_add": lambda f, m: f(m(4), 0, _labels(m, 0, 1), m(2)),
    "grid_sample": lambda f, m: f(m(1, 2, 4, 4), m(1, 4, 4, 2), align_corners=False),
    "cat": lambda f, m: f([m(4), m(4)]), "stack": lambda f, m: f([m(4), m(4)]),
    "stft": lambda f, m: f(m(16), 8, window=torch.ones(8, device=m.device), return_complex=True),
}  # fmt: skip
