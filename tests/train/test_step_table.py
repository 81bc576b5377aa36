"""Where a step's time goes, and the least that it could take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from helpers.toy import TOY
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.kernels.bias_activation import _DirectActivation, bias_activation
from penstock.kernels.cross_entropy import _CrossEntropyInPlace, cross_entropy
from penstock.kernels.native_attention import _Direct, _DirectPacked
from penstock.kernels.residual_norm import _DirectNorm, add_norm
from penstock.planner import predict
from penstock.planner.describe import describe
from penstock.planner.ideal import BETWEEN, least_of_step
from penstock.train.step_table import HOST, STEP, as_text, measure_rows, step_table


def event(name: str, start: float, length: float, cat: str = "cpu_op", **more: object) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "tid": 1, "args": more}


STEPS = [
    event("aten::mm", 0, 50),  # before the first step
    event(STEP, 100, 1000, "user_annotation"),
    event("aten::linear", 110, 100),
    event("aten::t", 111, 4),
    event("aten::addmm", 120, 80),
    event("aten::scaled_dot_product_attention", 220, 60),
    event("aten::_scaled_dot_product_flash_attention_for_cpu", 225, 50),
    event("aten::empty", 226, 10),
    event("aten::cross_entropy_loss", 300, 40),
    event("aten::log_softmax", 305, 30),
    event("autograd::engine::evaluate_function: AddmmBackward0", 400, 200),
    event("AddmmBackward0", 401, 198),
    event("aten::mm", 402, 150),
    event("Optimizer.step#AdamW.step", 700, 200, "user_annotation"),
    event("aten::mul_", 710, 100),
    event(STEP, 1200, 400, "user_annotation"),
    event("## Call CompiledFxGraph abc ##", 1210, 300),
    event("aten::mm", 1220, 100),
]


def test_each_operator_counts_where_it_belongs_and_all_rows_make_the_step() -> None:
    steps, rows = measure_rows(STEPS)
    assert steps == 2
    halves = {row: 2e6 * seconds for row, seconds in rows.items()}
    assert halves.pop(HOST) == pytest.approx(1400 - sum(halves.values()))
    assert halves == pytest.approx(
        {
            "products, forward": 96 + 100,  # the linear's own time too
            "attention, forward": 60,
            "loss": 40,
            "products, backward": 150,
            "optimizer": 100,  # the rest is Python
            f"{BETWEEN}, forward": 200,
        }
    )


def test_kernels_of_a_gpu_count_where_they_were_launched() -> None:
    steps, rows = measure_rows(
        [
            event(STEP, 0, 100, "user_annotation"),
            event("aten::mm", 10, 5, **{"External id": 7}),
            event("gemm_128x128", 40, 60, "kernel", **{"External id": 7}),
        ]
    )
    assert steps == 1
    assert rows == pytest.approx({"products, forward": 60e-6, HOST: 40e-6})


def test_kernels_called_without_the_dispatcher_count_where_they_belong(tmp_path: Path) -> None:
    """Autograd Functions are recorded by the names of their classes, forward and backward."""
    x, bias = torch.randn(8, 32, requires_grad=True), torch.zeros(32)
    with profile(activities=[ProfilerActivity.CPU]) as recorded, record_function(STEP):
        s, normed = add_norm(x, x, bias, bias, 1e-5)
        logits = bias_activation(normed + s, bias, "gelu")
        cross_entropy(logits.view(8, 32), torch.arange(8)).backward()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    events = [one for one in events if one.get("cat") in ("cpu_op", "user_annotation")]
    for function, row in (
        (_DirectNorm, "norms"),
        (_DirectActivation, "activations"),
        (_CrossEntropyInPlace, "loss"),
    ):
        for name in (function.__name__, f"{function.__name__}Backward"):
            (own,) = [one for one in events if one["name"] == name]
            inside = [
                e for e in events if own["ts"] <= e["ts"] < own["ts"] + own["dur"] and e["tid"] == own["tid"]
            ]
            mark = {**event(STEP, own["ts"], own["dur"], "user_annotation"), "tid": own["tid"]}
            assert set(measure_rows([mark, *inside])[1]) - {HOST} == {row}, name
    # Compiled code that calls a kernel is measured beside the least work of all that a compiler merges.
    compiled = event("## Call CompiledFxGraph abc ##", 0, 9), event("penstock::add_norm", 1, 4)
    _, rows = measure_rows([event(STEP, 0, 9, "user_annotation"), *compiled])
    assert rows == pytest.approx({f"{BETWEEN}, forward": 9e-6})
    # Attention in C++ needs a CPU of its own kind; its Functions are recorded as all are.
    for attention in (_Direct, _DirectPacked):
        ahead, back = event(attention.__name__, 0, 4), event(f"{attention.__name__}Backward", 5, 4)
        node = event(f"autograd::engine::evaluate_function: {back['name']}", 5, 4)
        _, rows = measure_rows([event(STEP, 0, 9, "user_annotation"), ahead, node, back])
        assert rows == pytest.approx({"attention, forward": 4e-6, "attention, backward": 4e-6, HOST: 1e-6})


def test_products_in_a_loss_are_products() -> None:
    """As the least work has them: a loss in chunks multiplies the head's weights."""
    mark = event(STEP, 0, 100, "user_annotation")
    chunked = event("penstock::linear_cross_entropy", 0, 90)
    inside = [event("aten::mm", 10, 40), event("penstock::logit_rows_", 50, 20), event("aten::copy_", 55, 5)]
    assert measure_rows([mark, chunked, *inside])[1] == pytest.approx(
        {"products, forward": 40e-6, "loss": 50e-6, HOST: 10e-6}
    )


def test_the_least_work_is_a_bound_that_grows_with_the_batch() -> None:
    model, plan = PRESETS["gpt-tiny"], Plan(micro_batch=8)
    least = least_of_step(model, TOY, plan)
    work = describe(model, plan, "cpu")
    # Half of what causal attention could compute is masked.
    assert 0.9 * work.model_flops < sum(one.flops for one in least.values()) < work.model_flops
    seconds = sum(one.seconds for one in least.values())
    assert 0 < seconds <= predict(model, TOY, plan).iteration_seconds
    twice = least_of_step(model, TOY, replace(plan, micro_batch=16))
    assert twice["products, forward"].flops == 2 * least["products, forward"].flops
    assert twice["optimizer"] == least["optimizer"]
    again = least_of_step(model, TOY, replace(plan, accumulate=2))
    assert again["products, backward"].seconds == pytest.approx(2 * least["products, backward"].seconds)
    compiled = least_of_step(model, TOY, replace(plan, compile="blocks"))
    assert compiled[f"{BETWEEN}, forward"].bytes < sum(
        least[row].bytes for row in ("norms", "activations", "sums, casts and copies")
    )


def test_the_table_ends_with_the_whole_step(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [{"ph": "M"}, *STEPS]}))
    rows = step_table(trace, least_of_step(PRESETS["gpt-tiny"], TOY, Plan()))
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert [row["milliseconds"] for row in rows] == sorted((r["milliseconds"] for r in rows), reverse=True)
    last = as_text(rows).splitlines()[-1].split()
    assert last[:2] == ["whole", "step"]
    assert float(last[2]) == pytest.approx(0.7)
    trace.write_text(json.dumps({"traceEvents": []}))
    assert step_table(trace, {}) == []
