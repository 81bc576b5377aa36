"""The rates of matrix products, by type and shape."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.formats import FORMATS, PRODUCTS, Dtype, Products
from penstock.config.machine import GemmSample, KernelSample, ProductForm
from penstock.config.plan import Matmul
from penstock.cpu import this_cpu
from penstock.errors import PenstockError
from penstock.kernels.probed_linear import by_onednn
from penstock.planner.rates import ONEDNN, WORTH
from penstock.probe.rates import agreed, seconds, wait
from penstock.process import matmul_precision
from penstock.products.convert import STORED
from penstock.products.fp8 import E4M3, scaled_product
from penstock.products.int8 import integer_product

log = logging.getLogger(__name__)

Shape = tuple[int, int, int]

# (m, k) @ (k, n). Square shapes give the peak. The others are a ViT's: rows of tokens times the weights of the MLP's
# two layers and of attention's three projections, and products so small that their launch costs more than their sums.
_CPU_SHAPES: dict[str, Shape] = {
    "square": (2048, 2048, 2048), "mlp in": (1576, 1536, 384), "mlp out": (1576, 384, 1536),
    "square half": (1024, 1024, 1024), "qkv": (1576, 1152, 384), "tiny": (64, 64, 64),
}  # fmt: skip
_CPU_QUICK = ("square half", "mlp in", "mlp out")
_LAYERS = ("mlp in", "mlp out", "qkv")
"""Shapes whose gradients are measured too, on a CPU."""
_RAGGED = "mlp in"
"""Shape that is also measured with one more output, on a CPU."""
_VOCABULARY: Shape = (128, 32001, 512)
"""Shape of a layer that computes logits, measured on a CPU in the types that such layers use. Its number of outputs is
odd too."""
_CUDA_SHAPES: dict[str, Shape] = {
    "square": (8192, 8192, 8192), "deep": (2048, 2048, 13312), "mlp in": (25216, 3072, 768),
    "mlp out": (25216, 768, 3072), "wide mlp in": (25216, 5120, 1280), "wide mlp out": (25216, 1280, 5120),
    "square half": (4096, 4096, 4096), "qkv": (25216, 2304, 768), "medium": (1024, 1024, 1024),
}  # fmt: skip
_CUDA_QUICK = ("square", "mlp in", "mlp out", "square half")
_LOAD_SECONDS = 60.0
"""Time after which a GPU's clock has settled under its power limit."""
_STORED_ROWS, _STORED_ROWS_QUICK = (1, 8, 128, 1024), (1, 8, 128)
"""Rows of inputs of layers that store their weights: generated tokens, and whole texts and images."""
_STORED_WIDTHS, _STORED_WIDTHS_QUICK = (384, 768), (768,)
"""Widths of models. Three layers of each width are measured: to the same width, to four times the width, and back."""
_READ_SIDE, _READ_BYTES = 2048, 1 << 28
"""Inputs and outputs of layers whose weights are read from memory, and the bytes of all their weights."""
# The first product of each type. A CPU without units for a type can be hundreds of times slower in it, so that large
# shapes would take minutes. This product predicts which ones would take too long, and they are left out. It runs on a
# single thread, because a busy neighbour can slow short products on several threads a hundredfold.
_FIRST_SHAPE: Shape = (256, 256, 256)
_CUDA_FIRST_SHAPE: Shape = (2048, 2048, 2048)
"""On a GPU the product must take long compared with its launch, or the launch would be measured instead."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A way to multiply matrices: its name, how operands are made, and the fp32 setting that it runs under."""

    name: str
    operands: Callable[[Shape, torch.device, torch.Generator], tuple[Any, ...]]
    product: Callable[..., torch.Tensor]
    matmul: Matmul = "highest"
    gradients: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul
    """(m, k) @ (k, n) as the backward pass computes it."""


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _float_operands(dtype: torch.dtype) -> Callable[[Shape, torch.device, torch.Generator], tuple[Any, ...]]:
    def make(shape: Shape, device: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
        m, n, k = shape
        a = torch.randn(m, k, device=device, generator=generator).to(dtype)
        # Weights are stored as (out, in), as in nn.Linear. On CPUs the other order can be two hundred times slower.
        b = torch.randn(n, k, device=device, generator=generator).to(dtype)
        return a, b

    return make


def _int8_operands(shape: Shape, device: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    m, n, k = shape
    a = torch.randint(-127, 128, (m, k), device=device, generator=generator, dtype=torch.int8)
    b = torch.randint(-127, 128, (n, k), device=device, generator=generator, dtype=torch.int8)
    return a, b.t()


def _fp8_operands(shape: Shape, device: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    a, b = _float_operands(E4M3)(shape, device, generator)
    unit_scale = torch.ones((), device=device)
    return a, b.t(), unit_scale, unit_scale, torch.bfloat16


def _kinds(device: torch.device) -> list[_Kind]:
    """Every way to multiply that this device may support. An unsupported one fails in its first matrix product."""
    fp32 = _float_operands(torch.float32)
    kinds = [_Kind("fp32", fp32, F.linear)]
    if device.type == "cpu":
        if this_cpu().bf16 is not False:  # else torch multiplies as for `highest`
            kinds.append(_Kind("fp32_medium", fp32, F.linear, matmul="medium"))
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            kinds.append(_Kind(ONEDNN, fp32, by_onednn, gradients=lambda a, b: by_onednn(a, b.t())))
    elif _has_tensor_cores(device):
        kinds.append(_Kind("tf32", fp32, F.linear, matmul="high"))
    # GPUs without bf16 units emulate it at a tenth of the speed of fp16, so that no plan should use it.
    if device.type == "cpu" or _has_tensor_cores(device):
        kinds.append(_Kind("bf16", _float_operands(torch.bfloat16), F.linear))
    kinds.append(_Kind("fp16", _float_operands(torch.float16), F.linear))
    kinds.append(_Kind("int8", _int8_operands, integer_product, gradients=integer_product))
    if device.type == "cuda":
        kinds.append(_Kind("fp8", _fp8_operands, partial(scaled_product, fast=True)))
    return kinds


def _has_tensor_cores(device: torch.device) -> bool:
    """Whether a GPU has TF32 and bf16 units: NVIDIA from compute capability 8.0, and AMD's Instinct from gfx90a."""
    major, _ = torch.cuda.get_device_capability(device)
    return major >= 8


def gemm_samples(device: torch.device, quick: bool, budget: float) -> list[GemmSample]:
    """Rates of matrix products in each type that this device supports. A CPU's two libraries for fp32 are measured
    twice if oneDNN seems to be faster than MKL, and the better rates are kept: other programs can only slow them. A
    `quick` measurement measures once."""
    generator = torch.Generator(device=device).manual_seed(0)

    def rates(kinds: list[_Kind]) -> dict[tuple[str, ProductForm, Shape], GemmSample]:
        samples = [
            sample for kind in kinds for sample in _kind_samples(kind, device, quick, budget, generator)
        ]
        return {(s.dtype, s.form, (s.m, s.n, s.k)): s for s in samples}

    kinds = _kinds(device)
    best = rates(kinds)
    pairs = [(best.get(("fp32", *key[1:])), s) for key, s in best.items() if key[0] == ONEDNN]
    faster = any(mkl and s.flops_per_second > WORTH * mkl.flops_per_second for mkl, s in pairs)
    if not quick and agreed(float(faster)):  # ranks measure the same products
        for key, s in rates([kind for kind in kinds if kind.name in ("fp32", ONEDNN)]).items():
            if key not in best or s.flops_per_second > best[key].flops_per_second:
                best[key] = s
    return [*best.values()]


def _kind_samples(
    kind: _Kind, device: torch.device, quick: bool, budget: float, generator: torch.Generator
) -> list[GemmSample]:
    """Rates of one way to multiply; empty if this device does not support it."""
    shapes = _CPU_SHAPES if device.type == "cpu" else _CUDA_SHAPES
    names = (_CPU_QUICK if device.type == "cpu" else _CUDA_QUICK) if quick else tuple(shapes)
    patience = 0.5 if quick else 15.0
    samples: list[GemmSample] = []
    with matmul_precision(kind.matmul):
        try:
            first = _FIRST_SHAPE if device.type == "cpu" else _CUDA_FIRST_SHAPE
            with _one_thread():
                alone = _gemm_sample(kind, first, device, generator, 0.0).flops_per_second
            each = agreed(1.0 / alone)
            affordable = [name for name in names if 2.0 * math.prod(shapes[name]) * each < patience]
            samples += [
                _gemm_sample(kind, shape, device, generator, budget)
                for shape in (_FIRST_SHAPE, *(shapes[name] for name in affordable))
            ]
            if device.type == "cpu":
                gradients = [*_gradient_samples(kind, _FIRST_SHAPE, generator, budget)]
                each = max(each, agreed(1.0 / min(sample.flops_per_second for sample in gradients)))
                for name in affordable:
                    if name in _LAYERS and 2.0 * math.prod(shapes[name]) * each < patience:
                        gradients += _gradient_samples(kind, shapes[name], generator, budget)
                samples += gradients
                if _RAGGED in affordable:
                    m, n, k = shapes[_RAGGED]
                    ragged = _gemm_sample(kind, (m, n + 1, k), device, generator, budget)
                    samples.append(replace(ragged, form="ragged"))
                if kind.product in (F.linear, by_onednn) and 2.0 * math.prod(_VOCABULARY) * each < patience:
                    logits = _gemm_sample(kind, _VOCABULARY, device, generator, budget)
                    samples.append(replace(logits, form="vocabulary"))
                    for one in _gradient_samples(kind, _VOCABULARY, generator, budget):
                        form: ProductForm = "vocabulary_input" if one.form == "input" else "vocabulary_weight"
                        samples.append(replace(one, form=form))
        except (RuntimeError, NotImplementedError, ValueError) as error:
            log.info("%s products do not run on %s: %s", kind.name, device, str(error).partition("\n")[0])
    return samples


def stored_samples(quick: bool, budget: float) -> Iterator[GemmSample]:
    """Rates of layers that store their weights for inference on this CPU, in few bits or in a layout of their own."""
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    rows = _STORED_ROWS_QUICK if quick else _STORED_ROWS
    shapes = [
        (m, n * width, k * width)
        for width in (_STORED_WIDTHS_QUICK if quick else _STORED_WIDTHS)
        for n, k in ((1, 1), (4, 1), (1, 4))[: 2 if quick else 3]
        for m in rows
    ]
    for name, form, dtype in _stored_kinds():
        try:
            for m, n, k in shapes:
                x, linear = _linear((m, n, k), dtype, generator)
                flops = 2.0 * m * n * k / seconds(partial(STORED[name](linear), x), cpu, budget)
                kind = dtype if form == "packed" else name
                yield GemmSample(dtype=kind, m=m, n=n, k=k, flops_per_second=flops, form=form)
        except (RuntimeError, PenstockError) as error:
            log.info("layers in %s do not run here: %s", name, str(error).partition("\n")[0])


def reading_samples(budget: float) -> Iterator[KernelSample]:
    """How fast packed layers read their weights from memory: several layers in turn, too large for a cache, with one
    row of inputs."""
    x, linear = _linear((1, _READ_SIDE, _READ_SIDE), "fp32", torch.Generator().manual_seed(0))
    count = _READ_BYTES // (4 * _READ_SIDE**2)
    try:
        layers = [STORED["packed"](linear) for _ in range(count)]
        spent = seconds(lambda: [layer(x) for layer in layers], torch.device("cpu"), budget)
        yield KernelSample(name="reading", per_second=count * 4.0 * _READ_SIDE**2 / spent)
    except (RuntimeError, PenstockError) as error:
        log.info("packed layers do not run here: %s", str(error).partition("\n")[0])


def _stored_kinds() -> list[tuple[Products, ProductForm, Dtype]]:
    """Ways in which layers store their weights for inference, with the form of their samples and the type of inputs."""
    kinds: list[tuple[Products, ProductForm, Dtype]] = [
        (name, "stored", "fp32")
        for name, row in PRODUCTS.items()
        if row.weights is not None and "cpu" in row.devices
    ]
    kinds.append(("packed", "packed", "fp32"))
    if this_cpu().packs_bf16:
        kinds.append(("packed", "packed", "bf16"))
    return kinds


def _linear(shape: Shape, dtype: Dtype, generator: torch.Generator) -> tuple[Tensor, nn.Linear]:
    """Inputs of a layer, and the layer."""
    x, weight = _float_operands(getattr(torch, FORMATS[dtype].dtype))(shape, torch.device("cpu"), generator)
    linear = nn.Linear(shape[2], shape[1], device="meta")
    linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(weight[:, 0].clone())
    return x, linear


def _gradient_samples(
    kind: _Kind, shape: Shape, generator: torch.Generator, budget: float
) -> Iterator[GemmSample]:
    """The two matrix products of a linear layer's backward pass, with factors stored as autograd passes them."""
    cpu = torch.device("cpu")
    x, weight = kind.operands(shape, cpu, generator)
    m, n, k = shape
    weight = weight.view(n, k) if weight.is_contiguous() else weight.t()  # some products take it transposed
    gradient = kind.operands((m, k, n), cpu, generator)[0]
    flops = 2.0 * m * n * k
    spent = seconds(lambda: kind.gradients(gradient, weight), cpu, budget)
    yield GemmSample(dtype=kind.name, m=m, n=k, k=n, flops_per_second=flops / spent, form="input")
    spent = seconds(lambda: kind.gradients(gradient.t(), x), cpu, budget)
    yield GemmSample(dtype=kind.name, m=n, n=k, k=m, flops_per_second=flops / spent, form="weight")


def sustained(device: torch.device, samples: list[GemmSample]) -> tuple[float, str]:
    """The share of its burst rate that this GPU sustains in its largest bf16 matrix product (fp16 where it has no
    bf16), and a line that reports it."""
    kinds = {kind.name: kind for kind in _kinds(device)}
    name = "bf16" if any(sample.dtype == "bf16" for sample in samples) else "fp16"
    burst = max((s for s in samples if s.dtype == name), key=lambda s: s.m * s.n * s.k)
    shape = (burst.m, burst.n, burst.k)
    operands = kinds[name].operands(shape, device, torch.Generator(device=device).manual_seed(0))
    rate = burst.flops_per_second / (2.0 * math.prod(shape))
    share = sustained_share(rates_under_load(lambda: kinds[name].product(*operands), device), rate)
    return share, f"under load for {_LOAD_SECONDS:.0f} s it sustains {share:.1%} of its burst"


def rates_under_load(
    call: Callable[[], object], device: torch.device, length: float = _LOAD_SECONDS
) -> list[float]:
    """Repeat `call` for `length` seconds without a pause; returns the calls per second of about each second."""
    wait(device)
    start = last = time.perf_counter()
    call()
    wait(device)
    once = max(time.perf_counter() - start, 1e-6)
    batch = max(1, round(min(1.0, length / 10) / once))
    rates: list[float] = []
    start = last = time.perf_counter()
    while last - start < length:
        for _ in range(batch):
            call()
        wait(device)
        now = time.perf_counter()
        rates.append(batch / (now - last))
        last = now
    return rates


def sustained_share(rates: list[float], burst: float) -> float:
    """The median of the last third of the rates, over `burst`, the calls per second of a short run; at most 1. Under
    its power limit the clock of a long run is lower than that of a burst."""
    return min(1.0, statistics.median(rates[-max(1, len(rates) // 3) :]) / burst)


def measured_again(sample: GemmSample, budget: float) -> GemmSample:
    """Measure the fp32 product of `sample` again, on this CPU."""
    generator = torch.Generator().manual_seed(0)
    kind = _Kind("fp32", _float_operands(torch.float32), F.linear)
    with matmul_precision(kind.matmul):
        return _gemm_sample(kind, (sample.m, sample.n, sample.k), torch.device("cpu"), generator, budget)


def _gemm_sample(
    kind: _Kind, shape: Shape, device: torch.device, generator: torch.Generator, budget: float
) -> GemmSample:
    operands = kind.operands(shape, device, generator)
    spent = seconds(lambda: kind.product(*operands), device, budget)
    m, n, k = shape
    return GemmSample(dtype=kind.name, m=m, n=n, k=k, flops_per_second=2.0 * m * n * k / spent)
