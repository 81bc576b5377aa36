"""The op lists themselves, and torch.autocast's own behaviour: plain data, printed as docs/reference/op-lists.md.

Each group says why, and tools/op_claims.py measures that reason, for each operation and type, against
fp64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.torch_version import TorchVersion, __version__

from penstock.config.formats import HALVES, HalfDtype

Policy = Literal["half", "fp32", "promote", "keep", "banned"]
POLICIES: tuple[Policy, ...] = ("half", "fp32", "promote", "keep", "banned")

_F = "torch.nn.functional."


def _in(place: str, names: str) -> tuple[str, ...]:
    return tuple(place + name for name in names.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Operations that one list holds for one reason."""

    key: str
    """Names the reason in tests."""
    policy: Policy
    names: tuple[str, ...]
    reason: str
    dtypes: tuple[HalfDtype, ...] = HALVES
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Devices on which the group is in the default lists. A reason that holds on both may still not be worth watching
    every call for; the reason then says so."""


PRODUCTS = (
    _in(_F, "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
    + _in("torch.", "matmul mm bmm addmm addbmm baddbmm")
    + _in(_F, "scaled_dot_product_attention")
)
_CUDA_PRODUCTS = _in("torch.", "mv addmv addr einsum chain_matmul linalg.multi_dot") + _in(
    "torch.", "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
)
_CUDA_PROMOTED = _in("torch.", "addcdiv addcmul atan2 cross dot vdot tensordot index_put scatter_add") + _in(
    _F, "bilinear grid_sample"
)
_LARGE = _in("torch.", "exp expm1 pow cosh sinh reciprocal") + _in(
    "torch.", "sum cumsum prod cumprod norm dist linalg.vector_norm linalg.matrix_norm"
)  # fmt: skip
_NORMS = _in(_F, "layer_norm group_norm rms_norm")
_SUMMED_LOSSES = _in(
    _F,
    "mse_loss l1_loss smooth_l1_loss huber_loss cross_entropy nll_loss kl_div poisson_nll_loss hinge_embedding_loss "
    "soft_margin_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss triplet_margin_loss "
    "cosine_embedding_loss binary_cross_entropy_with_logits",
)

CPU_PROMOTED = _in(
    "torch.", "mv addmv dot vdot lerp index_add index_put masked_scatter scatter scatter_add"
) + _in(_F, "bilinear")
CPU_WHOLE = _in("torch.", "inner tensordot linalg.multi_dot")
"""Operations that torch composes from matrix products on a CPU, after it checks that the types are the same."""

GROUPS: tuple[Group, ...] = (
    Group(
        key="products", policy="half", names=PRODUCTS,
        reason="Matrix products are what half-width units are for. They accumulate in fp32 and round once, at the end.",
    ),
    Group(
        key="cuda_products", policy="half", names=_CUDA_PRODUCTS, devices=("cuda",),
        reason="Matrix products too. On a CPU they are made of the products above, or too rare to watch each call for.",
    ),
    Group(
        key="whole_products", policy="half", names=CPU_WHOLE, devices=("cpu",),
        reason=(
            "Made of the products above, but torch refuses mixed arguments before it comes to these. Registered with "
            "torch, not watched."
        ),
    ),
    Group(
        key="range", policy="fp32", names=_LARGE, dtypes=("fp16",),
        reason="The result passes 65,504 for ordinary inputs.",
    ),
    Group(
        key="small_probabilities", policy="fp32", names=_in(_F, "softmax softmin"), dtypes=("fp16",),
        reason="Probabilities under 6e-8 become 0, and those under 6e-5 lose bits.",
    ),
    Group(
        key="log_softmax", policy="fp32", names=_in(_F, "log_softmax"), dtypes=("fp16",),
        reason=(
            "The backward pass takes exp of the rounded result, which multiplies its rounding error by its size; small "
            "gradients also vanish."
        ),
    ),
    Group(
        key="log_softmax_bf16", policy="fp32", names=_in(_F, "log_softmax"), dtypes=("bf16",),
        devices=("cuda",),
        reason=(
            "The backward pass takes exp of the rounded result, which multiplies its rounding error by its size. On a "
            "CPU torch.autocast has cross_entropy, which holds nearly all uses, and a log_softmax by itself is not "
            "worth watching every call for."
        ),
    ),
    Group(
        key="norm_gradients", policy="fp32", names=_NORMS, dtypes=("fp16",),
        reason=(
            "The forward pass is exact to the final rounding, but gradients of weight and bias are sums of scaled "
            "gradients over all tokens, and pass 65,504."
        ),
    ),
    Group(
        key="losses_fp16", policy="fp32", names=_SUMMED_LOSSES, dtypes=("fp16",),
        reason="A loss summed over a batch passes 65,504.",
    ),
    Group(
        key="losses_bf16", policy="fp32", names=_SUMMED_LOSSES, dtypes=("bf16",),
        reason="A loss of 8 bits is off by up to 0.4 %, which hides what a step or a seed changes.",
    ),
    Group(
        key="running", policy="fp32", names=_in("torch.", "cumsum cumprod"), dtypes=("bf16",),
        devices=("cuda",),
        reason="CUDA's scan adds up in the type of its input, so errors grow with length. A CPU adds up in fp32.",
    ),
    Group(
        key="prod", policy="fp32", names=_in("torch.", "prod"), dtypes=("bf16",),
        reason="A CPU rounds after each factor, so errors grow with their number.",
    ),
    Group(
        key="keep", policy="keep", names=(*_NORMS, *_in(_F, "softmax")), dtypes=("bf16",), devices=("cuda",),
        reason=(
            "The kernel computes in fp32 and rounds once, at the end, and bf16 has the range: an fp32 copy of the "
            "input and an fp32 result only cost time and memory. On a CPU torch.autocast widens none of them, and "
            "gradients of bf16 weights would be added up in bf16."
        ),
    ),
    Group(
        key="promote_cuda", policy="promote", names=_CUDA_PROMOTED, devices=("cuda",),
        reason="Takes arguments of one type only, so mixed ones become the widest.",
    ),
    Group(
        key="promote_cpu", policy="promote", names=_in("torch.", "cat stack index_copy"), devices=("cpu",),
        reason="Mixed arguments become the widest.",
    ),
    Group(
        key="promote_registered", policy="promote", names=CPU_PROMOTED, devices=("cpu",),
        reason=(
            "Takes arguments of one type only, as weights and activations seldom are, so mixed ones become the widest. "
            "Registered with torch, not watched."
        ),
    ),
    Group(
        key="banned", policy="banned", names=_in(_F, "binary_cross_entropy"), dtypes=("fp16",),
        reason="A probability near 1 rounds to 1 in a half type, whose logarithm says the wrong loss and no gradient.",
    ),
    Group(
        key="banned_cuda", policy="banned", names=_in(_F, "binary_cross_entropy"), dtypes=("bf16",),
        devices=("cuda",),
        reason=(
            "A probability near 1 rounds to 1 in a half type, whose logarithm says the wrong loss and no gradient. On "
            "a CPU torch.autocast computes it, in fp32."
        ),
    ),
)  # fmt: skip

BANNED: dict[str, str] = {
    f"{_F}binary_cross_entropy": (
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss were given half-width probabilities: one near 1 "
        "rounds to 1, and its loss and gradient are wrong. Leave out the sigmoid and use "
        "binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, which take half-width logits, or give them "
        "fp32 probabilities."
    )
}

_FFT = _in("torch.fft.", "fft ifft fft2 ifft2 fftn ifftn rfft irfft rfft2 irfft2 rfftn irfftn hfft ihfft")

_CUDA_NORMS = tuple(
    name for name in _NORMS if __version__ >= TorchVersion("2.12") or not name.endswith("rms_norm")
)
"""Norms that torch.autocast runs in fp32 on CUDA; before torch 2.12 not the RMS norm."""

AUTOCAST: dict[str, dict[Policy, tuple[str, ...]]] = {
    "cuda": {
        "half": PRODUCTS + _CUDA_PRODUCTS + _in(_F, "prelu conv_tbc") + _in("torch.", "linalg.vecdot"),
        "fp32": (
            _in("torch.", "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow")
            + _in("torch.", "sum cumsum prod cumprod norm dist linalg.vector_norm linalg.matrix_norm")
            + _in("torch.", "renorm logsumexp cdist native_layer_norm")
            + _in(_F, "softplus pdist cosine_similarity interpolate softmax softmin log_softmax")
            + _CUDA_NORMS
            + _SUMMED_LOSSES
        ),
        "promote": _CUDA_PROMOTED,
        "banned": _in(_F, "binary_cross_entropy"),
    },
    "cpu": {
        "half": PRODUCTS + _in(_F, "prelu conv_tbc") + _in("torch.", "linalg.vecdot einsum chain_matmul")
        + _in("torch.", "linalg.multi_dot inner tensordot"),
        "fp32": (
            _in("torch.", "prod cdist trace quantile nanquantile stft")
            + _in(_F, "avg_pool3d adaptive_avg_pool3d max_pool3d grid_sample ctc_loss binary_cross_entropy")
            + _SUMMED_LOSSES
            + _FFT
        ),
        "promote": _in("torch.", "cat stack index_copy"),
    },
}  # fmt: skip
"""How torch.autocast treats the public function of each operation, by device; for an operation made of others, such as
cross_entropy on CUDA, this follows from its parts. tests/precision/lists/test_autocast.py runs each. Not listed:
in-place forms, which keep the type they write to, and linear algebra's factorisations, which run in fp32 on a CPU."""
