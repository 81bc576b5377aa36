"""A probe measures what is there, and leaves everything as it was."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from helpers.spawn import pool
from penstock import probe as probe_room
from penstock.config.machine import (
    GemmSample,
    Link,
    LinkRates,
    Machine,
    cache_path,
    cached_machine,
    load_machine,
    save_machine,
)
from penstock.config.plan import Plan
from penstock.cpu import this_cpu
from penstock.errors import EnvironmentProblem
from penstock.kernels.native_blocks import computes_blocks
from penstock.planner.price import gather_seconds, group_of, reduce_seconds, send_seconds
from penstock.planner.rates import rates_of
from penstock.probe import keep, machine_for, machine_name, probe, products, rates, resolve_device
from penstock.probe.rates import alone_speedup, measure_link, page_seconds, seconds, shared
from penstock.process import matmul_precision
from penstock.products.integers import Int4, Int8, Int8Weights
from penstock.products.stored import OneDnn

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")


def _settings() -> tuple[Any, ...]:
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        torch.backends.cuda.matmul.allow_tf32 if torch.cuda.is_available() else None,
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
    )


@pytest.fixture(scope="module")
def measured() -> Machine:
    """One quick probe on one thread, and what it did to torch's settings."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    before, state = _settings(), torch.get_rng_state()
    machine = probe("cpu", quick=True)
    assert _settings() == before
    assert torch.equal(torch.get_rng_state(), state)
    return machine


def test_rates_are_plausible(measured: Machine) -> None:
    assert measured.device == "cpu"
    assert measured.source == "measured"
    assert measured.name == machine_name(CPU)
    assert measured.name.endswith("1 threads")
    types = {"fp32", "bf16", "fp16"} | ({"fp32_medium"} if this_cpu().bf16 is not False else set())
    assert types | {"fp32_onednn"} <= set(measured.peak_flops)
    assert 1e9 < measured.peak_flops["fp32"] < 1e13
    assert 1e8 < measured.memory_bytes_per_second < 1e12
    assert 1e-7 < measured.launch_seconds < 1e-3
    assert measured.launch_seconds < measured.operator_seconds < 1e-3
    assert {s.dtype for s in measured.kernels} == types
    kernels = {sample.name: sample.per_second for sample in measured.kernels if sample.dtype == "fp32"}
    assert {"gelu", "gelu_backward", "norm", "norm_backward", "softmax", "softmax_backward"} < set(kernels)
    activations = {
        "gelu", "gelu_tanh", "silu", "relu", "tanh", "sigmoid", "fused_gelu", "fused_gelu_tanh", "fused_silu",
    }  # fmt: skip
    assert activations | {f"{name}_backward" for name in activations} < set(kernels)
    assert all(1e7 < kernels[name] < 1e11 for name in ("gelu", "norm", "softmax", *activations))
    attention = [s for s in measured.kernels if s.name == "attention" and s.dtype == "fp32"]
    assert len(attention) >= 2
    assert all(1e8 < sample.per_second < measured.peak_flops["fp32"] * 1.5 for sample in attention)
    assert 1e8 < measured.memory_bytes < 1e14
    assert measured.collective_bytes_per_second is None


def _linked() -> Link:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # each rank would show it
        return measure_link(CPU)


def _plausible(link: LinkRates) -> bool:
    rates = {name: rate for name, rate in asdict(link).items() if name not in ("collective_seconds", "pairs")}
    return all(1e6 < rate < 1e12 for rate in rates.values()) and 1e-6 < link.collective_seconds < 0.1


@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_collectives_take_is_the_same_to_all_ranks(world: int) -> None:
    found = pool(world).run(_linked)
    assert found[0] == found[-1]
    assert _plausible(found[0])
    assert (found[0].pairs is not None) == (world == 4)
    assert found[0].pairs is None or _plausible(found[0].pairs)


