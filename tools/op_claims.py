"""Each reason in the op lists is measured: an operation in a half type against fp64 on the same inputs.

    python -m pytest tools/op_claims.py        after each update of torch: they are facts about torch, not about ours

Errors are in units of the type's rounding, u = 2^-8 for bf16 and 2^-11 for fp16: a result that is exact but for the
final rounding is at most 1 away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.op_samples import Make, call
from penstock.config.formats import HalfDtype
from penstock.precision.lists.table import GROUPS

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ROUNDING = {"fp16": 2.0**-11, "bf16": 2.0**-8}
FINITE = 65504.0
# On a CPU torch computes these in fp32 or not at all.
NO_HALF_KERNEL = ("torch.nn.functional.multi_margin_loss", "torch.nn.functional.multilabel_margin_loss")
Op = Callable[[Tensor], Tensor]


def names(key: str) -> list[str]:
    """Last names of a group's operations."""
    return [name for group in GROUPS if group.key == key for name in group.names]


def function(name: str) -> Any:
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


def error(found: Tensor, exact: Tensor, dtype: HalfDtype) -> float:
    """Largest relative error of an element, in roundings."""
    relative = (found.double() - exact).abs() / exact.abs().clamp_min(1e-30)
    return float(relative.max()) / ROUNDING[dtype]


def of_norm(found: Tensor, exact: Tensor, dtype: HalfDtype) -> float:
    """Error relative to the norm, in roundings."""
    return float((found.double() - exact).norm() / exact.norm()) / ROUNDING[dtype]


