"""A bf16 weight and its remainder are an fp32 number, bit by bit; kernels equal an independent reference."""

from __future__ import annotations

import ctypes
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.native_kernels import assert_changes_are_seen
from helpers.triton_kernels import compile_for, interpret, needs_triton
from penstock.errors import ConfigError
from penstock.kernels import remainder_adamw
from penstock.kernels.remainder_adamw import (
    Batch,
    Form,
    Hyper,
    adamw_,
    form_on,
    have_triton,
    join,
    split,
)
from penstock.optim import EMA, RemainderAdamW

HYPER = Hyper(lr=3e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)


def bits_of(value: Tensor) -> Tensor:
    return value.view(torch.int32)


def lower_halves() -> Tensor:
    """Patterns of the lower 16 bits: all near the edges and the tie, powers of two, and random ones; (K)."""
    near = [edge + d for edge in (0, 0x8000, 0x10000) for d in range(-24, 25)]
    powers = [(1 << k) + d for k in range(16) for d in (-1, 0, 1)]
    random = torch.randint(0, 0x10000, (128,)).tolist()
    return torch.tensor(sorted({pattern & 0xFFFF for pattern in near + powers + random}), dtype=torch.int64)


def all_upper_halves(lower: Tensor) -> Tensor:
    """fp32 numbers with each of the 65,536 upper halves and each of the lower ones; (65536, K)."""
    patterns = (torch.arange(0x10000).view(-1, 1) << 16) | lower
    return patterns.to(torch.int32).view(torch.float32)


def test_round_trip_is_exact_for_every_upper_half() -> None:
    lower = lower_halves()
    assert len(lower) > 200
    assert {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF} <= set(lower.tolist())
    for part in lower.split(32):
        value = all_upper_halves(part)
        weight, remainder = split(value)
        back = join(weight, remainder)
        number = ~value.isnan()
        assert int(number.sum()) == (2 * 255 * 128 * len(part)) + 2 * int((part == 0).sum())
        assert torch.equal(bits_of(back)[number], bits_of(value)[number])
        # One NaN stands for all; where it is, and where infinities are, does not change.
        assert torch.equal(back.isnan(), value.isnan())
        assert torch.equal(weight.isnan(), value.isnan())


def test_round_trip_is_exact_for_every_lower_half() -> None:
    """All 65,536 remainders: at zero, the least and greatest normal numbers, both signs, and some in between."""
    upper = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x4049, 0x7F7E, 0x7F7F]
    for high in [*upper, *(pattern | 0x8000 for pattern in upper)]:
        patterns = (torch.tensor(high) << 16) | torch.arange(0x10000)
        value = patterns.to(torch.int32).view(torch.float32)
        weight, remainder = split(value)
        assert torch.equal(bits_of(join(weight, remainder)), bits_of(value))
        assert remainder.unique().numel() == 0x10000


def test_weights_are_rounded_to_nearest_with_ties_away_from_zero() -> None:
    value = all_upper_halves(torch.tensor([0, 1, 0x7FFF, 0x8001, 0xFFFF]))
    value = value[:-1][(~value[:-1].isnan()).all(dim=1)]
    # Off ties there is one nearest number, so torch's own cast, which breaks ties otherwise, must agree.
    assert torch.equal(split(value)[0], value.bfloat16())
    ties = all_upper_halves(torch.tensor([0x8000]))[:, 0]
    ties = ties[~ties.isnan()]
    weight, remainder = split(ties)
    up = torch.nextafter(ties, ties.sign() * float("inf")).bfloat16()
    assert torch.equal(weight, up)
    assert (weight.float().abs() > ties.abs()).all()
    assert (remainder == -0x8000).all()


def test_the_rounding_is_half_as_far_off_as_truncation() -> None:
    value = torch.randn(100_000)
    rounded = (split(value)[0].float() - value).abs().mean()
    truncated = ((bits_of(value) & -0x10000).view(torch.float32) - value).abs().mean()
    assert 0.48 < (rounded / truncated).item() < 0.52


@pytest.mark.parametrize(
    ("value", "weight", "remainder"),
    [
        (0.0, 0.0, 0),
        (-0.0, -0.0, 0),
        (2.0**-149, 0.0, 1),
        (-(2.0**-149), -0.0, 1),
        (2.0**-134, 2.0**-133, -0x8000),  # half of bf16's least subnormal is a tie, and goes up
        (1.0, 1.0, 0),
        (1.0 + 2.0**-8, 1.0 + 2.0**-7, -0x8000),
        (-1.0 - 2.0**-8, -1.0 - 2.0**-7, -0x8000),
        (float("inf"), float("inf"), 0),
        (-float("inf"), -float("inf"), 0),
    ],
)
def test_known_pairs(value: float, weight: float, remainder: int) -> None:
    got = split(torch.tensor([value]))
    assert got[1].item() == remainder
    assert struct.pack("f", got[0].item()) == struct.pack("f", weight)
    assert struct.pack("f", join(*got).item()) == struct.pack("f", value)