def _on_one_core(measure: Callable[[], Any]) -> Any:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        return measure()
    finally:
        os.sched_setaffinity(0, cores)


def _speedup() -> float:
    return float(_on_one_core(lambda: alone_speedup(CPU)))


def test_ranks_on_one_core_are_twice_as_fast_alone() -> None:
    first, second = pool(2).run(_speedup)
    assert first == second
    assert first == pytest.approx(2.0, rel=0.25)


def _in_turns() -> tuple[float, float]:
    """Elapsed over processor time of two ranks on one core, and how much longer a call of one tick counts for them."""

    def measure() -> tuple[float, float]:
        with shared(CPU), pytest.MonkeyPatch.context() as patch:
            patch.setattr(rates, "_time", lambda *_: 1e-3)
            return rates._sharing.get(), seconds(lambda: None, CPU, 0.01) / 1e-3

    found: tuple[float, float] = _on_one_core(measure)
    return found


def test_ranks_count_the_time_that_they_wait_for_a_processor() -> None:
    for waits, longer in pool(2).run(_in_turns):
        assert longer == pytest.approx(waits)
        assert waits > 1.6


def _shapes_of_a_rank() -> list[tuple[str, int, int, int]]:
    """What a rank measures whose first product of each type took so long that it has time for no other."""
    first = products._gemm_sample

    def measured(kind: Any, shape: products.Shape, *rest: Any) -> GemmSample:
        found = first(kind, shape, *rest)
        return (
            replace(found, flops_per_second=1.0)
            if distributed.get_rank() == 1 and shape == products._FIRST_SHAPE
            else found
        )

    with shared(CPU), pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_gemm_sample", measured)
        return [(s.dtype, s.m, s.n, s.k) for s in products.gemm_samples(CPU, True, 1e-3)]


def test_ranks_measure_the_shapes_that_the_slowest_has_time_for() -> None:
    """Or those that measured more would wait for it for ever."""
    first, second = pool(2).run(_shapes_of_a_rank)
    assert first == second
    assert {shape[1:] for shape in first} == {products._FIRST_SHAPE}


def test_groups_of_two_have_the_rates_of_pairs() -> None:
    pairs = LinkRates(collective_bytes_per_second=4e9, collective_seconds=1e-4)
    link = Link(collective_bytes_per_second=1e9, collective_seconds=1e-3, pairs=pairs)
    machine = Machine(name="toy", device="cpu", source="measured", peak_flops={"fp32": 1e11}).linked(link, 4)
    rates, alone = rates_of(machine, Plan()), rates_of(machine.linked(pairs, 4), Plan())
    assert reduce_seconds(group_of(rates, 2, 2), 8e9) == reduce_seconds(group_of(alone, 2, 2), 8e9)
    assert reduce_seconds(group_of(rates, 4, 1), 8e9) > 3 * reduce_seconds(group_of(alone, 4, 1), 8e9)
    assert send_seconds(rates, 1, 1.0) < 2e-4


def test_each_kind_of_collective_has_its_own_rate() -> None:
    machine = Machine(name="toy", device="cpu", source="measured", peak_flops={"fp32": 1e11}).linked(
        Link(
            collective_bytes_per_second=1e9, gather_bytes_per_second=2e9, scatter_bytes_per_second=5e8,
            send_bytes_per_second=4e9, collective_seconds=1e-3,
        ), 4,
    )  # fmt: skip
    rates = rates_of(machine, Plan())
    group = group_of(rates, 4, 1)
    moved = 8e9
    assert reduce_seconds(group, moved) == pytest.approx(1.5 * moved / 1e9, rel=1e-3)
    assert gather_seconds(group, moved) == pytest.approx(0.75 * moved / 2e9, rel=1e-3)
    assert gather_seconds(group, moved, scatters=True) == pytest.approx(0.75 * moved / 5e8, rel=1e-3)
    assert send_seconds(rates, 1, moved) == pytest.approx(moved / 4e9, rel=1e-3)
    assert min(reduce_seconds(group, 1.0), gather_seconds(group, 1.0), send_seconds(rates, 1, 1.0)) > 1e-3