def both(
    op: Op, x: Tensor, dtype: HalfDtype, gradient: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Result and gradient in the half type, and in fp64 on the same numbers."""
    half = x.to(DTYPES[dtype]).requires_grad_()
    exact = half.detach().double().requires_grad_()
    y, z = op(half), op(exact)
    gradient = torch.randn_like(z) if gradient is None else gradient
    gradient = gradient.to(y.dtype)
    y.backward(gradient)
    z.backward(gradient.double())
    assert half.grad is not None
    assert exact.grad is not None
    return y.detach(), half.grad, z.detach(), exact.grad


def rounded(x: Tensor, dtype: HalfDtype) -> Tensor:
    return x.to(DTYPES[dtype]).double()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", names("products"))
def test_products_accumulate_wider_than_their_type(name: str, dtype: HalfDtype) -> None:
    """512 ones and a last one of half a rounding: an accumulator of the type's own width would lose count."""
    if "conv" in name:
        make = Make("cpu", DTYPES[dtype])
        assert call(name, make).dtype == DTYPES[dtype]
        return
    x = torch.full((1, 640), 1.0, dtype=DTYPES[dtype])
    products: dict[str, Callable[[], Tensor]] = {
        "linear": lambda: F.linear(x, x),
        "matmul": lambda: torch.matmul(x, x.T),
        "mm": lambda: torch.mm(x, x.T),
        "bmm": lambda: torch.bmm(x[None], x.T[None]),
        "addmm": lambda: torch.addmm(torch.zeros_like(x[:, :1]), x, x.T),
        "addbmm": lambda: torch.addbmm(torch.zeros_like(x[:, :1]), x[None], x.T[None]),
        "baddbmm": lambda: torch.baddbmm(torch.zeros_like(x[None, :, :1]), x[None], x.T[None]),
        "scaled_dot_product_attention": lambda: (
            640 * F.scaled_dot_product_attention(x, x.expand(640, -1), x.expand(640, -1))
        ),
    }
    assert float(products[name.rpartition(".")[2]]().flatten()[0]) == 640.0
    running = torch.zeros((), dtype=DTYPES[dtype])
    for _ in range(640):
        running += 1.0
    assert dtype == "fp16" or float(running) == 256.0, "adding up in bf16 stops at 256"


LARGE: dict[str, Tensor] = {
    "exp": torch.tensor([12.0]),
    "expm1": torch.tensor([12.0]),
    "cosh": torch.tensor([12.0]),
    "sinh": torch.tensor([12.0]),
    "pow": torch.tensor([300.0]),
    "reciprocal": torch.tensor([1e-5]),
    "sum": torch.full((4096,), 20.0),
    "cumsum": torch.full((4096,), 20.0),
    "prod": torch.full((20,), 2.0),
    "cumprod": torch.full((20,), 2.0),
    "norm": torch.full((4096,), 2000.0),
    "dist": torch.full((4096,), 2000.0),
    "vector_norm": torch.full((4096,), 2000.0),
    "matrix_norm": torch.full((64, 64), 2000.0),
}


@pytest.mark.filterwarnings("ignore:torch.norm is deprecated")
@pytest.mark.parametrize("name", names("range"))
def test_results_pass_the_range_of_fp16_and_not_of_bf16(name: str) -> None:
    last = name.rpartition(".")[2]
    x = LARGE[last]
    more: dict[str, tuple[Any, ...]] = {
        "pow": (2,),
        "cumsum": (0,),
        "cumprod": (0,),
        "dist": (torch.zeros_like(x),),
    }
    rest = more.get(last, ())

    def run(dtype: torch.dtype) -> Tensor:
        given = tuple(value.to(dtype) if isinstance(value, Tensor) else value for value in rest)
        found: Tensor = function(name)(x.to(dtype), *given)
        return found.flatten()[-1]

    assert run(torch.float64) > FINITE
    assert run(torch.float16).isinf()
    assert run(torch.bfloat16).isfinite()
    assert run(torch.float32).isfinite()


def test_small_probabilities_vanish_in_fp16_and_not_in_bf16() -> None:
    """Logits 18 apart, as between the best and the other words of a vocabulary."""
    logits = torch.zeros(1, 64)
    logits[0, 0] = 18.0
    for name in names("small_probabilities"):
        sign = -1 if name.endswith("softmin") else 1
        op = function(name)
        half, exact = op(sign * logits.half(), -1), op(sign * logits.double(), -1)
        assert exact[0, 1] > 1e-8
        assert half[0, 1] == 0.0
        assert error(op(sign * logits.bfloat16(), -1), op(sign * logits.double(), -1), "bf16") < 1.0


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_gradient_of_log_softmax_multiplies_its_rounding(dtype: HalfDtype) -> None:
    logits = torch.linspace(-7.0, 2.0, 64).expand(4, 64).contiguous()
    towards_first = torch.zeros(4, 64, dtype=torch.float64)
    towards_first[:, -1] = -1.0
    _, gradient, _, exact = both(lambda x: F.log_softmax(x, -1), logits, dtype, towards_first)
    assert error(gradient, exact, dtype) > 3.0
    single = logits.to(DTYPES[dtype]).float().requires_grad_()
    F.log_softmax(single, -1).backward(towards_first.float())
    assert single.grad is not None
    assert error(single.grad, exact, dtype) < 0.01


def _norm(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return {
        "layer_norm": lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b),
        "rms_norm": lambda x, w, b: F.rms_norm(x, (x.shape[-1],), w, eps=1e-6),
        "group_norm": lambda x, w, b: F.group_norm(x, 4, w, b),
    }[name.rpartition(".")[2]]


@pytest.mark.parametrize("name", names("norm_gradients"))
def test_gradients_of_norms_are_sums_that_pass_the_range_of_fp16(name: str) -> None:
    """4,096 tokens whose gradients, under a loss scale, are 32 each."""
    x = torch.randn(4096, 16)

    def gradient(dtype: torch.dtype) -> Tensor:
        w = torch.ones(16, dtype=dtype, requires_grad=True)
        y = _norm(name)(x.to(dtype), w, torch.zeros_like(w))
        y.backward(32.0 * y.detach().sign())
        assert w.grad is not None
        return w.grad

    assert (gradient(torch.float64) > FINITE).all()
    assert gradient(torch.float16).isinf().all()
    assert gradient(torch.bfloat16).isfinite().all()
    torch.testing.assert_close(gradient(torch.float32).double(), gradient(torch.float64), rtol=1e-5, atol=0.0)


def _weight_gradient(dtype: torch.dtype, device: str) -> Tensor:
    """Of a layer norm over 4,096 tokens that all pull the same way."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 16, generator=generator).to(device, dtype)
    w = torch.ones(16, dtype=dtype, device=device, requires_grad=True)
    y = F.layer_norm(x, (16,), w, torch.zeros_like(w))
    y.backward(y.detach().sign())
    assert w.grad is not None
    return w.grad.double().cpu()


def test_a_cpu_adds_up_gradients_of_bf16_weights_in_bf16() -> None:
    """Why `keep`, which casts a norm's weights to the type of its input, is for CUDA only."""
    exact = _weight_gradient(torch.float64, "cpu")
    assert error(_weight_gradient(torch.bfloat16, "cpu"), exact, "bf16") > 50.0


@pytest.mark.gpu
def test_cuda_adds_them_up_in_fp32() -> None:
    exact = _weight_gradient(torch.float64, "cpu")
    # One rounding at the end, and one of the inputs, which differ by sign and so cancel in part.
    assert error(_weight_gradient(torch.bfloat16, "cuda"), exact, "bf16") < 2.0


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", names("norm_gradients"))
def test_norms_are_exact_to_the_final_rounding(name: str, dtype: HalfDtype) -> None:
    """Inputs with an offset of three deviations, where sums of squares in a half type would be far off."""
    x = torch.randn(32, 256) * 3.0 + 10.0
    w, b = torch.ones(256), torch.zeros(256)

    def op(x: Tensor) -> Tensor:
        return _norm(name)(x, w.to(x.dtype), b.to(x.dtype))

    y, gradient, exact, exact_gradient = both(op, x, dtype)
    assert of_norm(y, exact, dtype) < 1.02 * of_norm(rounded(exact, dtype), exact, dtype)
    # Measured: 0.4 to 0.65 roundings, of which the gradient's own is 0.42 (it is of the mean kept in the type).
    assert of_norm(gradient, exact_gradient, dtype) < 1.0


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("softmax", lambda x: F.softmax(x, -1)),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("silu", F.silu),
    ],
)
def test_fused_bf16_operations_are_exact_to_the_final_rounding(name: str, op: Op) -> None:
    """So none of them is in bf16's fp32 list, and softmax and the norms are spared torch.autocast's widening."""
    y, gradient, exact, exact_gradient = both(op, torch.randn(32, 256) * 3.0, "bf16")
    assert of_norm(y, exact, "bf16") < 1.02 * of_norm(rounded(exact, "bf16"), exact, "bf16")
    # Measured 0.39 to 0.55: softmax's backward pass starts from its rounded result.
    assert of_norm(gradient, exact_gradient, "bf16") < 1.0


