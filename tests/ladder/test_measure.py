"""Memory and losses of real contenders, and that switches of one do not leak into another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.toy import TOY
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.ladder import measure
from penstock.ladder.rung import Setting
from penstock.ladder.settings import LadderConfig
from penstock.ladder.subject import Configured
from penstock.planner import predict

MODEL = replace(PRESETS["vit-digits"], width=48, depth=2, heads=2, mlp_width=96, classifier="token")


@pytest.fixture
def subject() -> Configured:
    return Configured(LadderConfig(model=MODEL, batch=16), torch.device("cpu"))


def _with(subject: Configured, line: str, **model: object) -> Setting:
    assert subject.first.model is not None
    return Setting(
        model=replace(subject.first.model, **model),  # type: ignore[arg-type]
        plan=Plan.parse(f"{line} micro_batch=16"),
    )


def _peak(subject: Configured, setting: Setting) -> int:
    bench = measure.Bench(subject)
    bench.contend(setting, 0)
    return bench.memory(setting)


@pytest.mark.parametrize(
    "line", ["", "optimizer=fused", "optimizer=contiguous", "precision=O3", "attention=plain"]
)
def test_peak_memory_is_near_what_the_planner_says(subject: Configured, line: str) -> None:
    setting = replace(_with(subject, line), plan=replace(Plan.parse(line), micro_batch=64))
    assert setting.model is not None
    found = _peak(subject, setting)
    assert found == pytest.approx(predict(setting.model, TOY, setting.plan).memory_bytes, rel=0.15)


@pytest.mark.parametrize("form", ["loop", "foreach", "fused", "contiguous"])
def test_peak_memory_of_an_update_is_that_of_its_buffers(form: str) -> None:
    """With a single small image weights outweigh activations."""
    model = replace(PRESETS["vit-ti16"], image_size=32, depth=2, classes=10)
    subject = Configured(LadderConfig(model=model, batch=1), torch.device("cpu"))
    setting = replace(subject.first, plan=Plan.parse(f"optimizer={form} micro_batch=1"))
    found = _peak(subject, setting)
    within = 0.05 if form == "contiguous" else 0.01
    assert found == pytest.approx(predict(model, TOY, setting.plan).memory_bytes, rel=within)
    # Measured: within 1 %, and 4 % for contiguous, where each gradient is there twice while it is moved.


def test_peak_memory_sees_what_a_step_holds_at_once(
    subject: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose forward keeps a known amount more weighs just that much more."""
    bench = measure.Bench(subject)
    bench.contend(subject.first, 0)
    before = bench.memory(subject.first)
    runner = type(bench._warm[subject.first].built.step.runner)
    plain = runner.__call__

    def heavier(self: Any, batches: Any) -> Any:
        held = torch.empty(50_000_000, dtype=torch.uint8)
        result = plain(self, batches)
        del held
        return result

    monkeypatch.setattr(runner, "__call__", heavier)
    assert bench.memory(subject.first) - before == pytest.approx(50_000_000, rel=1e-3)


def test_runs_of_one_seed_see_the_same_weights_and_samples(subject: Configured) -> None:
    first = measure.Bench(subject).trained(subject.first, 0, 3).losses
    again = measure.Bench(subject).trained(subject.first, 0, 3).losses
    other = measure.Bench(subject).trained(subject.first, 1, 3).losses
    assert first == again
    assert first != other
    assert len(first) == 3


def test_a_pooled_model_starts_from_the_weights_it_shares(subject: Configured) -> None:
    token = dict(subject.build(subject.first, 0).model.named_parameters())
    pooled = dict(subject.build(_with(subject, "", classifier="pooled"), 0).model.named_parameters())
    torch.testing.assert_close(pooled["encoder.places.weight"], token["encoder.places.weight"][1:])
    for name in pooled.keys() - {"encoder.places.weight"}:
        torch.testing.assert_close(pooled[name], token[name])


def test_contenders_take_turns_without_leaking_switches(subject: Configured) -> None:
    before = torch.get_float32_matmul_precision()
    bench = measure.Bench(subject)
    pair = [measure.ModelContender(bench, _with(subject, line), 0) for line in ("matmul=medium", "")]
    seen: list[tuple[int, str]] = []
    for index, contender in enumerate(pair):
        model = bench._warm[contender.setting].built.model
        model.register_forward_hook(
            lambda module, args, out, index=index: seen.append((index, torch.get_float32_matmul_precision()))
        )
    for contender in (*pair, *reversed(pair)):
        contender.step_seconds = 1.0
        timing = contender.timed(1e-6)
        assert 0 < timing.wall == contender.step_seconds
        assert timing.processor > 0
    assert seen == [(0, "medium"), (1, "highest"), (1, "highest"), (0, "medium")]
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor imports torch.jit
def test_compiling_is_timed_and_leaves_losses_alone(subject: Configured) -> None:
    torch.compiler.reset()  # other tests compile such blocks too
    with measure.side_by_side():
        bench = measure.Bench(subject)
        bench.contend(_with(subject, "host_memory=keep"), 0)  # its memory is another's
        setting = _with(subject, "compile=blocks")
        step_seconds, compile_seconds = bench.contend(setting, 0)
        assert compile_seconds is not None
        assert compile_seconds > step_seconds
        torch.testing.assert_close(
            torch.tensor(bench.trained(setting, 0, 3).losses),
            torch.tensor(bench.trained(subject.first, 0, 3).losses),
        )
        assert bench.memory(setting) < 2 * _peak(subject, subject.first)


@pytest.mark.gpu
def test_peak_memory_on_a_gpu_is_near_what_the_planner_says() -> None:
    device = torch.device("cuda")
    machine = replace(TOY, device="cuda", peak_flops={"fp32": 1e13, "tf32": 1e14, "bf16": 1e14})
    model = replace(PRESETS["vit-s16"], depth=4)
    subject = Configured(LadderConfig(model=model, batch=32), device)
    found = _peak(subject, subject.first)
    assert found == pytest.approx(predict(model, machine, subject.first.plan).memory_bytes, rel=0.1)