def test_the_peak_is_the_best_sample(measured: Machine) -> None:
    assert measured.peak_flops == measured.achievable_flops
    for kind, rate in measured.peak_flops.items():
        samples = [s for s in measured.gemm if s.dtype == kind and s.plain]
        assert rate == max(sample.flops_per_second for sample in samples)
    assert len({(s.m, s.n, s.k) for s in measured.gemm if s.dtype == "fp32"}) >= 3


def test_gradients_are_measured_as_they_lie(measured: Machine) -> None:
    """Of each layer, both gradients of each type, over the same numbers as its forward pass."""
    for kind in {"fp32", "fp32_medium", "fp32_onednn", "bf16", "fp16", "int8"} & set(measured.peak_flops):
        forward, inputs, weights = (
            [s for s in measured.gemm if s.dtype == kind and s.form == form]
            for form in ("forward", "input", "weight")
        )
        assert inputs
        assert len(inputs) == len(weights)
        for one, other in zip(inputs, weights):
            assert (one.m, one.k, one.n) in {(s.m, s.n, s.k) for s in forward}
            assert (other.k, other.m, other.n) == (one.m, one.k, one.n)
    for form in ("vocabulary", "vocabulary_input", "vocabulary_weight"):
        (sample,) = (s for s in measured.gemm if s.dtype == "fp32" and s.form == form)
        assert 32001 in (sample.m, sample.n, sample.k)