@pytest.mark.parametrize("op", [F.gelu, F.silu], ids=["gelu", "silu"])
def test_activations_need_no_fp32_in_fp16_either(op: Op) -> None:
    y, gradient, exact, exact_gradient = both(op, torch.randn(32, 256) * 3.0, "fp16")
    assert of_norm(y, exact, "fp16") < 1.02 * of_norm(rounded(exact, "fp16"), exact, "fp16")
    assert of_norm(gradient, exact_gradient, "fp16") < 0.5


def _loss(
    name: str, dtype: torch.dtype, size: float, reduction: str, through: torch.dtype | None = None
) -> Tensor:
    """A loss over 4,096 samples of about `size` each; the inputs are first rounded to the type `through`."""
    torch.manual_seed(0)
    samples = 4096
    last = name.rpartition(".")[2]
    signs = torch.ones(samples, dtype=dtype)
    x = (size * (1.0 + torch.rand(samples))).to(through or dtype).to(dtype)
    pairs = torch.stack([x, torch.zeros_like(x)], dim=1)
    second = torch.ones(samples, dtype=torch.int64)
    op = function(name)
    if last in ("cross_entropy", "nll_loss", "multi_margin_loss"):
        return op(
            -pairs if last == "nll_loss" else pairs,
            0 * second if last == "nll_loss" else second,
            reduction=reduction,
        )
    if last == "multilabel_margin_loss":
        return op(pairs, torch.stack([second, -second], dim=1), reduction=reduction)
    if last == "margin_ranking_loss":
        return op(-x, torch.zeros_like(x), signs, reduction=reduction)
    if last == "triplet_margin_loss":
        return op(torch.zeros_like(pairs), pairs, torch.zeros_like(pairs), reduction=reduction)
    if last == "cosine_embedding_loss":
        other = torch.stack([-x, torch.rand(samples).to(through or dtype).to(dtype)], dim=1)
        many = 64 if reduction == "sum" else 1  # of at most 2 each
        return op(
            pairs.repeat(many, 1),
            other.repeat(many, 1),
            torch.ones(many * samples, dtype=dtype),
            reduction=reduction,
        )
    if last == "soft_margin_loss":
        return op(-x, signs, reduction=reduction)
    if last == "hinge_embedding_loss":
        return op(x, signs, reduction=reduction)
    if last == "kl_div":
        return op(-x, signs, reduction="batchmean" if reduction == "mean" else reduction)
    if last == "poisson_nll_loss":
        return op(x, torch.zeros_like(x), log_input=False, reduction=reduction)
    if last == "binary_cross_entropy_with_logits":
        return op(x, torch.zeros_like(x), reduction=reduction)
    return op(x, torch.zeros_like(x), reduction=reduction)


