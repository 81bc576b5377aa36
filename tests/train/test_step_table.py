"""Where a step's time goes, and the least that it could take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.toy import TOY
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
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
