"""AdamW in one pass: its kernels equal an independent reference bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.native_kernels import changed_terms_are_seen
from penstock.errors import ConfigError
from penstock.kernels import adamw
from penstock.kernels.adamw import Batch, Form, Hyper, adamw_, form_on
from penstock.kernels.has_triton import have_triton
from penstock.optim import EMA
from penstock.optim.one_pass import OnePassAdamW

HYPER = Hyper(lr=3e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)


def bits_of(value: Tensor) -> Tensor:
    return value.view(torch.int32)


def test_forms_are_chosen_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert form_on("fused", cpu) == "fused"
    for there, form in ((True, "native"), (False, "fused")):
        monkeypatch.setattr(adamw, "has_adamw", lambda there=there: there)
        assert form_on("auto", cpu) == form
    with pytest.raises(ConfigError, match="it could not be compiled; use 'auto'"):
        form_on("native", cpu)
    with pytest.raises(ConfigError, match="the weights are on cuda; use 'auto'"):
        form_on("native", torch.device("cuda"))
    assert form_on("auto", torch.device("cuda")) == ("triton" if have_triton() else "fused")
    with pytest.raises(ConfigError, match="no form 'best'"):
        form_on("best", cpu)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"needs Triton and a CUDA device, and .*; use 'auto'"):
        form_on("triton", cpu)
    assert form_on("auto", torch.device("meta")) == "fused"


# -- batches


def make_batch(
    sizes: list[int], dtype: torch.dtype, seed: int = 0, device: str = "cpu", *,
    copies: torch.dtype | None = None, averages: bool = False,
) -> Batch:  # fmt: skip
    """fp32 weights, with copies of a type and averages if these are asked for."""
    generator = torch.Generator().manual_seed(seed)

    def random(size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    weights = [random(size) for size in sizes]
    return Batch(
        weights,
        [random(size).to(dtype) for size in sizes],
        [0.1 * random(size) for size in sizes],
        [0.1 * random(size).square() for size in sizes],
        [torch.tensor(float(age), device=device) for age in range(len(sizes))],
        None if copies is None else [weight.to(copies) for weight in weights],
        [random(size) for size in sizes] if averages else None,
    )


def tensors_of(batch: Batch) -> list[Tensor]:
    parts = (
        batch.weights, batch.gradients, batch.exp_avgs, batch.exp_avg_sqs, batch.steps, batch.copies,
        batch.averages,
    )  # fmt: skip
    return [tensor.clone() for part in parts for tensor in part or ()]


def reference_step(batch: Batch, hyper: Hyper, scale: float | None) -> tuple[list[Tensor], ...]:
    """AdamW in numpy's fp32, written anew: every operation rounded once, as our kernels promise."""
    import numpy as np

    one = np.float32
    values, firsts, seconds = [], [], []
    for value_, gradient_, first_, second_, step in zip(
        batch.weights, batch.gradients, batch.exp_avgs, batch.exp_avg_sqs, batch.steps
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
    dtype: torch.dtype, device: str, *, scale: float | None, maximize: bool = False, beta1: float = 0.9,
    copies: torch.dtype | None = None, averages: bool = False, form: Form = "triton",
) -> None:  # fmt: skip
    hyper = Hyper(HYPER.lr, beta1, HYPER.beta2, HYPER.eps, HYPER.weight_decay, maximize)
    sizes = [4096, 2050, 1, 16, 33, 2048]
    batch = make_batch(sizes, dtype, device=device, copies=copies, averages=averages)
    old_averages = [average.clone() for average in batch.averages or ()]
    gradients = [gradient.clone() for gradient in batch.gradients]
    expected = reference_step(batch, hyper, scale)
    for found in (1.0, 0.0) if scale is not None else (None,):
        before = tensors_of(batch)
        adamw_(
            batch, hyper, form=form, average_part=PART,
            grad_scale=None if scale is None else torch.tensor(scale, device=device),
            found_inf=None if found is None else torch.tensor(found, device=device),
        )  # fmt: skip
        if found:  # an overflow: nothing at all changes, counters included
            assert all(map(torch.equal, before, tensors_of(batch)))
    for mine, theirs in zip((batch.weights, batch.exp_avgs, batch.exp_avg_sqs), expected):
        for a, b in zip(mine, theirs):
            if form != "fused":
                assert torch.equal(bits_of(a.cpu()), bits_of(b))
            else:
                torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-6)
    for copy, weight in zip(batch.copies or (), batch.weights):
        assert torch.equal(copy, weight.to(copies))
    for average, old, weight in zip(batch.averages or (), old_averages, batch.weights):
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
KERNEL = "adamw"
MUTANTS = [
    (KERNEL, "tl.div_rn(gradient, tl.load(grad_scale))", "gradient"),
    (KERNEL, "value = value * decay", "value = value"),
    (KERNEL, "if overflow == 0.0", "if overflow >= 0.0"),
    (KERNEL, "average + average_part * (value - average)", "average_part * value"),
    (KERNEL, "narrow(value, tl.bfloat16)", "narrow(value - part1, tl.bfloat16)"),
]


def check(device: str, form: Form = "triton") -> None:
    for case in CASES:
        check_against_reference(device=device, form=form, **case)
    check_averages_of_a_model(device, form)
    check_unaligned(device, form)
    check_many_steps(device, form)


def check_averages_of_a_model(device: str, form: Form) -> None:
    """The optimizer's launch moves averages as `EMA.update` does, but for those that it may skip."""
    averages = []
    for every_step in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7, bias=False), torch.nn.Linear(7, 3)).to(device)
        model[1].bias.requires_grad_(False)
        optimizer = OnePassAdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, fused=True)
        optimizer.form = form
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


@pytest.mark.parametrize("case", [1, 4, 5])
def test_torchs_kernel_rounds_copies_and_moves_averages_too(case: int) -> None:
    check_against_reference(device="cpu", form="fused", **CASES[case])


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
    for mine, theirs in zip(batch.weights, other.weights):
        torch.testing.assert_close(mine, theirs)


def test_native_equals_the_reference_bit_by_bit_in_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not adamw.has_adamw():
        pytest.skip("there is no C++ compiler")
    for threads in (1, 5):
        monkeypatch.setattr(adamw, "threads_for", lambda _, threads=threads: threads)
        check("cpu", "native")


NATIVE_MUTANTS = (
    ("/ h.scale * h.sign", "* h.sign"), ("/ h.scale * h.sign", "/ h.scale"), ("w = w * h.decay;", ""),
    ("if (stops && *stops != 0) return;", ""), ("(w - t.average[i]) * h.average_part", "w * h.average_part"),
    ("if (copies) put(t.copy[i], w);", "if (copies) put(t.copy[i], w - h.part1);"),
    ("h.part2 * g * g", "h.part2 * (g * g)"),
    ("std::min(to - start, sizes[i])", "std::min(to - start, sizes[i] - 1)"),
)  # fmt: skip


test_a_changed_term_of_the_native_kernel_is_seen = changed_terms_are_seen(
    "adamw", NATIVE_MUTANTS, [adamw], lambda: check("cpu", "native")
)
