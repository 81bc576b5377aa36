"""The page that shows every published row beside what the planner says of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, quantiles
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
    "nemo": "NeMo on H100, fp8",
    "megatron": "Megatron-LM's README of 2020, A100",
    "vit": "ViTs in NeMo and JAX, A100 and H100",
    "flash_training": "Decoders with each generation of attention, A100",
    "attention": "Attention kernels, A100 and H100",
}
FILES = {"mosaicml_a100": "mosaicml", "mosaicml_h100": "mosaicml", "torchtitan_memory": "torchtitan"}
FILES |= {"torchtitan_speed": "torchtitan"}


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
        ("mosaicml_h100", "torchtitan_speed", "nemo"),
        "published runs of language models on H100 and H200",
    ),
    "vision": (("vit",), "published runs of ViTs on A100 and H100"),
}
"""The tables that stand for a kind of prediction, and what their rows are."""


def slowness(table: str) -> list[tuple[str, float]]:
    """Of each row, its model and measured over predicted seconds."""
    faster = TABLES[table][2].startswith(("tokens", "images", "samples"))
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
            "apart": round(quantiles(apart, n=5, method="inclusive")[3], 3), "rows": len(given), "words": words,
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


INTRODUCTION = """# How right the planner is

Written by `python tools/planner_accuracy.py`; a test holds it to what the code says, and fails when a table's
errors grow. Errors are the prediction over the measurement, less one: of a time, a negative error is a prediction that
is too fast.

Constants are fitted on the tables marked *fitted* and on nothing else. There are none per model, table or row; all of
them stand in `planner/constants.py`. *Left out* are the errors of a row under constants fitted without any row of its
model. Tables that are not fitted show how far the planner carries: to another chip, another framework, another
cluster.

"""

NOTES = """
What the errors are made of, as far as it is known:

- MosaicML: the largest errors are rows that stand out from their neighbours: 760M at 512 and 1,024 tokens, 1B on 32
  devices, 30B at 8,192 tokens, 70B on 64 and 13B on 8 devices of 40 GB are measured 10 to 28 % slower than the same
  model a step away. The last three fill the memory, and the allocator's retries are not modelled. That the 80 GB rows
  were made with a torch whose checkpointing stops early is inferred from the rows themselves and not stated by their
  source.
- Ceilings of matrix products are the best that a sweep found in short bursts; training sustains less of them on purpose
  (`gemm_share`).
- H100: the share of the ceiling that long runs sustain (`gemm_share_hopper`) is fitted on MosaicML's rows of H100 and
  on nothing else, after all other constants. A Hopper chip computes 1.8 times as much per watt of its limit as an A100
  and lowers its clock further. torchtitan's and NeMo's rows have no say in it. That of B200 and MI300X is a guess.
- torchtitan, A100: 7 to 9 % too fast throughout. The source says little of the runs; their attention and their loss
  over 128,256 words run in kernels that this planner takes to be as fast as MosaicML's.
- torchtitan, H100: cards held to 500 W, whose rates are assumed to fall with the root of the power. Overlapped tensor
  parallelism gained 4 to 16 % where 20 to 27 % are predicted: that a collective is cut into pieces does not hide all of
  it. fp8 with a scale per row ran no faster than bf16 there; here it costs what a scale per tensor does. Two rows of
  context parallelism at 131,072 and 262,144 tokens are half as fast as predicted: torch of that time gathered all keys
  and values at once and added partial results up in fp32, and ring attention hidden behind its computing is predicted.
- NeMo: the products that make gradients of weights add them up, so no pass of its own is counted. That was decided when
  these rows had been seen: with the Hopper share and without it they are 10 % too slow on the mean. No constant is
  fitted to them, but they are no blind test any more. The same holds for the ViTs of NeMo and JAX, whose softmax and
  whose hidden collectives were settled with the rows in view, from what is known of that software and not from the
  sources of the rows.
- BLOOM: the layout ranked first is within 1.1 % of the fastest in every section. Spearman stays below 0.9 in five of
  seven, for reasons that lie in how these runs were made and cannot be fitted to. Each figure is one iteration, the
  second of a run; one layout differs by up to 6 % between days, while a quarter to a half of a section's pairs lie
  closer together than that, so the share of pairs further apart stands beside the plain rank correlation. The network
  is taken at what its users measured of it, 20 GB/s of a node's nominal 50: an all-reduce over four of these nodes
  carried 40.5 Gb/s through the one adapter of each that its rings used, and the groups of replicas here use all four.
  At the nominal rate errors grew with the number of replicas and with shrinking batches; now the four batches of one
  layout ("Batchsize Warmup") are all 4 to 5 % too fast. Nodes were set up better from 25 February on, which the source
  says gained 1 to 5 %; "NHEADs comparison" is from before. What is left is largest for micro-batches of two on 8 tensor
  parallel devices, 11 to 17 % too fast, though the same products on 320 devices a week before were not. Every launch
  waited for its kernel, and the 20 µs counted per kernel for that are what `penstock probe` measures of an eager
  operator on the same generation of host (23 µs); what waiting itself adds is unknown, and the source's own comparisons
  of it range from nothing to 6 %. Three layouts with heads of 128 numbers, 12, 14 or 26 of them on a device, run 15 %
  slower than their neighbours, which have 16, 24 or 28 of the same heads; two of them multiply and normalise scores of
  exactly the shapes of two neighbours (48 and 56 pairs of a sample and a head), so that nothing computed from shapes
  tells them apart. Heads of 108 numbers, whose rows are no multiple of 16 bytes, run a quarter slower than predicted,
  as if attention's products were kept from tensor cores. Three more rows stand out: a batch of 1,568 (dp 8, tp 8, pp 6)
  took as long as that of 2,048 beside it; width 13,824 with micro-batches of one took 43 % longer than with two, and
  14,336 with 128 heads and micro-batches of four on tp 4 took 21 % longer than with two. A model perfect in all rows
  but these six, and as wrong there as the others are on the median, would reach 0.895 and 0.81 in the two sections on
  heads.
