"""The published rows: errors do not grow, and the page says what the code says."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import fields, replace
from pathlib import Path
from statistics import median

import pytest
from calibration.fit import FITTED, HOPPER, WEIGHTS, fitted_rows, loss, stored_leave_one_out
from calibration.report import agreement, intervals, own_runs, page, rankings, spearman, split_runs, summary
from calibration.rows import TABLES, mosaicml_plans, rows
from calibration.table import Row, source, with_fused_loss

from penstock.config.machine import load_machine
from penstock.config.model import preset
from penstock.config.plan import Plan
from penstock.planner import predict
from penstock.planner.constants import DEFAULT
from penstock.planner.describe import describe
from penstock.planner.memory import memory
from penstock.planner.prediction import room

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "planner-accuracy.md"

# Mean and largest error of each table, as reached, with a little room for rounding. Lower them when they fall.
REACHED = {
    "korthikanti_table4": (0.019, 0.031), "korthikanti_table5": (0.019, 0.048), "mosaicml_a100": (0.037, 0.281),
    "torchtitan_memory": (0.017, 0.083), "nccl": (0.030, 0.047), "matmul": (0.100, 0.114),
    "mosaicml_h100": (0.030, 0.223), "torchtitan_speed": (0.089, 0.504), "bloom": (0.073, 0.315),
    "bloom_memory": (0.052, 0.26), "nemo": (0.048, 0.107), "megatron": (0.075, 0.106), "megatron_h100": (0.047, 0.073),
    "vit": (0.141, 0.392), "flash_training": (0.063, 0.300), "attention": (0.112, 0.392), "moe_layer": (0.038, 0.133),
    "moe_training": (0.056, 0.224), "moe_bridge": (0.082, 0.146), "moe_exchange": (0.091, 0.203),
    "moe_deepseek": (0.066, 0.066), "moe_serving": (0.30, 0.30),
}  # fmt: skip


# Spearman, share of pairs over 6 % apart ranked rightly, and what the layout ranked first loses; as reached.
RANKED = {
    "tile and wave quantization": (0.99, 0.99, 0.0),
    # 0.749 and 79 % are reached. Eight of its 14 layouts are measured within 4 % of each other, which is less than a
    # layout differs between days.
    "NHEADs comparison": (0.74, 0.79, 0.03),
    "GBS Variations": (0.76, 0.85, 0.03),
    "Another round of NHEADS": (0.72, 0.84, 0.03),
    "Re-do": (0.89, 0.99, 0.03),
    "Rebalancing layers": (0.83, 0.95, 0.03),
}


@pytest.mark.parametrize("table", list(TABLES))
def test_errors_do_not_grow(table: str) -> None:
    mean, largest = REACHED[table]
    found = summary(table)
    assert found.mean <= mean
    assert found.largest <= largest


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(own=own_runs(ROOT), split=split_runs(ROOT)), (
        "run python tools/planner_accuracy.py"
    )


def test_predictions_carry_the_interval_of_their_kind() -> None:
    stored = json.loads((ROOT / "src/penstock/planner/intervals.json").read_text(encoding="utf-8"))
    assert stored == intervals(own_runs(ROOT)), "run python tools/planner_accuracy.py"
    for name, one in stored.items():
        assert 0.3 < one["low"] < one["high"] < 2.0, name
        assert 0 < one["spread"] < one["high"] - one["low"] + 0.1, name
    h100, cpu = load_machine("h100"), replace(load_machine("h100"), device="cpu", name="cpu")
    plan = Plan(precision="O1", micro_batch=4)
    seen = [
        predict(preset(model), machine, plan).interval
        for model, machine in (
            ("gpt2", h100), ("vit-b16", h100), ("gpt2", load_machine("a100-80g")), ("gpt2", cpu),
            ("gpt2", load_machine("b200")),
        )
    ]  # fmt: skip
    words = [one.words if one else "" for one in seen]
    assert len(set(words)) == 5
    assert words[-1].endswith("a guess")
    for name in ("h800", "mi355x", "tpu-v5p", "l40s"):
        found = predict(preset("gpt2"), load_machine(name), Plan(precision="O1", micro_batch=4)).interval
        assert found is not None
        assert found.words.endswith("a guess") == (name != "h800")


def test_measured_and_the_readme_say_what_the_page_says() -> None:
    measured = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    blind, fitted = (
        ("nemo", "bloom", "vit"),
        ("korthikanti_table5", "mosaicml_a100", "mosaicml_h100", "torchtitan_memory"),
    )

    def means(*tables: str) -> str:
        return "mean error " + ", ".join(f"{100 * summary(table).mean:.1f} %" for table in tables)

    assert f"| {means(*fitted)} |" in measured
    assert f"| {means(*blind)} |" in measured
    runs = [
        100 * summary(table).mean
        for table in (*fitted, *blind, "torchtitan_speed", "megatron", "bloom_memory")
    ]
    assert f"[{min(runs):.1f} to {max(runs):.0f} %](docs/reference/planner-accuracy.md)" in readme


def test_our_own_runs_are_within_their_aims() -> None:
    """As measured when the page was written; `tests/ladder/test_tensor_memory.py` measures memory again."""
    cases = own_runs(ROOT)["cases"]
    models = {one["model"] for one in cases}
    assert {
        "vit-digits", "vit-l16", "vit-h14", "gpt2, 12 blocks", "bert, 12 blocks", "t5, 2 x 6 blocks",
    } <= models  # fmt: skip
    assert {"precision=O1", "precision=O2", "precision=O3", "matmul=medium"} <= {
        setting for one in cases for setting in one["plan"].split()
    }
    assert statistics.median(abs(one["step_error"]["median"]) for one in cases) <= 0.08
    assert statistics.median(abs(one["memory_error"]) for one in cases) <= 0.01
    for one in cases:
        assert one["rounds"] >= (2 if one["model"] in ("vit-l16", "vit-h14") else 3), one["model"]
        assert abs(one["step_error"]["median"]) <= 0.15, one["model"]
        assert abs(one["memory_error"]) <= 0.05, one["model"]


def test_no_layout_that_has_run_is_refused() -> None:
    for chip in ("a100", "h100"):
        for row, model, machine, plan in mosaicml_plans(chip):
            work = with_fused_loss(describe(model, plan), plan, machine)
            assert sum(memory(work, plan).values()) <= room(machine), row


def test_every_row_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if re.match(r"\| .* \| [0-9.e+]+ \| ", line)]
    assert len(lines) >= sum(len(rows(table)) for table in TABLES)
    assert len(rows("mosaicml_a100")) == 139


def test_models_left_out_are_worse_but_not_by_much() -> None:
    """Constants that carry from model to model: what is fitted is the machine and the software, not the rows."""
    left_out = stored_leave_one_out()
    assert list(left_out) == [*WEIGHTS, "mosaicml_h100"]
    for table, errors in left_out.items():
        assert len(errors) == len(rows(table))
        mean = sum(abs(one) for one in errors) / len(errors)
        assert mean < summary(table).mean + 0.015


def test_the_constants_are_where_a_fit_ends() -> None:
    given = fitted_rows()
    here = loss(DEFAULT, given)
    for name in FITTED:
        for factor in (0.97, 1.03):
            assert loss(replace(DEFAULT, **{name: getattr(DEFAULT, name) * factor}), given) > 0.995 * here, (
                name
            )
    given = rows("mosaicml_h100")
    here = loss(DEFAULT, given)
    for name in HOPPER:
        for factor in (0.97, 1.03):
            assert loss(replace(DEFAULT, **{name: getattr(DEFAULT, name) * factor}), given) > 0.995 * here, (
                name
            )
    assert {*FITTED, *HOPPER} <= {field.name for field in fields(DEFAULT)}


def test_layouts_are_ranked() -> None:
    found = {ranking.section: ranking for ranking in rankings()}
    assert found["Batchsize Warmup"].spearman == 1.0
    assert len(found) == 7
    for section, (rank, apart, behind) in RANKED.items():
        assert found[section].spearman >= rank, section
        assert found[section].apart >= apart, section
        assert found[section].loss <= behind, section


ODD = [
    r"14336, 72 layers, 112 heads, dp 8 tp 8", r"12288, 96 layers, 96 heads, dp 8 tp 8", "104 heads",
    "dp 8 tp 8 pp 6, micro-batch 4, batch 1568", "13824, 78 layers, .* micro-batch 1,",
    "14336, 72 layers, 128 heads, dp 8 tp 4 pp 12, micro-batch 4",
]  # fmt: skip
"""Rows of BLOOM's sweep that the page calls odd: no other in its section like them is as slow."""


