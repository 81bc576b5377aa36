"""Each row of the published tables as a question to the planner: a model, a machine, a Plan and what was measured.

How a row becomes a Plan is said here once per table, from what its source says of the software; nothing depends on the
row's model or on what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

from calibration import blind, experts
from calibration.table import (
    Rewrite,
    Row,
    Software,
    as_torch_does,
    by_fp32_units,
    decoder,
    iteration_seconds,
    read,
    with_layers_apart,
)
from penstock.config.formats import Products
from penstock.config.machine import Machine, load_machine
from penstock.config.model import DecoderConfig
from penstock.config.plan import Plan, Recompute, TensorOverlap
from penstock.planner.constants import DEFAULT, Constants
from penstock.planner.describe import describe, totals
from penstock.planner.memory import group_bytes, memory, worst_stage
from penstock.planner.operators import Op, Workload
from penstock.planner.pipeline import in_flight
from penstock.planner.price import gather_seconds, group_of, reduce_seconds
from penstock.planner.price import seconds as price
from penstock.planner.rates import rates_of
from penstock.planner.states import device_share
from penstock.planner.step import PartTime, layout_of, part_time

GIB = 2**30


# Megatron-LM of early 2022: fp16 with fp32 master weights, fused kernels, unfused attention, nothing hidden between
# replicas, and the reduction of inputs' gradients hidden behind those of weights.
_MEGATRON = Plan(
    precision="O2",
    dtype="fp16",
    optimizer="fused",
    compile="blocks",
    attention="plain",
    token_order="batch_second",
    overlap=False,
)


MEGATRON = Software(host_waits=True, even_stages=True, loss="megatron")
"""Its timers wait for the device, and its log reads the loss of every step. It shares blocks out evenly. Its loss is
that of one vocabulary over several devices even on one."""


def korthikanti_table4() -> Iterator[Row]:
    """Forward and backward milliseconds of one layer."""
    model, machine = decoder("gpt-22b"), load_machine("a100-80g")
    for row in read("korthikanti_table4"):
        words = row["experiment"].lower()
        kind: Recompute = "full" if "full" in words else "selective" if "selective" in words else "none"
        plan = replace(_MEGATRON, tp=8, micro_batch=4, sp="sequence" in words, recompute=kind)

        def timed(constants: Constants, plan: Plan = plan) -> PartTime:
            (block,) = describe(model, plan).blocks
            return part_time(block, rates_of(machine, plan, constants), layout_of(plan))

        def forward(constants: Constants, timed: Callable[[Constants], PartTime] = timed) -> float:
            return 1e3 * timed(constants).forward.total

        def backward(constants: Constants, timed: Callable[[Constants], PartTime] = timed) -> float:
            return 1e3 * timed(constants).back

        yield Row(
            "korthikanti_table4",
            f"{row['experiment']}, forward",
            "22b layer",
            float(row["forward_ms"]),
            forward,
        )
        yield Row(
            "korthikanti_table4",
            f"{row['experiment']}, backward",
            "22b layer",
            float(row["backward_ms"]),
            backward,
        )


def korthikanti_table5() -> Iterator[Row]:
    """Seconds per iteration of 22B to 1T, under full recomputation and under selective with sequence parallelism."""
    machine = load_machine("a100-80g")
    for row in read("korthikanti_table5"):
        model = decoder(f"gpt-{row['model'].lower()}")
        sp = row["sequence_parallel"] == "yes"
        dp, micro, virtual = int(row["dp"]), int(row["micro_batch"]), int(row["virtual_stages"])
        plan = replace(
            _MEGATRON, tp=int(row["tp"]), pp=int(row["pp"]), dp=dp, micro_batch=micro, virtual=virtual, sp=sp,
            accumulate=int(row["global_batch"]) // micro // dp, schedule="interleaved" if virtual > 1 else "1f1b",
            recompute="selective" if sp else "full",
        )  # fmt: skip
        if row["iter_time_s"]:
            measured = float(row["iter_time_s"])
        else:
            useful = totals(model).model_flops * plan.global_batch / plan.gpus
            measured = useful / (float(row["mfu_pct"]) / 100 * machine.peak_flops["fp16"])
        name = f"{row['model']}, {plan.gpus} GPUs, {plan.recompute}{' + sp' if sp else ''}"
        yield Row(
            "korthikanti_table5",
            name,
            row["model"],
            measured,
            iteration_seconds(model, machine, plan, MEGATRON),
        )


_MOSAICML = {"a100_40gb": "a100-40g", "a100_80gb": "a100-80g", "h100_80gb": "h100"}


def mosaicml_plans(chip: str) -> Iterator[tuple[dict[str, str], DecoderConfig, Machine, Plan]]:
    """MPT under FSDP, eager, with Triton's first flash attention; `chip` is a100 or h100.

    The 40 GB rows (mixed precision PURE) reduce gradients in bf16, and repeat blocks whole; those of the 80 GB cards
    (DEFAULT) reduce in fp32, and are taken to be made with torch 2.1 or later, whose checkpointing stops early.
    """
    for row in read("mosaicml"):
        if chip not in row["gpu"] or "fp8" in row["precision"]:
            continue
        model = replace(decoder(f"mpt-{row['model']}"), sequence=int(row["sequence"]))
        pure = row["mixed_precision"] == "PURE"
        again: Recompute = "none"
        if row["checkpointing"] == "True":
            again = "full" if pure else "early"
        plan = Plan(
            precision="O2", gradients="half" if pure else "weights", optimizer="foreach", attention="efficient",
            dp=int(row["gpus"]),
            sharding="fsdp", micro_batch=int(row["micro_batch"]), accumulate=int(row["accumulate"]), recompute=again,
        )  # fmt: skip
        yield row, model, load_machine(_MOSAICML[row["gpu"]]), plan


MOSAICML = Software(host_waits=True, loss="torch", divides_gradients=True)
"""Its loss is one fused kernel (llm-foundry's `loss_fn`), but Composer's two metrics of training compute the loss twice
more. Nothing says in which type; together they are taken to cost what torch's own loss does. Weights are sharded by
torch's first FSDP."""


def mosaicml(chip: str) -> Iterator[Row]:
    """Seconds per iteration of `mosaicml_plans`."""
    for row, model, machine, plan in mosaicml_plans(chip):
        name = f"{row['model']}, {row['sequence']} tokens, {row['gpus']} {machine.name}, micro-batch {plan.micro_batch}"
        yield Row(
            f"mosaicml_{chip}",
            name,
            row["model"],
            float(row["iter_time_s"]),
            iteration_seconds(model, machine, plan, MOSAICML),
        )


TITAN = Software(norms_apart=True, host_waits=True, layers_apart=True, loss="torch")
"""Its batches come from pageable memory (`input_ids.cuda()` in its `train.py`), and such a copy waits until the device
has done all that was launched before (`memcpy_and_sync` in torch's `Copy.cu`). So the host cannot run ahead of a step.
"""


def _titan_products(words: str) -> Products:
    if "float8" not in words:
        return "plain"
    return "fp8" if "rowwise" in words else "fp8_tensorwise"


def _titan_overlap(row: dict[str, str]) -> TensorOverlap:
    """Under a scale per row torch did not find the products to cut (pytorch/torchtitan issue 866)."""
    cuts = "async" in row["techniques"].lower() and "rowwise" not in row["precision"]
    return "all" if cuts else "none"


def _titan(row: dict[str, str]) -> tuple[DecoderConfig, Plan]:
    """A row's model and Plan. Under context parallelism torch then gathered all keys and values at once."""
    family, size = ("llama3", row["model"].split()[-1].lower())
    if row["model"].startswith("Llama 2"):
        family = "llama2"
    model = replace(decoder(f"{family}-{size}"), sequence=int(row["seq_len"]))
    tp, cp = int(row["tp"]), int(row["cp"])
    kind: Recompute = {"s": "operators", "p": "operators", "f": "early", "n": "none"}[row["ac"][0]]  # type: ignore[assignment]
    every = 1
    if row["ac"] == "selective layer":
        kind, every = "early", 2
    plan = Plan(
        precision="O2", optimizer="fused", attention="flash", products=_titan_products(row["precision"]),
        tp=tp, sp=tp > 1, cp=cp, cp_exchange="gather", dp=int(row["gpus"]) // tp // cp, sharding="fsdp",
        micro_batch=int(row["local_batch"]), recompute=kind, recompute_every=every, tp_overlap=_titan_overlap(row),
        gather="products" if "all-gather" in row["precision"] else "level",
        # The H200 rows are of 2025, when the loss was compiled too.
        compile="none" if row["compile"] != "yes" else "whole" if "H200" in row["table"] else "blocks",
    )  # fmt: skip
    return model, plan


def _titan_kernels(row: dict[str, str]) -> Rewrite | None:
    """Under a scale per tensor, inputs are cast to fp8 before they are gathered (its docs/float8.md)."""
    if int(row["tp"]) == 1:
        return None
    cast = "float8" in row["precision"] and "rowwise" not in row["precision"]
    return partial(as_torch_does, gathered=0.5 if cast else 1.0)


def torchtitan_memory() -> Iterator[Row]:
    """GiB of Llama 3.1 under FSDP2, tensor and context parallelism."""
    for row in read("torchtitan"):
        if row["mem_gib"]:
            model, plan = _titan(row)
            work = describe(model, plan, software=TITAN)
            rewrite = _titan_kernels(row)
            if rewrite:
                work = rewrite(work, plan, load_machine("h100"))

            def predict(constants: Constants, work=work, plan: Plan = plan) -> float:  # type: ignore[no-untyped-def]
                # torch's own counter, which knows nothing of nccl's buffers.
                parts = memory(work, plan, constants)
                return (sum(parts.values()) - parts["communication"]) / GIB

            name = f"{row['model']}, {row['seq_len']} tokens, {row['gpus']} GPUs, {row['techniques']}"
            yield Row("torchtitan_memory", name, row["model"], float(row["mem_gib"]), predict)


def torchtitan_speed() -> Iterator[Row]:
    """Tokens per second per GPU of the same runs and more; never fitted to."""
    base = load_machine("h100")
    # The card is held to 500 of 700 W. Rates are taken to fall with the root of the power.
    slower = (500 / 700) ** 0.5
    teton = replace(
        base, name="h100-96g", memory_bytes=96e9, memory_bytes_per_second=2.4e12, power_watts=500.0,
        peak_flops={name: slower * rate for name, rate in base.peak_flops.items()},
        achievable_flops={name: slower * rate for name, rate in base.achievable_flops.items()},
    )  # fmt: skip
    for row in read("torchtitan"):
        model, plan = _titan(row)
        machine = load_machine("a100-80g") if "A100" in row["table"] else teton
        machine = load_machine("h200") if "H200" in row["table"] else machine
        rewrite = partial(
            with_layers_apart,
            shared=(model.kv_heads or model.heads) / model.heads,
            before=_titan_kernels(row),
        )
        seconds = iteration_seconds(model, machine, plan, TITAN, rewrite)
        tokens = plan.global_batch * int(row["seq_len"]) / plan.gpus

        def predict(constants: Constants, seconds=seconds, tokens: float = tokens) -> float:  # type: ignore[no-untyped-def]
            return float(tokens / seconds(constants))

        name = f"{row['model']}, {row['seq_len']} tokens, {row['gpus']} GPUs, {row['precision']}, {row['techniques']}"
        name += f", {row['ac']} ({row['table']})"
        yield Row("torchtitan_speed", name, row["model"], float(row["tps_per_gpu"]), predict)


_ADAPTER = 40.5e9 / 8
"""Bytes per second through one Omni-Path adapter of Jean Zay's A100 nodes, nominally 12.5e9: what an all-reduce over
four nodes reached, whose rings enter and leave each node through one adapter (bigscience-workshop/bigscience at
9e64edec2ad1, experiments/bandwidth/all_reduce_bench-a100-n4.txt, trials after the first)."""


BLOOM = MEGATRON._replace(loss="torch")
"""Its loss is Megatron's too, but stays counted as torch's: see the page of accuracy."""


def _bloom(row: dict[str, str]) -> tuple[DecoderConfig, Plan, str]:
    width = int(row["hidden"])
    model = replace(
        decoder("bloom-176b"), width=width, depth=int(row["layers"]), heads=int(row["heads"] or 96),
        mlp_width=4 * width, dropout=0.1,
    )  # fmt: skip
    half = "Rebalancing" not in row["section"] and row["section"] != "bf16"
    micro, dp = int(row["mbs"]), int(row["dp"])
    plan = replace(
        _MEGATRON, dtype="fp16" if half else "bf16", gradients="half" if half else "fp32", tp=int(row["tp"]),
        pp=int(row["pp"]), dp=dp, micro_batch=micro, accumulate=int(row["gbs"]) // micro // dp, recompute="full",
        sharding="zero1", tp_overlap="none",
    )  # fmt: skip
    name = (
        f"h {width}, {row['layers']} layers, {row['heads'] or '?'} heads, dp {dp} tp {plan.tp} pp {plan.pp}, "
        f"micro-batch {micro}, batch {row['gbs']}"
    )
    return model, plan, name


def bloom() -> Iterator[Row]:
    """Seconds per iteration of the layouts tried for BLOOM, under Megatron-DeepSpeed; never fitted to.

    Its fork of Megatron dates from before the overlap of tensor parallel reductions, and its arguments leave Megatron's
    dropout of 0.1 in place. Runs of 320 devices and more hung unless each launch waited for its kernel, so all of these
    did. Of a node's four adapters each device's group of replicas goes through the nearest one.
    """
    nodes = 4 * _ADAPTER / DEFAULT.node_share
    machine = replace(load_machine("a100-80g"), node_bytes_per_second=nodes)
    for row in read("bloom"):
        if row["sec_per_it"] in ("", "x"):
            continue
        model, plan, name = _bloom(row)
        whole = plan.dtype == "bf16"
        software = BLOOM._replace(launch_blocking=plan.gpus >= 320, casts_gradients=whole, sums_whole=whole)
        yield Row(
            "bloom", name, f"{model.width}/{row['layers']}", float(row["sec_per_it"]),
            iteration_seconds(model, machine, plan, software, by_fp32_units),
            section=row["section"],
            samples=float(row["gbs"]),
        )  # fmt: skip


_CUDA_CONTEXT = 1573 * 2**20
"""What a process took on an A100 before any tensor, by the source of BLOOM's sweep."""
_SMI_UNIT = 1000 * 2**20
"""nvidia-smi prints MiB; the source notes thousands of them."""
_REDUCE_BUCKET = 5e8
"""Numbers in the buffer that DeepSpeed reduces gradients through (reduce_bucket_size, whose default was used)."""


def bloom_memory() -> Iterator[Row]:
    """What nvidia-smi showed of the same runs at their fullest."""
    for row in read("bloom"):
        if not row["mem_gb"].isdigit():
            continue
        model, plan, name = _bloom(row)
        work = describe(model, plan, software=BLOOM)

        def predict(constants: Constants, work: Workload = work, plan: Plan = plan) -> float:
            return deepspeed_bytes(work, plan, constants) / _SMI_UNIT

        yield Row("bloom_memory", name, f"{model.width}/{row['layers']}", float(row["mem_gb"]), predict)


def deepspeed_bytes(work: Workload, plan: Plan, constants: Constants) -> float:
    """Bytes that a process under Megatron-DeepSpeed of early 2022 holds of a device, by that software's code.

    In fp16, ZeRO-1 adds up half gradients, reduces them through a buffer, and then flattens its share of them and casts
    it to fp32. In bf16, its optimizer adds the half gradients of each micro-batch, which stay, to fp32 ones, tensor by
    tensor, each through a copy in fp32. A flat buffer does not fit into the pieces that activations leave behind, so
    torch's allocator keeps both. The gradient of the embedding, dense, is made beside the one that it is added to. A
    stage keeps its outputs until their gradients come. Groups are those of tensor parallel devices, of replicas, of a
    whole replica and of all devices.
    """
    share = device_share(work, plan)
    half = plan.dtype == "fp16"
    standing = share.parameters * (2.0 + (2.0 if half else 6.0)) + share.updated * 12.0
    activations = (1.0 + constants.fragmentation) * sum(worst_stage(work, plan).values())
    largest = max(op.weights for part in work.parts for op in part.forward)
    flat = 6.0 * share.updated + 2.0 * _REDUCE_BUCKET + 2.0 * largest if half else (4.0 + 2.0) * largest
    outputs = in_flight(plan) * work.blocks[0].entering if plan.pp > 1 else 0.0
    groups = ((plan.tp > 1) + 3) * group_bytes(constants)
    return standing + activations + flat + outputs + groups + _CUDA_CONTEXT


NEMO = Software(adds_in_products=True, adds_parts=True, even_stages=True, loss="torch")


def nemo() -> Iterator[Row]:
    """Tokens per second per GPU of NeMo in fp8 on H100, cuDNN's attention, collectives hidden; never fitted to.

    Gradients add up and are reduced in bf16, as its launcher's scripts for these runs say (`grad_sync_dtype=bf16` in
    NVIDIA/NeMo-Framework-Launcher, examples/training/*/h100).
    """
    presets = {"GPT3-175B": "gpt-175b"}
    machine = load_machine("h100")
    for row in read("nemo"):
        model = decoder(presets.get(row["model"], row["model"].lower()))
        tp, pp, cp, virtual = (int(row[name]) for name in ("tp", "pp", "cp", "virtual"))
        dp = int(row["gpus"]) // (tp * pp * cp)
        micro = int(row["micro_batch"])
        chunks = virtual if pp > 1 else 1
        plan = Plan(
            precision="O2", products="fp8_tensorwise", gradients="half", optimizer="fused", compile="blocks",
            attention="cudnn", tp=tp, sp=tp > 1, pp=pp, cp=cp, dp=dp, micro_batch=micro,
            accumulate=int(row["global_batch"]) // micro // dp, virtual=chunks,
            schedule="interleaved" if chunks > 1 else "1f1b", sharding="zero1", tp_overlap="all",
        )  # fmt: skip
        seconds = iteration_seconds(model, machine, plan, NEMO)
        tokens = plan.global_batch * model.sequence / plan.gpus

        def predict(constants: Constants, seconds=seconds, tokens: float = tokens) -> float:  # type: ignore[no-untyped-def]
            return float(tokens / seconds(constants))

        name = f"{row['model']}, {plan.gpus} GPUs, tp {tp} pp {pp} cp {cp}, batch {plan.global_batch}"
        yield Row("nemo", name, row["model"], float(row["tokens_per_second_per_gpu"]), predict)


def megatron() -> Iterator[Row]:
    """Milliseconds per iteration of Megatron-LM in 2020, before any overlap; never fitted to."""
    machine = load_machine("a100-80g")
    for row in read("megatron"):
        width = int(row["hidden"])
        model = replace(
            decoder("gpt-22b"), width=width, depth=int(row["layers"]), heads=int(row["heads"]),
            mlp_width=4 * width, sequence=int(row["seq_len"]),
        )  # fmt: skip
        tp, dp = int(row["tp"]), int(row["dp"])
        plan = replace(
            _MEGATRON,
            tp=tp,
            dp=dp,
            micro_batch=int(row["global_batch"]) // dp,
            recompute="full",
            tp_overlap="none",
        )
        seconds = iteration_seconds(model, machine, plan, MEGATRON)

        def predict(constants: Constants, seconds=seconds) -> float:  # type: ignore[no-untyped-def]
            return float(1e3 * seconds(constants))

        yield Row("megatron", f"{row['case']}, tp {tp}, dp {dp}", row["case"], float(row["iter_ms"]), predict)


def megatron_h100() -> Iterator[Row]:
    """TFLOP/s per GPU of Megatron-LM on H100, collectives hidden (its README's options); never fitted to.

    The numbers of parameters tell that embedding and output are not tied. The source names no micro-batch: that of all
    that a replica computes in a step is taken, which fits. Rows with a pipeline depend on it and on virtual stages.
    FLOPs are those of its `num_floating_point_operations`.
    """
    machine = load_machine("h100")
    for row in read("megatron_h100"):
        width, depth, tokens, batch = (
            int(row[name]) for name in ("hidden", "layers", "seq_len", "global_batch")
        )
        model = replace(
            decoder("gpt-22b"), width=width, depth=depth, heads=int(row["heads"]), mlp_width=4 * width,
            sequence=tokens, vocabulary=131072, tied=False,
        )  # fmt: skip
        tp, dp = int(row["tp"]), int(row["dp"])
        plan = Plan(
            precision="O2", optimizer="fused", compile="blocks", attention="cudnn", token_order="batch_second", tp=tp,
            sp=tp > 1, tp_overlap="all", dp=dp, sharding="zero1", micro_batch=batch // dp,
        )  # fmt: skip
        seconds = iteration_seconds(model, machine, plan, MEGATRON)
        numbers = depth * (12 * width**2 + 2 * width * tokens) + width * model.vocabulary
        useful = 6 * batch * tokens * numbers / plan.gpus

        def predict(constants: Constants, seconds=seconds, useful: float = useful) -> float:  # type: ignore[no-untyped-def]
            return float(useful / seconds(constants) / 1e12)

        name = f"{width} wide, {depth} layers, {plan.gpus} GPUs, tp {tp}, micro-batch {plan.micro_batch}"
        yield Row("megatron_h100", name, f"{width}/{depth}", float(row["tflops"]), predict)


def nccl() -> Iterator[Row]:
    """Bus bandwidth in GB/s of large collectives inside a node, rings."""
    moved = 16 * GIB
    for name, device, collective, measured in (
        ("all-reduce, 16 GiB, 8 A100", "a100-80g", "reduce", 234.89),
        ("all-reduce ring, 16 GiB, 8 H200", "h200", "reduce", 367.61),
        ("all-gather ring, 16 GiB, 8 H200", "h200", "gather", 361.4),
        ("reduce-scatter ring, 16 GiB, 8 H200", "h200", "gather", 362.9),
    ):
        machine = load_machine(device)

        def predict(constants: Constants, machine: Machine = machine, collective: str = collective) -> float:
            group = group_of(rates_of(machine, Plan(precision="O1"), constants), 8, 1)
            if collective == "reduce":
                return 2 * 7 / 8 * moved / reduce_seconds(group, moved) / 1e9
            return 7 / 8 * moved / gather_seconds(group, moved) / 1e9

        yield Row("nccl", name, device, measured, predict)


def matmul() -> Iterator[Row]:
    """TFLOP/s of the best matrix product that a sweep found; what long runs sustain is a share of it.

    A sweep's bursts are too short for a power limit to hold them back.
    """
    names = {
        "NVIDIA A100 SXM": "a100-80g", "NVIDIA H100 SXM": "h100", "NVIDIA B200 SXM": "b200", "AMD MI300X": "mi300x",
    }  # fmt: skip
    for row in read("matmul"):
        if row["accelerator"] not in names or row["dtype"] != "bf16":
            continue
        machine = load_machine(names[row["accelerator"]])
        m, n, k = (int(word) for word in row["shape"].split("x"))

        def predict(
            constants: Constants, machine: Machine = machine, m: int = m, n: int = n, k: int = k
        ) -> float:
            constants = replace(constants, gemm_share_hopper=constants.gemm_share)
            rates = rates_of(machine, Plan(precision="O1"), constants)
            op = Op("product", "gemm", m=m, n=n, k=k, read=2.0 * (m + n) * k, written=2.0 * m * n)
            return 2 * m * n * k / price(op, rates) / 1e12

        name = f"{row['accelerator']}, {row['shape']}"
        yield Row("matmul", name, machine.name, float(row["achieved_tflops"]), predict)


TABLES: dict[str, tuple[Callable[[], Iterator[Row]], bool, str]] = {
    "korthikanti_table4": (korthikanti_table4, True, "milliseconds of one layer"),
    "korthikanti_table5": (korthikanti_table5, True, "seconds per iteration"),
    "mosaicml_a100": (lambda: mosaicml("a100"), True, "seconds per iteration"),
    "torchtitan_memory": (torchtitan_memory, True, "GiB per GPU"),
    "nccl": (nccl, True, "GB/s of bus bandwidth"),
    "matmul": (matmul, True, "TFLOP/s in bf16"),
    "mosaicml_h100": (lambda: mosaicml("h100"), True, "seconds per iteration"),
    "torchtitan_speed": (torchtitan_speed, False, "tokens per second per GPU"),
    "bloom": (bloom, False, "seconds per iteration"),
    "bloom_memory": (bloom_memory, False, "thousand MiB per GPU"),
    "nemo": (nemo, False, "tokens per second per GPU"),
    "megatron": (megatron, False, "milliseconds per iteration"),
    "megatron_h100": (megatron_h100, False, "TFLOP/s per GPU"),
    "vit": (blind.vit, False, "images per second"),
    "flash_training": (blind.flash_training, False, "TFLOP/s per GPU"),
    "attention": (blind.attention, False, "TFLOP/s"),
    "moe_layer": (experts.layers, False, "milliseconds of one mixture"),
    "moe_training": (experts.training, False, "TFLOP/s per GPU"),
    "moe_bridge": (experts.bridge, False, "seconds per iteration"),
    "moe_deepseek": (experts.deepseek, False, "tokens per second per GPU"),
    "moe_exchange": (experts.exchanges, False, "GB/s through the bottleneck"),
    "moe_serving": (experts.serving, False, "tokens per second of one stream"),
}
"""Each table: its rows, whether constants are fitted on it, and the unit."""


@cache
def rows(table: str) -> tuple[Row, ...]:
    """The rows of a table of `TABLES`."""
    return tuple(TABLES[table][0]())
