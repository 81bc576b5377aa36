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
    "moe_exchange": "Exchanges of tokens by DeepEP, H800 and H100",
    "moe_serving": "One stream of Qwen3-235B-A22B in four bits, A100 and MI300X",
}
FILES = {"mosaicml_a100": "mosaicml", "mosaicml_h100": "mosaicml", "torchtitan_memory": "torchtitan"}
FILES |= {"torchtitan_speed": "torchtitan", "bloom_memory": "bloom"}
FILES |= {
    "moe_layer": "moe_megatron_moe_layer",
    "moe_training": "moe_modelzoo_qwen3",
    "moe_exchange": "moe_deepep",
}


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


INTRODUCTION = """# How right the planner is

`python tools/planner_accuracy.py` writes this page. A test holds it to what the code says, and fails when a table's
errors grow.

An error is the prediction over the measurement, less one. For a time, a negative error is a prediction that is too
fast.

Constants are fitted on the tables marked *fitted*, and on nothing else. There are none per model, table or row. All of
them stand in `planner/constants.py`. *Left out* are the errors of a row under constants fitted without any row of its
model. Tables that are not fitted show how far the planner carries: to another chip, framework or cluster.

"""

NOTES = """
## What was decided with rows in view

No constant is fitted to a table marked *not fitted*. Yet some of what is counted was chosen after its errors had been
seen, so these rows are no blind test. Each choice follows the source of the software that was measured:

- Attention kernels: what a tile computes and moves; what plain attention copies; that its products store their results
  in the open; that a long row of its softmax is read twice and its mask once for each head.
- NeMo: gradients add up in the products that make them, and in bf16.
- Megatron-LM: its loss reads and writes all logits in fp32 several times, as its `cross_entropy.py` does. BLOOM's is
  the same, and is still counted as torch's. Counted as it is, its rows are 7.2 in place of 7.3 % wrong, but a few pairs
  that are predicted alike change places, and two sections are ranked worse (0.75 and 0.70).
- ViTs: which kernels compute softmax, norms and dropout under NeMo and under XLA. That JAX reduces gradients in bf16 is
  assumed; its source does not say it.
- torchtitan: what torch's tensor parallelism copies, keeps and cannot overlap; what fp8 sends; what a scale per row
  casts. That torch found no products with a scale per row to overlap was reported for torchtitan in February 2025. Rows
  of June still gained 4 to 6 %. This choice took the table's mean error from 12.0 to 10.1 %. That the host waits for
  each batch to be copied, that queries, keys and values are layers of their own and that keys are written for each
  query took it from 9.5 to 8.4 %; that nccl divides gradients for its FSDP took it to 8.8 %.
- Parts of context parallel attention: that they are weighed and added up, by single operators in fp32 in torch and by
  one kernel in NeMo and Megatron-Core. torchtitan's mean error fell from 10.1 to 9.5 %, NeMo's from 5.3 to 4.8 % and
  Qwen3's from 10.4 to 9.8 %.
- BLOOM's time: DeepSpeed's optimizer for bf16 copies the gradients of each micro-batch to fp32 before it adds them, and
  its pipeline sums all of them over replicas, in fp32 (`bf16_optimizer.py` and `pipe/engine.py`). The mean error fell
  from 9.2 to 8.3 %, that of the section in bf16 from 7.3 to 3.1 %. In heads of 108 features rows begin at multiples of
  8 bytes. That attention's products ran without tensor cores there is inferred from the five rows that have them, which
  took 30 % longer than their neighbours; no source says it. The rate of fp32 units explains all five, and the table's
  mean error fell to 7.3 %.
- BLOOM's memory: what DeepSpeed, nccl and CUDA hold beside tensors.
- Decoders with each generation of attention: plain attention that does not fit computes its scores again.
- The fit: MosaicML's table weighs as much as Korthikanti's Table 5. Weights of 1, 1.5, 2 and 3 were compared on all
  tables, and 1.5 was chosen.
- MosaicML's loss is counted as torch's own. The fused loss with its metrics was tried too: it made the A100 rows 4.2 to
  4.5 % wrong on the mean.
- Mixtures of experts: that tokens leave a node through each device's own adapter; that a router multiplies in fp32,
  without tensor cores; what is copied before and after an exchange; that an expert's last tile of rows is half empty;
  that tokens are padded for products in fp8, unless they come so; that Megatron's FSDP copies no shards (Qwen3's mean
  error fell from 9.8 to 9.5 %).
  What was measured by itself runs at the highest clock. One constant, the host's time for a block of Qwen3-235B-A22B,
  is fitted to two rows of that model. It is not the planner's: it belongs to the software that was measured.
- The planner fills cards up to 98 %. With 97 % it refused one of MosaicML's layouts, which had run, for 0.1 GiB.

## What the errors are made of

**MosaicML.** The largest errors are rows that stand out from their neighbours: 760M at 512 and 1,024 tokens, 1B on 32
devices, 30B at 8,192 tokens, 70B on 64 and 13B on 8 devices of 40 GB. They are 10 to 28 % slower than the same model a
step away. The last three fill the memory, and the allocator's retries are not modelled. That the 80 GB rows were made
with a torch whose checkpointing stops early is inferred from the rows; their source does not say it. Its loss is fused,
and two metrics compute it again. Nothing says in which type, so the three are counted as torch's own loss. Under the
fused loss every layout of these rows fits its card, as it must.

**Ceilings of matrix products.** They are the best that a sweep found in short bursts. Training sustains less of them on
purpose (`gemm_share`).

**H100.** The share of the ceiling that long runs sustain (`gemm_share_hopper`) is fitted on MosaicML's rows of H100
alone, after all other constants. A Hopper chip computes 1.8 times as much per watt of its limit as an A100 and lowers
its clock further. The share of B200 and MI300X is a guess.

**torchtitan, memory.** The largest error is tensor parallelism without overlap. What it gathers it also copies, and
torch's allocator keeps the room of both.

**torchtitan on A100.** All rows are predicted 5 to 11 % too fast. The source says nothing of the network between the
nodes. At 50 GB/s out of each, a quarter of what is taken, seven of the eight rows would be within 5 %.

**torchtitan on H100.** The cards are held to 500 W. Rates are assumed to fall with the root of the power. Rows of
context parallelism over four and eight devices are predicted 43 and 50 % too fast. Their attention takes 1.6 times as
long for each product as over one or two. Its transfers and its sums in fp32 are counted; the rest is unknown.
fp8 with a scale per row ran no faster than bf16. Its casts are counted, and that torch did not find its products to cut
for overlap. Not counted is that torch's kernel for it is slower than cuBLAS, most in small products. Were gradients
divided by a pass of their own, as in the first FSDP, the mean error would be 8.4 %: what is missing is elsewhere.

**Llama 3 405B.** It was trained on 8,192 and 16,384 H100 of 80 GB without recomputation, with tensor degree 8, 16
stages and gradients in shards (Llama Team, 2024, section 3.3.2). With `virtual=4`, 16 micro-batches, `sharding=zero2`
and `compile=blocks` 75 GiB are predicted, 64 of them activations: the second device keeps 128 blocks of one micro-batch
at 508 MiB each. Whole gradients in fp32 (`zero1`) need 87 GiB, and eager blocks, which keep one more array of a gated
perceptron, 101: both would not have fitted.

**BLOOM, time.** The layout ranked first is within 1.1 % of the fastest in every section. Single figures are less
certain. Each is one iteration, and one layout differs by up to 6 % between days. A quarter to a half of a section's
pairs lie closer together than that, so the share of pairs further apart stands beside the rank correlation. The network
is taken at what its users measured, 20 GB/s of a node's nominal 50. Predictions are 7 % too fast on average, most for
micro-batches of two on 8 tensor parallel devices, for which nothing in shapes or sources gives a reason. The first two
sections are from before the nodes' PCI Express was set better, which by its source was worth 1 to 5 %. Every launch
waited for its kernel; what that costs is an estimate.
A prediction that knows nothing of this run, neither its network nor its waits nor its loss, is 16 % too fast. Six odd
rows are 15 to 43 % slower than their neighbours, and nothing computed from shapes tells them apart.

**BLOOM, memory.** The figures are nvidia-smi's. They include the CUDA context, nccl's buffers, and flat buffers of
DeepSpeed that find no room in what activations leave: what Penstock's own training would hold is 20 % less. One layout
was measured twice, at 44 and at 38.

**Megatron-LM on H100.** The source names no micro-batch, no kernel of attention and no options of recomputation.
cuDNN's kernel and the whole batch of a replica at once are taken. Rows with a pipeline depend on virtual stages
besides, which it does not name either, and are left out. The smallest model is 48 replicas of a narrow network under a
wide vocabulary: a twelfth of its step is the loss, and a tenth waits for the host. Pieces of cut products are sent by
copy engines, in Transformer Engine those of gathers, in torch all; still all collectives are counted as if they kept
multiprocessors from the products. Without that, in the forward pass, the mean error would be 4.2 %, but NeMo's 5.1 and
torchtitan's 9.0 %.

**Attention kernels.** The second generation is within 3 to 6 % on the mean in training on both chips. Heads of 256 need
more registers than there are, which is not modelled. Nor is how the first generation depends on the heads. Plain
attention of up to 1,024 tokens is still predicted a quarter too fast.

**Decoders with each generation of attention.** The source states neither micro-batch nor layout. The largest
micro-batch that fits without accumulation is assumed.

**Mixtures of experts, by themselves.** In bf16 the mean error is 3 %. Forward passes in fp8 are up to a fifth slower
than predicted. Their scales are of blocks of 128 numbers, and how these are made is not modelled. That tokens are
copied to where each expert's rows are padded is: so DeepEP's exchange takes longer than HybridEP's in fp8 above all.

**Qwen3-235B-A22B in Megatron-Core.** Rows of long texts, which the device limits, are within 5 %. Rows of real routing
are left out, for their loads are not stated: they are 1.09 to 1.24 times as slow as with forced balance, which is what
`--loads` is for. With 1,024 tokens on a device, and with exchanges hidden, the host is the limit. The row with `A2A` is
a third slower than predicted. Its exchange by itself is right in the table above, and its 32 stages of three blocks
leave each block to the host; the source explains no more. Fully sharded data parallelism is predicted 18 % slower than
it was, though Megatron's own makes no copies: its transfers between nodes take as long as computing, and the source
does not say in which type gradients are reduced.

**Exchanges.** The slower of links and adapters is counted. DeepEP's kernels of low latency, for generation, are left
out.

**One stream.** Much of each block is its two sums over eight devices, which Tutel makes by kernels of its own and the
planner by nccl's. The other rows of that source have latent attention or attention sinks, which no preset has.

**ViTs.** NeMo's rows are within 12 %. JAX's source states the model, its dropout and its random numbers, and these are
counted. It does not state the network, which its rows on several nodes depend on, nor whether the input kept up. B/16
on H100 would need 16,000 images a second from CPUs. So JAX's rows stay 10 to 40 % slower than predicted. Meta's faster
ViTs of 2022 are ratios to a baseline whose batch and number of devices are only in pictures. Speeds of CLIP, ViT-5 and
data-bound epochs lack the chip, the architecture or the input. No row of those could be asked.
"""