def test_odd_rows_keep_even_a_perfect_model_of_the_others_below_the_aim() -> None:
    sections: dict[str, list[Row]] = {}
    for row in rows("bloom"):
        sections.setdefault(row.section, []).append(row)
    best = {}
    odd = 0
    for name in ("NHEADs comparison", "Another round of NHEADS", "GBS Variations", "Rebalancing layers"):
        members = sections[name]
        measured = [row.samples / row.measured for row in members]
        predicted = [row.samples / row.predict(DEFAULT) for row in members]
        usual = median(one / other for one, other in zip(measured, predicted))
        stands_out = [any(re.search(pattern, row.name) for pattern in ODD) for row in members]
        odd += sum(stands_out)
        told = [two * usual if out else one for one, two, out in zip(measured, predicted, stands_out)]
        best[name] = spearman(measured, told)
    assert odd == 6
    assert best["NHEADs comparison"] < 0.9
    assert best["Another round of NHEADS"] < 0.82
    assert best["GBS Variations"] > 0.9
    assert best["Rebalancing layers"] > 0.9


def test_the_attention_that_training_uses_is_right_in_every_length() -> None:
    """Heads of 64 and 128, forward and backward, of the second generation: from 512 to 16,384 tokens, on both chips."""
    errors = [
        one.predict(DEFAULT) / one.measured - 1
        for one in rows("attention")
        if one.model == "FA2" and ", both," in one.name
    ]
    assert len(errors) == 47
    # 11.6 %, on causal attention of 512 tokens: the fitted share of memory bandwidth rose, and with it what it moves.
    assert max(abs(one) for one in errors) <= 0.117
    assert sum(abs(one) for one in errors) / len(errors) <= 0.05


def test_agreement_leaves_out_pairs_that_may_be_ties() -> None:
    measured, predicted = [100.0, 104.0, 120.0], [2.0, 1.0, 3.0]
    assert agreement(measured, predicted, 0.06) == 1.0
    assert agreement(measured, predicted, 0.0) == pytest.approx(2 / 3)
    assert agreement([1.0, 1.0], [1.0, 2.0], 0.06) == 1.0


def test_spearman_by_hand() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)


def test_every_table_names_its_source() -> None:
    for table in (
        "korthikanti_table5", "mosaicml", "bloom", "torchtitan", "nccl", "matmul", "nemo", "megatron",
        "megatron_h100", "vit", "flash_training", "attention", "moe_megatron_moe_layer", "moe_modelzoo_qwen3",
        "moe_deepep", "moe_deepseek_v3", "moe_serving",
    ):  # fmt: skip
        assert len(source(table)) > 30
