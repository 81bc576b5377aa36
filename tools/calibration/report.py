"""The page that shows every published row beside what the planner says of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from calibration.fit import error, leave_one_out, stored_leave_one_out
from calibration.rows import TABLES, rows
from calibration.table import Row, source
from penstock.planner.constants import DEFAULT, Constants

TITLES = {
    "korthikanti_table4": "Korthikanti et al. 2022, Table 4",
    "korthikanti_table5": "Korthikanti et al. 2022, Table 5",
    "mosaicml_a100": "MosaicML llm-foundry, A100",
    "torchtitan_memory": "torchtitan, memory",
    "nccl": "nccl-tests",
    "matmul": "Ceilings of matrix products",
    "mosaicml_h100": "MosaicML llm-foundry, H100 (bf16)",
    "torchtitan_speed": "torchtitan, speed",
    "bloom": "BLOOM's layout sweep",
    "bloom_memory": "BLOOM's layout sweep, memory",
    "nemo": "NeMo on H100, fp8",
    "megatron": "Megatron-LM's README of 2020, A100",
    "megatron_h100": "Megatron-LM's weak scaling, H100",
    "vit": "ViTs in NeMo and JAX, A100 and H100",
    "flash_training": "Decoders with each generation of attention, A100",
    "attention": "Attention kernels, A100 and H100",
    "moe_layer": "Mixtures of experts by themselves, 8 H100",
    "moe_training": "Qwen3-235B-A22B in Megatron-Core, 256 H100",
    "moe_bridge": "Qwen3-30B-A3B in Megatron-Bridge, 16 H100",
    "moe_deepseek": "DeepSeek-V3, 2,048 H800",
    "moe_exchange": "Exchanges of tokens by DeepEP and HybridEP, H800 and H100",
    "moe_serving": "One stream of Qwen3-235B-A22B in four bits, A100 and MI300X",
}
FILES = {"mosaicml_a100": "mosaicml", "mosaicml_h100": "mosaicml", "torchtitan_memory": "torchtitan"}
FILES |= {"torchtitan_speed": "torchtitan", "bloom_memory": "bloom"}
FILES |= {
    "moe_layer": "moe_megatron_moe_layer",
    "moe_training": "moe_modelzoo_qwen3",
    "moe_bridge": "moe_bridge_qwen3",
    "moe_deepseek": "moe_deepseek_v3",
    "moe_exchange": "moe_deepep",
}


WORDS = {
    name: text
    for name, _, text in (
        part.partition(" -->\n")
        for part in Path(__file__).with_name("words.md").read_text(encoding="utf-8").split("<!-- ")[1:]
    )
}
"""What the page says between its tables, by name."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Errors of one table, as shares."""

    rows: int
    mean: float
    largest: float
    bias: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Summary:
        """The summary of signed errors."""
        size = [abs(one) for one in errors]
        return cls(len(size), sum(size) / len(size), max(size), sum(errors) / len(size))


def summary(table: str, constants: Constants = DEFAULT) -> Summary:
    """Errors of all rows of a table."""
    return Summary.of([error(row, constants) for row in rows(table)])


KINDS = {
    "ampere": (
        ("korthikanti_table5", "mosaicml_a100", "bloom", "megatron"),
        "published runs of language models on A100",
    ),
    "hopper": (
        ("mosaicml_h100", "torchtitan_speed", "nemo", "megatron_h100", "moe_training"),
        "published runs of language models on H100 and H200",
    ),
    "vision": (("vit",), "published runs of ViTs on A100 and H100"),
}
"""The tables that stand for a kind of prediction, and what their rows are."""


def slowness(table: str) -> list[tuple[str, float]]:
    """Of each row, its model and measured over predicted seconds."""
    faster = TABLES[table][2].startswith(("tokens", "images", "samples", "TFLOP"))
    found = [(f"{table} {row.model}", row.predict(DEFAULT) / row.measured) for row in rows(table)]
    return found if faster else [(model, 1.0 / ratio) for model, ratio in found]