def test_what_exceeds_bf16_is_infinite_to_the_model_and_exact_in_the_pair() -> None:
    edge = float(Fraction(2) ** 128 - Fraction(2) ** 119)  # half-way from bf16's greatest number to 2^128
    greatest = torch.finfo(torch.float32).max
    below = torch.nextafter(torch.tensor([edge]), torch.tensor([0.0]))
    values = torch.cat([below, torch.tensor([edge, greatest])])
    for sign in (1.0, -1.0):
        weight, remainder = split(sign * values)
        assert weight.isinf().tolist() == [False, True, True]
        assert (weight.float().sign() == sign).all()
        assert torch.equal(join(weight, remainder), sign * values)


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0x7F800001, 0x7FFF8000, -1, -0x7FFFFF, 0x7FC00000])
def test_no_nan_becomes_a_number(pattern: int) -> None:
    """0x7FFFFFFF is what GPUs make; its integer would round up to minus zero."""
    weight, remainder = split(torch.tensor([pattern], dtype=torch.int32).view(torch.float32))
    assert weight.isnan().all()
    assert bits_of(join(weight, remainder)).item() == 0x7FC00000


def test_shapes_and_strides_are_kept_and_arguments_are_left_alone() -> None:
    value = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    before = value.clone()
    weight, remainder = split(value)
    assert weight.shape == remainder.shape == value.shape
    assert torch.equal(join(weight, remainder), before)
    assert torch.equal(value, before)
    assert join(*split(torch.tensor(0.1))).shape == ()
    assert join(*split(torch.empty(0, 3))).shape == (0, 3)


def test_other_types_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"float64; convert it first"):
        split(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ConfigError, match="int16 remainders of one shape"):
        join(torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int16))
    with pytest.raises(ConfigError, match="float16"):
        join(torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.int16))


def test_forms_are_chosen_by_device_and_never_in_silence(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    assert form_on("fused", cpu) == "fused"
    for there, form in ((True, "native"), (False, "fused")):
        monkeypatch.setattr(remainder_adamw, "has_adamw", lambda there=there: there)
        assert form_on("auto", cpu) == form
    with pytest.raises(ConfigError, match="it could not be compiled; use 'auto'"):
        form_on("native", cpu)
    with pytest.raises(ConfigError, match="the weights are on cuda; use 'auto'"):
        form_on("native", torch.device("cuda"))
    if not have_triton():
        remainder_adamw._say_once.cache_clear()
        assert form_on("auto", torch.device("cuda")) == "fused"
        assert "reads more memory" in caplog.text
    with pytest.raises(ConfigError, match="no form 'best'"):
        form_on("best", cpu)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"needs Triton and a CUDA device, and .*; use 'auto'"):
        form_on("triton", cpu)
    with pytest.raises(ConfigError, match=r"no fused AdamW on meta.*; use an fp32 copy"):
        form_on("auto", torch.device("meta"))


# -- batches