def own_runs(root: Path) -> dict[str, Any]:
    """What `benchmarks/predicted_own_runs.py` last found, from the repository at `root`."""
    path = root / "benchmarks" / "results" / "predicted_own_runs_cpu.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def split_runs(root: Path) -> dict[str, Any] | None:
    """What `benchmarks/predicted_layouts.py` last found; None where it was not run yet."""
    path = root / "benchmarks" / "results" / "predicted_layouts_cpu.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


SPLIT = """## Steps over several processes

Training steps of models that are split over processes of one CPU ({processor}, {cores} cores), which share its cores
and send over gloo. Each round probes the machine with all processes at once, takes steps under each layout, and probes
again. Predictions are scaled by how much slower a fixed product was among the steps than around the probes. Times are
wall-clock time. A bubble is the share of time for which the ranks of a pipeline are idle within a step, on their mean.

Two processes are bound to a core each, as `penstock launch --bind-cores` does. Four take turns on the two cores, so
that each waits for a processor in every collective. The probe measures how long ranks wait while all compute, and what
collectives between products cost. Still most layouts of four are predicted a quarter too fast: a wait grows with what
ranks compute between two collectives, and the probe measures it at one such distance, of 5 ms.

Made by `benchmarks/predicted_layouts.py`, and stored in `benchmarks/results/predicted_layouts_cpu.json`.
"""