def intervals(own: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What `planner/intervals.json` holds: four fifths of the rows of each kind, and of their distance to their model's
    mean."""
    found: dict[str, dict[str, Any]] = {}
    kinds = {
        kind: ([one for table in tables for one in slowness(table)], words)
        for kind, (tables, words) in KINDS.items()
    }
    cases = [(one["model"], 1.0 / (1.0 + one["step_error"]["median"])) for one in own["cases"]]
    kinds["cpu"] = (cases, "own runs on CPUs")
    for kind, (given, words) in kinds.items():
        tenths = quantiles([ratio for _, ratio in given], n=10, method="inclusive")
        means = {model: fmean(r for m, r in given if m == model) for model, _ in given}
        apart = [
            abs(ratio / means[model] - 1.0)
            for model, ratio in given
            if [m for m, _ in given].count(model) > 1
        ]
        found[kind] = {
            "low": round(tenths[0], 3), "high": round(tenths[8], 3),
            "spread": round(quantiles(apart, n=5, method="inclusive")[3], 3), "rows": len(given), "words": words,
        }  # fmt: skip
    return found


DAYS = 0.06
"""How far apart two days' figures of one layout are in BLOOM's sweep."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """How well the layouts of one section are ranked, by samples per second."""

    section: str
    layouts: int
    spearman: float
    apart: float
    """Share of the pairs ranked rightly among those that differ by more than `DAYS`: nearer ones may be ties."""
    loss: float
    """How much slower the layout ranked first is than the one that was fastest."""


def rankings() -> list[Ranking]:
    """The sections of BLOOM's sweep with at least four layouts."""
    sections: dict[str, list[Row]] = {}
    for row in rows("bloom"):
        sections.setdefault(row.section, []).append(row)
    found = []
    for section, members in sections.items():
        if len(members) < 4:
            continue
        measured = [row.samples / row.measured for row in members]
        predicted = [row.samples / row.predict(DEFAULT) for row in members]
        first = predicted.index(max(predicted))
        found.append(
            Ranking(
                section,
                len(members),
                spearman(measured, predicted),
                agreement(measured, predicted, DAYS),
                max(measured) / measured[first] - 1,
            )
        )
    return found


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; ties take the mean of their ranks."""
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) + 1) / 2
    over = sum((x - mean) * (y - mean) for x, y in zip(a, b))
    under = (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5
    return over / under if under else 0.0


def agreement(first: Sequence[float], second: Sequence[float], apart: float) -> float:
    """Share of pairs that both order alike, among those more than `apart` from each other in `first`; 1 without any."""
    pairs = [
        (second[i] > second[j]) == (first[i] > first[j])
        for i in range(len(first))
        for j in range(i)
        if max(first[i], first[j]) > (1 + apart) * min(first[i], first[j])
    ]
    return sum(pairs) / len(pairs) if pairs else 1.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < one for other in values) + (sum(other == one for other in values) + 1) / 2
        for one in values
    ]


def own_runs(root: Path) -> dict[str, Any]:
    """What `benchmarks/predicted_own_runs.py` last found, from the repository at `root`."""
    path = root / "benchmarks" / "results" / "predicted_own_runs_cpu.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def split_runs(root: Path) -> dict[str, Any] | None:
    """What `benchmarks/predicted_layouts.py` last found; None where it was not run yet."""
    path = root / "benchmarks" / "results" / "predicted_layouts_cpu.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _split_section(found: dict[str, Any]) -> list[str]:
    """Layouts over processes: steps, bubbles, and the order of schedules."""
    machine = found["environment"]["machine"]
    lines = [WORDS["SPLIT"].format(processor=machine["processor"], cores=machine["cores"])]
    cases = [case for name, one in found.items() if name != "environment" for case in one["cases"]]
    off = median([abs(case["step_error"]["median"]) for case in cases])
    lines += [f"Median error of all {len(cases)} layouts: {off:.1%}.", ""]
    for processes, one in found.items():
        if processes == "environment":
            continue
        off = median([abs(case["step_error"]["median"]) for case in one["cases"]])
        lines += [
            f"Median error on {processes}: {off:.1%}.",
            "",
            "| model | Plan | rounds | ms per step | predicted | error | of all rounds | bubble | predicted |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for case in one["cases"]:
            took, error, idle = case["step_seconds"], case["step_error"], case.get("bubble")
            bubble = f"{idle['measured']:.1%} | {idle['predicted']:.1%}" if idle else "|"
            lines.append(
                f"| {case['model']} | `{case['plan']}` | {len(case['rounds'])} | {1e3 * took['measured']:.0f} | "
                f"{1e3 * took['predicted']:.0f} | {error['median']:+.1%} | {error['min']:+.0%} to {error['max']:+.0%} "
                f"| {bubble} |"
            )
        lines += [
            "",
            f"Schedules on {processes} from the fastest on, by steps over the product at that time; < is a difference "
            "larger than its spread over the rounds:",
            "",
            "| model | Plan | measured | simulated | pairs against the simulated order |",
            "|---|---|---|---|---|",
        ]
        for order in one["orders"]:
            signs = ["<" if differs else "=" for differs in order["apart"]]
            measured = order["measured"][0]
            for sign, name in zip(signs, order["measured"][1:]):
                measured += f" {sign} {name}"
            against = "; ".join(order["against_the_simulated_order"]) or "none"
            lines.append(
                f"| {order['model']} | `{order['plan']}` | {measured} | {', '.join(order['simulated'])} | {against} |"
            )
        lines.append("")
    return lines


def _own_section(found: dict[str, Any]) -> list[str]:
    """Our own steps on the machine at hand, predicted after a probe of it."""
    sizes = [abs(one["step_error"]["median"]) for one in found["cases"]]
    held_sizes = [abs(one["memory_error"]) for one in found["cases"]]
    lines = [
        WORDS["OWN"].format(
            processor=found["environment"]["machine"]["processor"],
            threads=found["threads"],
            probe=found["probe"],
            clock=found["clock"],
            command=found["command"],
            time=median(sizes),
            memory=median(held_sizes),
        ),
        "| model | Plan | rounds | ms per step | predicted | error | of all rounds | as probed | "
        "MiB | predicted | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found["cases"]:
        took, error = one["step_seconds"], one["step_error"]
        probed = f"{median(one['error_as_probed']):+.1%}" if "error_as_probed" in one else ""
        held = {name: size / 2**20 for name, size in one["memory_bytes"].items()}
        lines.append(
            f"| {one['model']} | `{one['plan']}` | {one['rounds']} | {1e3 * took['measured']:.1f} | "
            f"{1e3 * took['predicted']:.1f} | {error['median']:+.1%} | {error['min']:+.0%} to {error['max']:+.0%} | "
            f"{probed} | "
            f"{held['measured']:.1f} | {held['predicted']:.1f} | {one['memory_error']:+.1%} |"
        )
    return [*lines, ""]


def page(
    held_out: dict[str, list[float]] | None = None,
    own: dict[str, Any] | None = None,
    split: dict[str, Any] | None = None,
) -> str:
    """The whole page as Markdown. `held_out` has the errors of `leave_one_out`, the stored ones by default; `own` and
    `split` what `own_runs` and `split_runs` give, left out by default."""
    held_out = stored_leave_one_out() if held_out is None else held_out
    lines = [
        WORDS["INTRODUCTION"] + "| table | rows | | mean error | largest | bias | left out: mean | largest |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for table, (_, fitted, unit) in TABLES.items():
        s = summary(table)
        out = Summary.of(held_out[table]) if table in held_out else None
        left = f"{out.mean:.1%} | {out.largest:.1%}" if out else "– | –"
        lines.append(
            f"| {TITLES[table]} ({unit}) | {s.rows} | {'fitted' if fitted else 'not fitted'} | {s.mean:.1%} | "
            f"{s.largest:.1%} | {s.bias:+.1%} | {left} |"
        )
    lines += ["", "Sections of BLOOM's sweep, ranked by samples per second:", ""]
    lines += [
        f"| section | layouts | Spearman | pairs over {DAYS:.0%} apart ranked rightly | first, behind the fastest |"
    ]
    lines += ["|---|---|---|---|---|"]
    lines += [
        f"| {r.section} | {r.layouts} | {r.spearman:.2f} | {r.apart:.0%} | {r.loss:.1%} |" for r in rankings()
    ]
    lines += [
        "",
        "The interval that each prediction carries, by its kind: measured over predicted seconds.",
        "",
    ]
    lines += [
        "| kind | rows | four of five lie from | to | between layouts of one model |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {one['words']} | {one['rows']} | {one['low']:.2f} | {one['high']:.2f} | {one['spread']:.1%} |"
        for one in (intervals(own) if own else {}).values()
    ]
    lines.append(WORDS["NOTES"])
    lines += _own_section(own) if own else []
    lines += _split_section(split) if split else []
    for table in TABLES:
        lines += _section(table, held_out.get(table))
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(table: str, held_out: list[float] | None) -> list[str]:
    unit = TABLES[table][2]
    lines = [
        f"## {TITLES[table]}",
        "",
        f"{unit[0].upper()}{unit[1:]}. Source: {source(FILES.get(table, table))}.",
        "",
    ]
    lines += ["| row | measured | predicted | error | left out |", "|---|---|---|---|---|"]
    for i, row in enumerate(rows(table)):
        predicted = row.predict(DEFAULT)
        left = f"{held_out[i]:+.1%}" if held_out else "–"
        lines.append(
            f"| {row.name} | {row.measured:.4g} | {predicted:.4g} | {predicted / row.measured - 1:+.1%} | {left} |"
        )
    return [*lines, ""]


def write(root: Path, *, refit: bool = True) -> Path:
    """Write the page into `root`/docs, refitting without each model first; gives its path."""
    held_out = None
    if refit:
        held_out = {name: [round(one, 5) for one in errors] for name, errors in leave_one_out().items()}
        stored = Path(__file__).parent / "tables" / "leave_one_out.json"
        stored.write_text(json.dumps(held_out) + "\n", encoding="utf-8")
    path = root / "docs" / "reference" / "planner-accuracy.md"
    path.write_text(page(held_out, own_runs(root), split_runs(root)), encoding="utf-8")
    stored = root / "src" / "penstock" / "planner" / "intervals.json"
    stored.write_text(json.dumps(intervals(own_runs(root)), indent=1) + "\n", encoding="utf-8")
    return path