def make_batch(
    sizes: list[int],
    dtype: torch.dtype,
    seed: int = 0,
    device: str = "cpu",
    *,
    copies: torch.dtype | None = None,
    averages: bool = False,
) -> Batch:
    """Weights with remainders, or fp32 ones with copies of a type."""
    generator = torch.Generator().manual_seed(seed)

    def random(size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    pairs = [split(random(size)) for size in sizes]
    return Batch(
        [weight if copies is None else join(weight, remainder) for weight, remainder in pairs],
        None if copies is not None else [remainder for _, remainder in pairs],
        [random(size).to(dtype) for size in sizes],
        [0.1 * random(size) for size in sizes],
        [0.1 * random(size).square() for size in sizes],
        [torch.tensor(float(age), device=device) for age in range(len(sizes))],
        None if copies is None else [join(*pair).to(copies) for pair in pairs],
        [random(size) for size in sizes] if averages else None,
    )


def fp32_of(batch: Batch) -> list[Tensor]:
    if batch.remainders is None:
        return batch.weights
    return [join(weight, remainder) for weight, remainder in zip(batch.weights, batch.remainders)]


def tensors_of(batch: Batch) -> list[Tensor]:
    parts = (
        batch.weights, batch.remainders, batch.gradients, batch.exp_avgs, batch.exp_avg_sqs, batch.steps, batch.copies,
        batch.averages,
    )  # fmt: skip
    return [tensor.clone() for part in parts for tensor in part or ()]


def test_pieces_and_packs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are cut and small ones joined; with pieces of 64 nearly every way of cutting occurs."""
    sizes = [200, 64, 1, 63, 128, 5, 7, 65]
    whole, cut = make_batch(sizes, torch.bfloat16), make_batch(sizes, torch.bfloat16)
    adamw_(whole, HYPER, form="fused")
    monkeypatch.setattr("penstock.kernels.remainder_adamw._PIECE", {"cpu": 64})
    adamw_(cut, HYPER, form="fused")
    assert all(map(torch.equal, tensors_of(whole), tensors_of(cut)))
    assert [step.item() for step in cut.steps] == [float(age + 1) for age in range(len(sizes))]


def test_fused_temporaries_stay_small() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and "empty" in str(func):
                largest = max(largest, out.numel())
            return out

    batch = make_batch([3 << 19], torch.bfloat16)
    with Watch():
        adamw_(batch, HYPER, form="fused")
    assert 0 < largest <= 1 << 18


def reference_step(batch: Batch, hyper: Hyper, scale: float | None) -> tuple[list[Tensor], ...]:
    """AdamW in numpy's fp32, written anew: every operation rounded once, as our kernels promise."""
    import numpy as np

    one = np.float32
    values, firsts, seconds = [], [], []
    for value_, gradient_, first_, second_, step in zip(
        fp32_of(batch), batch.gradients, batch.exp_avgs, batch.exp_avg_sqs, batch.steps
    ):
        age = step.item() + 1
        value, gradient = value_.cpu().numpy(), gradient_.float().cpu().numpy()
        first, second = first_.cpu().numpy(), second_.cpu().numpy()
        if scale is not None:
            gradient = gradient / one(scale)
        if hyper.maximize:
            gradient = -gradient
        value = value * one(1 - hyper.lr * hyper.weight_decay)
        first = first + one(1 - hyper.beta1) * (gradient - first)
        second = second * one(hyper.beta2) + one(1 - hyper.beta2) * gradient * gradient
        root = one((1 - hyper.beta2**age) ** 0.5)
        step_size = one(hyper.lr / (1 - hyper.beta1**age))
        value = value - (step_size * first) / (np.sqrt(second) / root + one(hyper.eps))
        values.append(torch.from_numpy(value))
        firsts.append(torch.from_numpy(first))
        seconds.append(torch.from_numpy(second))
    return values, firsts, seconds


def check_against_reference(
    dtype: torch.dtype,
    device: str,
    *,
    scale: float | None,
    maximize: bool = False,
    beta1: float = 0.9,
    copies: torch.dtype | None = None,
    averages: bool = False,
    form: Form = "triton",
) -> None:
    hyper = Hyper(HYPER.lr, beta1, HYPER.beta2, HYPER.eps, HYPER.weight_decay, maximize)
    sizes = [4096, 2050, 1, 16, 33, 2048]
    batch = make_batch(sizes, dtype, device=device, copies=copies, averages=averages)
    old_averages = [average.clone() for average in batch.averages or ()]
    gradients = [gradient.clone() for gradient in batch.gradients]
    expected = reference_step(batch, hyper, scale)
    for found in (1.0, 0.0) if scale is not None else (None,):
        before = tensors_of(batch)
        adamw_(
            batch,
            hyper,
            form=form,
            average_part=PART,
            grad_scale=None if scale is None else torch.tensor(scale, device=device),
            found_inf=None if found is None else torch.tensor(found, device=device),
        )
        if found:  # an overflow: nothing at all changes, counters included
            assert all(map(torch.equal, before, tensors_of(batch)))
    for mine, theirs in zip((fp32_of(batch), batch.exp_avgs, batch.exp_avg_sqs), expected):
        for a, b in zip(mine, theirs):
            if form != "fused":
                assert torch.equal(bits_of(a.cpu()), bits_of(b))
            else:
                torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-6)
    for copy, weight in zip(batch.copies or (), batch.weights):
        assert torch.equal(copy, weight.to(copies))
    for average, old, weight in zip(batch.averages or (), old_averages, fp32_of(batch)):
        assert torch.equal(average, old + (weight - old) * PART)
    if form != "fused":  # torch's divides fp32 gradients in place
        assert all(map(torch.equal, gradients, batch.gradients))
    assert [step.item() for step in batch.steps] == [float(age + 1) for age in range(len(sizes))]