def _split_section(found: dict[str, Any]) -> list[str]:
    """Layouts over processes: steps, bubbles, and the order of schedules."""
    machine = found["environment"]["machine"]
    lines = [SPLIT.format(processor=machine["processor"], cores=machine["cores"])]
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


OWN = """## Our own runs

Training steps on a CPU ({processor}, {threads} thread for each process). Each was predicted by a {probe}
`penstock probe` right before and one right after it. Times are {clock}; those of two processes
(`dp=2`) are wall-clock time. Nothing else ran meanwhile. Errors are medians over the rounds, with the least and the
largest beside them. Memory is the most that the tensors of one process take within a step, without the batch.
`penstock train` and `penstock ladder` set the same figures side by side in every run.

Made by `{command}` and stored in
`benchmarks/results/predicted_own_runs_cpu.json`. GPT-2, BERT and T5 are those of transformers, traced as
`penstock ladder --model` does. No constant was fitted to these times. The share of memory that glibc gives back is a
guess from page faults counted in such steps: without `host_memory=keep` it may give back and map again all gradients of
a large model in every step, or none. A quarter of them is what is predicted.

Two things made errors of earlier versions of this table larger, and were found with GPT-2's whole loss, which was
predicted 18 % too fast. A heap that keeps its memory still grows for about five steps, and each page that it touches
first takes 10 µs on this virtual machine: such cases are now timed once a step touches no new page. And rows of 50,257
outputs begin inside a vector, where MKL's fp32 products reach 0.74 of their rate: the probe now measures one such
product. Rows with "as probed" were measured since. Their predictions are scaled by how much slower a fixed product was
among the steps than around the probes, for the speed of this host changes by a quarter within a minute; "as probed" is
the median error without this scaling. The other rows were measured before. All rows of our own text models are from
before dropout and their loss became faster on CPUs, with the predictions of that time.

Median error of all cases: {time:.1%} of time, {memory:.1%} of memory.
"""


def _own_section(found: dict[str, Any]) -> list[str]:
    """Our own steps on the machine at hand, predicted after a probe of it."""
    sizes = [abs(one["step_error"]["median"]) for one in found["cases"]]
    held_sizes = [abs(one["memory_error"]) for one in found["cases"]]
    lines = [
        OWN.format(
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
        f"| {one['words']} | {one['rows']} | {one['low']:.2f} | {one['high']:.2f} | {one['spread']:.1%} |"
        for one in (intervals(own) if own else {}).values()
    ]
    lines.append(NOTES)
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