- Attention kernels: the second generation is within 3 to 6 % on the mean in training on both chips. Held against these
  rows, an earlier model without exponentials, without whole tiles on the diagonal of a causal mask and without a tile's
  own loads and stores was twice too fast at 512 tokens; what replaced it has no constant of theirs, but these rows
  were seen when it was decided what is counted, and that the stated shares of peak are those of heads of 128: they are
  no blind test of it, as the rows of torchtitan are. Heads of 256 need more registers than
  there are, which is not modelled, nor is the first generation's own dependence on the heads. Unfused attention with
  a causal mask is 10 to 50 % slower than predicted, most in short sequences and with wide heads, where its products
  are few and small.
- Decoders with each generation of attention: neither micro-batch nor layout is stated, and the largest micro-batch that
  fits a step without accumulation is assumed, which for plain attention may be a single sequence.
- ViTs: NeMo's rows are within 12 %, 3.5 % on the mean, since their softmax in fp32 by single operators is counted and
  no wait between steps. JAX's are 14 to 63 % slower than predicted: nothing of how XLA cut these programs into kernels,
  and of whether the input kept up, is stated; B/16 on H100, where the input has to deliver 11,700 images a second, is
  the worst. What Meta published of faster ViTs in 2022 are ratios to a baseline whose batch and number of devices are
  in pictures only, and speeds of CLIP, ViT-5 and data-bound epochs lack the chip, the architecture or the input: no row
  of those could be asked.
"""


def own_runs(root: Path) -> dict[str, Any]:
    """What `benchmarks/predicted_own_runs.py` last found, from the repository at `root`."""
    path = root / "benchmarks" / "results" / "predicted_own_runs_cpu.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _own_section(found: dict[str, Any]) -> list[str]:
    """Our own steps on the machine at hand, predicted after a probe of it."""
    lines = [
        "## Our own runs",
        "",
        f"Training steps on a CPU ({found['environment']['machine']['processor']}, {found['threads']} thread), fp32, "
        f"each predicted by a {found['probe']} `penstock probe` right before and one right after it, in "
        f"{found['clock']}, on a machine whose other work made its speed drift. Errors are medians over the rounds; "
        "the least and the largest stand beside them. `penstock train` and `penstock ladder` set the same two "
        "figures side by side in every run. Memory is the most that tensors take within a step, counted one by one, "
        f"against `memory_bytes`. Made by `{found['command']}`, stored in "
        "`benchmarks/results/predicted_own_runs_cpu.json`. The decoders are of transformers, traced as "
        "`penstock ladder --model` does. No constant was fitted to these times, but the "
        "share of memory that glibc gives back is a guess from page faults counted in such steps; no GPU was at hand. "
        "Large models are shown with `host_memory=keep`: "
        "left to itself, glibc may give back and map again all gradients of a large model in every step, or none; "
        "a quarter of them is what is predicted.",
        "",
        "| model | Plan | rounds | ms per step | predicted | error | of all rounds | MiB | predicted | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found["cases"]:
        took, error = one["step_seconds"], one["step_error"]
        held = {name: size / 2**20 for name, size in one["memory_bytes"].items()}
        lines.append(
            f"| {one['model']} | `{one['plan']}` | {one['rounds']} | {1e3 * took['measured']:.1f} | "
            f"{1e3 * took['predicted']:.1f} | {error['median']:+.1%} | {error['min']:+.0%} to {error['max']:+.0%} | "
            f"{held['measured']:.1f} | {held['predicted']:.1f} | {one['memory_error']:+.1%} |"
        )
    return [*lines, ""]


def page(held_out: dict[str, list[float]] | None = None, own: dict[str, Any] | None = None) -> str:
    """The whole page as Markdown. `held_out` has the errors of `leave_one_out`, the stored ones by default; `own` what
    `own_runs` gives, left out by default."""
    held_out = stored_leave_one_out() if held_out is None else held_out
    lines = [INTRODUCTION + "| table | rows | | mean error | largest | bias | left out: mean | largest |"]
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
        f"| {one['words']} | {one['rows']} | {one['low']:.2f} | {one['high']:.2f} | {one['apart']:.1%} |"
        for one in (intervals(own) if own else {}).values()
    ]
    lines.append(NOTES)
    lines += _own_section(own) if own else []
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
    path.write_text(page(held_out, own_runs(root)), encoding="utf-8")
    stored = root / "src" / "penstock" / "planner" / "intervals.json"
    stored.write_text(json.dumps(intervals(own_runs(root)), indent=1) + "\n", encoding="utf-8")
    return path