PART = 0.0625
"""How far averages move towards the weights."""
CASES: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16, "scale": None},
    {"dtype": torch.bfloat16, "scale": 1536.0, "averages": True},
    {"dtype": torch.float32, "scale": 3.0, "maximize": True},
    {"dtype": torch.float16, "scale": None, "beta1": 0.0},
    {"dtype": torch.float32, "scale": 3.0, "copies": torch.bfloat16, "averages": True},
    {"dtype": torch.float16, "scale": 2.0, "copies": torch.float16},
]
KERNEL = "remainder_adamw"
MUTANTS = [
    (KERNEL, "tl.div_rn(gradient, tl.load(grad_scale))", "gradient"),
    (KERNEL, "value = value * decay", "value = value"),
    (KERNEL, "if overflow == 0.0", "if overflow >= 0.0"),
    (KERNEL, "average + average_part * (value - average)", "average_part * value"),
    (KERNEL, "narrow(value, tl.bfloat16)", "narrow(value - part1, tl.bfloat16)"),
    (KERNEL, "(bits + 0x8000) >> 16", "bits >> 16"),
]


def check(device: str, form: Form = "triton") -> None:
    for case in CASES:
        check_against_reference(device=device, form=form, **case)
    check_averages_of_a_model(device, form)
    check_unaligned(device, form)
    check_nan(device, form)
    check_many_steps(device, form)


def check_averages_of_a_model(device: str, form: Form) -> None:
    """The optimizer's launch moves averages as `EMA.update` does, but for those that it may skip."""
    averages = []
    for every_step in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7, bias=False), torch.nn.Linear(7, 3)).to(device)
        model[0].bfloat16()
        model[1].bias.requires_grad_(False)
        optimizer = RemainderAdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, form=form)
        ema = EMA(model, 0.75, optimizer, every_step=every_step)
        for step in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * step) if parameter.requires_grad else None
            optimizer.found_inf = torch.zeros((), device=device) if step == 2 else None
            before = {name: average.clone() for name, average in ema.state_dict().items()}
            optimizer.step()
            moved = [not torch.equal(before[name], average) for name, average in ema.state_dict().items()]
            assert moved == [every_step and (step != 2 or device == "cpu")] * 2 + [False]
            ema.update()
        averages.append(ema.state_dict())
    for name, average in averages[0].items():
        torch.testing.assert_close(averages[1][name], average)


def check_unaligned(device: str, form: Form) -> None:
    """Views that start anywhere, and sizes that no vector divides, are found and kept apart."""
    batch, same = (
        make_batch([64, 48], torch.bfloat16, device=device),
        make_batch([64, 48], torch.bfloat16, device=device),
    )
    shifted = torch.empty(65, dtype=torch.bfloat16, device=device)[1:]
    shifted.copy_(batch.gradients[0])
    batch.gradients[0] = shifted
    assert shifted.data_ptr() % 16 != 0
    adamw_(batch, HYPER, form=form)
    adamw_(same, HYPER, form=form)
    assert all(map(torch.equal, tensors_of(batch), tensors_of(same)))
    assert min(weight._version for weight in batch.weights) > 0, "autograd would not see the update"


def check_nan(device: str, form: Form) -> None:
    """Whatever its payload: 0x7FFFFFFF, which a GPU makes, would be rounded to minus zero."""
    batch = make_batch([16], torch.float32, device=device)
    batch.gradients[0][3] = float("nan")
    bits_of(batch.exp_avgs[0])[7] = 0x7FFFFFFF
    adamw_(batch, HYPER, form=form)
    assert batch.weights[0].isnan().nonzero().flatten().tolist() == [3, 7]
    assert fp32_of(batch)[0].isnan().nonzero().flatten().tolist() == [3, 7]


@pytest.mark.parametrize("case", [1, 4, 5])
def test_torchs_kernel_rounds_copies_and_moves_averages_too(case: int) -> None:
    check_against_reference(device="cpu", form="fused", **CASES[case])
    batch = make_batch([4], torch.float32)
    batch.copies = batch.weights
    with pytest.raises(ConfigError, match="its own half copy"):
        adamw_(batch, HYPER, form="fused")


def test_no_nan_becomes_a_number_in_a_step() -> None:
    check_nan("cpu", "fused")