def test_stored_layers_are_measured_as_inference_computes_them(
    measured: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = [sample for sample in measured.gemm if sample.form == "stored"]
    for weights in ("int8", "int8_weights", "int4"):
        rows = [sample.m for sample in stored if sample.dtype == weights]
        assert min(rows) == 1, "as when a text is generated"
        assert max(rows) >= 128
    assert {sample.dtype for sample in stored} == {"int8", "int8_weights", "int4"}
    assert "int8_weights" not in measured.peak_flops, "no compute type"
    packed = {sample.dtype for sample in measured.gemm if sample.form == "packed"}
    assert packed == ({"fp32", "bf16"} if this_cpu().packs_bf16 else {"fp32"})
    (reading,) = (s.per_second for s in measured.kernels if s.name == "reading")
    assert reading > 1e8
    one_token = [s for s in measured.kernels if s.name == "attention_token" and s.dtype == "fp32"]
    assert one_token
    in_blocks = {s.tokens for s in measured.kernels if s.name == "attention_block" and s.dtype == "fp32"}
    assert in_blocks == (
        {s.tokens for s in measured.kernels if s.name == "attention"} if computes_blocks() else set()
    )
    called = list[tuple[str, torch.Size]]()

    def counted(name: str, call: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
        def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
            called.append((name, x.shape))
            return call(layer, x)

        return forward

    for name, form in (("int8", Int8), ("int8_weights", Int8Weights), ("int4", Int4)):
        monkeypatch.setattr(form, "product", counted(name, form.product))
    monkeypatch.setattr(OneDnn, "kernel", counted("packed", OneDnn.kernel))
    samples = list(products.stored_samples(True, 1e-4))
    assert set(called) == {("packed" if s.form == "packed" else s.dtype, (s.m, s.k)) for s in samples}


def test_load_is_read_once_a_second_and_its_end_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chip that slows down sustains what it does at the end, not on the mean."""
    now = 0.0

    def slower() -> None:
        nonlocal now
        now += 0.01 if now < 20 else 0.02

    monkeypatch.setattr(products.time, "perf_counter", lambda: now)
    rates = products.rates_under_load(slower, CPU, 60.0)
    assert len(rates) == pytest.approx(20 + 20, abs=2)
    assert products.sustained_share(rates, burst=100.0) == pytest.approx(0.5)
    assert products.sustained_share(rates, burst=1.0) == 1.0


def test_a_page_costs_what_its_own_thread_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what neighbours take meanwhile: asleep, this one waits as it would for a core."""
    calls = itertools.count()
    fill = ctypes.memset

    def slow(*arguments: int) -> None:
        if next(calls) % 2 == 0:  # the first touch
            time.sleep(0.4)
        fill(*arguments)

    monkeypatch.setattr("penstock.probe.rates.ctypes.memset", slow)
    assert 0 < page_seconds() * 16384 < 0.4


def test_a_probe_can_be_stored(measured: Machine, tmp_path: Path) -> None:
    assert load_machine(save_machine(measured, tmp_path / "m.toml")) == measured


def test_settings_come_back_after_an_error() -> None:
    def fail() -> None:
        with matmul_precision("medium"):
            assert torch.get_float32_matmul_precision() == "medium"
            raise ZeroDivisionError

    before = _settings()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert _settings() == before


def test_a_type_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("not on this device\nand more")

    kinds = products._kinds(CPU)[:1]
    kinds.append(replace(kinds[0], name="fp4", product=fail))
    monkeypatch.setattr(products, "_kinds", lambda _: kinds)
    monkeypatch.setattr(products, "_CPU_QUICK", ())
    samples = products.gemm_samples(CPU, True, 0.01)
    assert {sample.dtype for sample in samples} == {"fp32"}


def test_a_slow_type_is_asked_little(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(a.shape))
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass
        return a

    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        products,
        "_kinds",
        lambda _: [products._Kind("slow", products._float_operands(torch.half), slow, gradients=slow)],
    )
    sample, *others = products.gemm_samples(CPU, True, 0.01)
    assert set(shapes) == {(256, 256)}
    assert [other.form for other in others] == ["input", "weight"]
    assert sample.flops_per_second == pytest.approx(2 * 256**3 / 0.02, rel=0.5)


def test_the_launch_of_a_gpus_first_product_hides_no_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch of 12 µs, as on an H200, and 400 TFLOP/s."""

    def timed(kind: Any, shape: products.Shape, *_: Any) -> GemmSample:
        m, n, k = shape
        taken = max(12e-6, 2.0 * m * n * k / 4e14)
        return GemmSample(dtype=kind.name, m=m, n=n, k=k, flops_per_second=2.0 * m * n * k / taken)

    kind = products._Kind("bf16", products._float_operands(torch.bfloat16), torch.nn.functional.linear)
    monkeypatch.setattr(products, "_kinds", lambda device: [kind])
    monkeypatch.setattr(products, "_gemm_sample", timed)
    monkeypatch.setattr(torch, "Generator", lambda device: torch.default_generator)
    samples = products.gemm_samples(torch.device("cuda"), True, 0.05)
    expected = {products._CUDA_SHAPES[name] for name in products._CUDA_QUICK}
    assert expected < {(sample.m, sample.n, sample.k) for sample in samples}


def test_devices_resolve() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device(CPU) == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(EnvironmentProblem, match="There is no device 'gpu'"):
        resolve_device("gpu")
    with pytest.raises(EnvironmentProblem, match="not on mps"):
        resolve_device("mps")
    with pytest.raises(EnvironmentProblem, match="cuda:9 was asked for"):
        resolve_device("cuda:9")


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Instead of probing, note that a probe was made."""
    made: list[bool] = []

    def fake(device: torch.device, *, quick: bool = False, alone: bool = False) -> Machine:
        assert alone, "one rank of a group asks without the others"
        made.append(quick)
        return Machine(
            name=machine_name(device), device="cpu", source="measured", peak_flops={"fp32": 1e9},
            notes=(probe_room._version_note(),),
        )  # fmt: skip

    monkeypatch.setattr(probe_room, "probe", fake)
    return made


def test_a_machine_is_measured_once(probes: list[bool]) -> None:
    first = machine_for("cpu")
    # A Machine that was stored before there were kinds gets its own.
    assert machine_for("cpu") == replace(first, kind=this_cpu().kind)
    assert probes == [True]
    assert cached_machine(machine_name(CPU)) == first


def test_another_torch_is_another_machine(probes: list[bool]) -> None:
    old = replace(machine_for("cpu"), notes=("torch 1.0",))
    save_machine(old, cache_path(old.name))
    assert machine_for("cpu").notes == (probe_room._version_note(),)
    assert probes == [True, True]


def test_a_machine_that_was_busy_is_measured_again(
    probes: list[bool], measured: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Of rates that something else had slowed down nobody learns more than once; of good ones nobody asks again."""
    here = replace(measured, name=machine_name(CPU))
    busy = tuple(replace(s, flops_per_second=s.flops_per_second / 4) for s in here.gemm)
    keep(replace(here, gemm=busy))
    with caplog.at_level(logging.WARNING):
        assert set(machine_for("cpu").gemm) == set(busy), (
            "the probe that is stood in for found nothing better"
        )
    assert probes == [True]
    assert "was busy when it was measured" in caplog.text
    fast = tuple(replace(s, flops_per_second=s.flops_per_second * 2) for s in here.gemm)
    keep(replace(here, gemm=fast))
    assert machine_for("cpu").gemm == fast
    assert probes == [True]


def test_of_two_measurements_each_figure_is_the_better_one(measured: Machine) -> None:
    slow = {"flops_per_second": 0.5, "per_second": 0.5}

    def slowed(sample: Any) -> Any:
        (name,) = slow.keys() & {field.name for field in fields(sample)}
        return replace(sample, **{name: slow[name] * getattr(sample, name)})

    other = replace(
        measured, gemm=(*map(slowed, measured.gemm[:2]), *measured.gemm[2:]),
        kernels=tuple(map(slowed, measured.kernels)), operator_seconds=2 * measured.operator_seconds,
        page_seconds=measured.page_seconds / 2,
        peak_flops={kind: rate / 2 for kind, rate in measured.peak_flops.items()},
    )  # fmt: skip
    for one, two in ((measured, other), (other, measured)):
        best = probe_room._best_of(one, two)
        assert set(best.gemm) == set(measured.gemm)
        assert set(best.kernels) == set(measured.kernels)
        assert best.operator_seconds == measured.operator_seconds
        assert best.page_seconds == other.page_seconds
        assert best.peak_flops == measured.peak_flops


def test_a_cache_that_cannot_be_written_is_said(
    probes: list[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        machine = machine_for("cpu")
    assert "cannot be written" in caplog.text
    assert keep(machine) is None


@pytest.mark.gpu
@pytest.mark.slow
def test_a_gpu_sustains_less_than_its_burst() -> None:
    machine = probe("cuda")
    assert 0.5 < machine.sustained_share <= 1.0
    assert "under load for 60 s" in machine.notes[-1]


@pytest.mark.gpu
def test_a_gpu_is_matched_with_its_datasheet() -> None:
    machine = probe("cuda", quick=True)
    sheet = machine_for("cuda")
    assert machine.device == "cuda"
    assert machine.sustained_share == 0.0  # a quick probe does not load it for a minute
    for kind in ("fp32", "tf32", "bf16", "fp16"):
        shapes = {sample.m for sample in machine.gemm if sample.dtype == kind}
        assert len(shapes) > 2, "large products are measured in each type, not only the first one"
        assert 0 < machine.achievable_flops[kind] < 1.05 * machine.peak_flops[kind]
    if sheet.source == "datasheet":
        assert machine.peak_flops["fp16"] == sheet.peak_flops["fp16"]
        assert machine.achievable_flops["fp16"] > 0.3 * machine.peak_flops["fp16"]
        assert machine.memory_bytes_per_second > 0.5 * sheet.memory_bytes_per_second