@pytest.mark.parametrize("name", names("losses_fp16"))
def test_a_summed_loss_passes_the_range_of_fp16(name: str) -> None:
    assert _loss(name, torch.float64, 24.0, "sum") > FINITE
    if name in NO_HALF_KERNEL:
        with pytest.raises(NotImplementedError, match="Half"):
            _loss(name, torch.float16, 24.0, "sum")
        return
    assert _loss(name, torch.float16, 24.0, "sum").isinf()
    assert _loss(name, torch.float32, 24.0, "sum").isfinite()


@pytest.mark.parametrize("name", names("losses_bf16"))
def test_a_loss_in_bf16_is_rounded_by_what_seeds_differ_in(name: str) -> None:
    """Over eight sizes, the worst is a tenth of a percent off or more; an fp32 loss of the same bf16 inputs is not."""
    if name in NO_HALF_KERNEL:
        with pytest.raises(NotImplementedError, match="BFloat16"):
            _loss(name, torch.bfloat16, 2.3, "mean")
        return
    half, single = [], []
    for step in range(8):
        size = 2.3 + 0.1 * step
        # The same numbers in each type: those that bf16 has.
        exact = _loss(name, torch.float64, size, "mean", through=torch.bfloat16)
        half.append(float((_loss(name, torch.bfloat16, size, "mean") / exact - 1).abs()))
        single.append(
            float((_loss(name, torch.float32, size, "mean", through=torch.bfloat16) / exact - 1).abs())
        )
    assert max(half) > 1e-3
    assert max(single) < 1e-5


def test_running_sums_on_a_cpu_add_up_in_fp32() -> None:
    """Which is why bf16's list has them on CUDA only."""
    x = torch.rand(4, 4096)
    half = x.bfloat16()
    assert error(half.cumsum(-1), half.double().cumsum(-1), "bf16") <= 1.0
    factors = 1.0 + 0.01 * torch.rand(4, 512)
    half = factors.bfloat16()
    assert error(half.cumprod(-1), half.double().cumprod(-1), "bf16") <= 1.0


@pytest.mark.gpu
def test_running_sums_on_cuda_add_up_in_their_own_type() -> None:
    x = torch.rand(4, 4096, device="cuda").bfloat16()
    assert error(x.cumsum(-1), x.double().cumsum(-1), "bf16") > 2.0
    x = (1.0 + 0.01 * torch.rand(4, 512, device="cuda")).bfloat16()
    assert error(x.cumprod(-1), x.double().cumprod(-1), "bf16") > 2.0


def test_a_product_in_bf16_rounds_after_each_factor() -> None:
    x = (1.0 + 0.01 * torch.randn(4, 512)).bfloat16()
    assert error(x.prod(-1), x.double().prod(-1), "bf16") > 10.0
    assert error(x.float().prod(-1), x.double().prod(-1), "bf16") < 0.01


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_half_probability_near_one_says_the_wrong_loss(dtype: HalfDtype) -> None:
    logit = torch.tensor([12.0], dtype=DTYPES[dtype])
    exact = F.binary_cross_entropy_with_logits(logit.double(), torch.zeros(1, dtype=torch.float64))
    probability = logit.sigmoid().float().requires_grad_()
    wrong = F.binary_cross_entropy(probability, torch.zeros(1))
    assert exact < 12.1
    assert wrong == 100.0, "torch's clamp of log(0)"
    right = F.binary_cross_entropy_with_logits(logit.float(), torch.zeros(1))
    torch.testing.assert_close(right.double(), exact, rtol=1e-6, atol=0.0)


def test_every_reason_is_measured() -> None:
    """A new group needs a test here, or a reason that is about another's behaviour and tested in test_autocast.py
    or, of what is registered with torch, in test_op_lists.py.
    """
    assert {group.key for group in GROUPS} == {
        "products", "range", "small_probabilities", "log_softmax", "log_softmax_bf16", "norm_gradients", "losses_fp16",
        "losses_bf16", "running", "prod", "keep", "banned", "banned_cuda",
    } | {"cuda_products", "whole_products", "promote_cuda", "promote_cpu", "promote_registered"}  # fmt: skip
    (kept,) = (group for group in GROUPS if group.key == "keep")
    assert set(kept.names) == {*names("norm_gradients"), "torch.nn.functional.softmax"}


@pytest.mark.parametrize("name", ["log", "log2", "log10", "log1p", "sqrt"])
def test_logarithms_stay_in_fp16_because_they_are_in_range_and_round_once(name: str) -> None:
    """Every positive fp16 number."""
    numbers = torch.arange(1, 2**15, dtype=torch.int16).view(torch.float16)
    numbers = numbers[numbers.isfinite()]
    found = getattr(torch, name)(numbers)
    assert torch.equal(found, getattr(torch, name)(numbers.double()).half())
    assert float(found.abs().max()) < 256