def check_many_steps(device: str, form: Form) -> None:
    """Against torch's kernel, which contracts products and sums: last places differ, and do not run away."""
    sizes = [2048, 17]
    batch, other = (
        make_batch(sizes, torch.bfloat16, device=device),
        make_batch(sizes, torch.bfloat16, device=device),
    )
    for step in range(32):
        for mine, theirs in zip(batch.gradients, other.gradients):
            mine.copy_(torch.randn(mine.shape, generator=torch.Generator().manual_seed(step)))
            theirs.copy_(mine)
        adamw_(batch, HYPER, form=form)
        adamw_(other, HYPER, form="fused")
    for mine, theirs in zip(fp32_of(batch), fp32_of(other)):
        torch.testing.assert_close(mine, theirs)


def test_native_equals_the_reference_bit_by_bit_in_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not remainder_adamw.has_adamw():
        pytest.skip("there is no C++ compiler")
    for threads in (1, 5):
        monkeypatch.setattr(remainder_adamw, "threads_for", lambda _, threads=threads: threads)
        check("cpu", "native")


NATIVE_MUTANTS = (
    ("/ h.scale * h.sign", "* h.sign"),
    ("/ h.scale * h.sign", "/ h.scale"),
    ("w = w * h.decay;", ""),
    ("if (stops && *stops != 0) return;", ""),
    ("(w - t.average[i]) * h.average_part", "w * h.average_part"),
    ("if (copies) put(half_copies[i], w);", "if (copies) put(half_copies[i], w - h.part1);"),
    ("(bits + 0x8000u) >> 16", "bits >> 16"),
    ("w != w ? 0x7fc00000u : bits", "bits"),
    ("h.part2 * g * g", "h.part2 * (g * g)"),
    ("std::min(to - start, sizes[i])", "std::min(to - start, sizes[i] - 1)"),
)


@pytest.mark.slow
def test_a_changed_term_of_the_native_kernel_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not remainder_adamw.has_adamw():
        pytest.skip("there is no C++ compiler")

    def use(mutant: ctypes.CDLL) -> None:
        monkeypatch.setattr(remainder_adamw, "library", lambda _: mutant)

    changes = [("adamw.cpp", *change) for change in NATIVE_MUTANTS]
    assert_changes_are_seen("adamw", changes, use, lambda: check("cpu", "native"), tmp_path)


@pytest.mark.slow
@needs_triton
def test_triton_equals_the_reference_bit_by_bit_in_the_interpreter_and_mutants_do_not() -> None:
    interpret(__file__)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    "architecture",
    [90, pytest.param(80, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)],
)
def test_triton_compiles_without_spilling_and_reads_in_vectors(
    architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from penstock.kernels.triton import remainder_adamw as module

    kernel = module.remainder_adamw_kernel
    types = dict.fromkeys(kernel.arg_names, "fp32") | {"table": "*i64", "gradients": "*i64", "blocks": "*i32"}
    types |= {"grad_scale": "*fp32", "found_inf": "*fp32"}
    flags = {"HAS_SCALE": True, "HAS_FOUND": True, "MAXIMIZE": False, "BLOCK": module.BLOCK}
    # Loads and stores of 16 bytes in each thread, of 16 elements.
    cases = [
        ("bf16", True, "none", False, True, 14, 12),
        ("bf16", True, "none", True, True, 18, 16),
        ("fp32", False, "bf16", True, True, 20, 18),
        ("fp16", True, "none", False, False, 0, 0),
    ]
    for gradient, remainder, copy, averages, aligned, loads, stores in cases:
        constants = flags | {
            "GRADIENT": gradient,
            "HAS_REMAINDER": remainder,
            "COPY": copy,
            "AVERAGES": averages,
        }
        count = compile_for(
            architecture,
            kernel,
            types,
            constants | {"ALIGNED": aligned},
            num_warps=module.WARPS,
            single=0 if aligned else None,
            enable_fp_fusion=False,
        )
        contracted = count(r"fma[.]rn[.]f32|div[.]full|approx[.]f")
        assert contracted == 0, f"{gradient}: an operation is not rounded by itself"
        if aligned:
            # What an architecture reads 32 bytes at a time counts as two.
            wide = [count(rf"{how}[.]global\S*[.]v4[.]b32") for how in ("ld", "st")]
            wider = [count(rf"{how}[.]global\S*[.](v8[.]b32|v4[.]b64)") for how in ("ld", "st")]
            assert [one + 2 * two for one, two in zip(wide, wider)] == [loads, stores]
            assert count(r"st[.]global\S*[.]b16") == 0


@pytest.mark.gpu
@needs_triton
def test_triton_equals_the_reference_bit_by_bit_on_a_gpu() -> None:
    check("cuda")
