"""Published rows of vision models and of attention kernels, which no constant is fitted to.

As in `rows`, how a row becomes a Plan is said once per table, from what its source says of the software.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import get_args

from calibration.table import TORCH, Row, Software, as_xla_does, decoder, iteration_seconds, read
from penstock.config.machine import Machine, load_machine
from penstock.config.model import DecoderConfig, EncoderConfig, ModelConfig, ViTConfig, preset
from penstock.config.plan import AttentionBackend, Plan
from penstock.planner.constants import Constants
from penstock.planner.describe import describe, totals
from penstock.planner.memory import memory
from penstock.planner.prediction import room
from penstock.planner.price import seconds as price
from penstock.planner.rates import rates_of

_VITS = {
    "b16": preset("vit-b16"),
    "g14": preset("vit-g14"),
    "G14": ViTConfig(width=1664, depth=48, heads=16, mlp_width=8192, patch_size=14),
}
"""G/14: Zhai et al., CVPR 2022, Table 2."""
TOKENS, WIDTH = 16384, 2048
"""Of all samples together, and of all heads together, in the figures of attention kernels (Dao 2023, section 4.1)."""


def vit() -> Iterator[Row]:
    """Images per second of ViTs in bf16, all devices together.

    NeMo runs Megatron's modules: fp32 master weights, fused pointwise kernels, gradients added up in products, and
    plain attention. Megatron's kernel of scale, mask and softmax takes rows of a multiple of four numbers (its
    `fused_softmax.py`); 257 tokens are none, so single operators compute them in fp32. JAX compiles the whole step, and
    its attention is plain too; XLA's scheduler that hides collectives is off unless asked for. Neither source speaks of
    recomputation, and none is needed to fit.
    """
    for row in read("vit"):
        model, machine = _VITS[row["model"]], load_machine(row["machine"])
        tp = int(row["tp"])
        dp = int(row["gpus"]) // tp
        jax = row["framework"] == "jax"
        plan = Plan(
            precision="O2", gradients="half" if jax else "weights", optimizer="fused",
            compile="whole" if jax else "blocks",
            attention="plain", tp=tp, dp=dp, micro_batch=int(row["micro_batch"]), accumulate=int(row["accumulate"]),
            overlap=not jax, tp_overlap="none" if jax else "weights",
        )  # fmt: skip
        model = replace(model, dropout=0.1) if jax else model
        software = Software(softmax_apart=not jax, adds_in_products=not jax, loss="torch")
        seconds = iteration_seconds(model, machine, plan, software, as_xla_does if jax else None)

        def predict(constants: Constants, seconds=seconds, plan: Plan = plan) -> float:  # type: ignore[no-untyped-def]
            return float(plan.global_batch / seconds(constants))

        name = (
            f"{row['framework']}, {row['model']}, {plan.gpus} {machine.name}, tp {tp}, "
            f"micro-batch {plan.micro_batch} × {plan.accumulate}"
        )
        yield Row("vit", name, row["model"], float(row["samples_per_second"]), predict)


def attention() -> Iterator[Row]:
    """TFLOP/s of attention kernels in fp16, counted without what a causal mask leaves out."""
    for row in read("attention"):
        machine = load_machine(row["machine"])
        features, tokens = int(row["features"]), int(row["tokens"])
        causal, both = row["causal"] == "yes", row["pass"] == "both"
        heads, batch = WIDTH // features, TOKENS // tokens
        family = DecoderConfig if causal else EncoderConfig
        model = family(width=WIDTH, depth=1, heads=heads, mlp_width=WIDTH, sequence=tokens)
        plan = Plan(precision="O3", dtype="fp16", attention=_backend(row["backend"]), micro_batch=batch)
        flops = 4.0 * TOKENS * tokens * WIDTH * (3.5 if both else 1.0) * (0.5 if causal else 1.0)

        name = (
            f"{row['kernel']}, {machine.name}, {row['pass']}, {'causal, ' if causal else ''}{features} features, "
            f"{tokens} tokens"
        )
        predict = _rate(model, machine, plan, flops, both=both)
        yield Row("attention", name, row["kernel"], float(row["tflops"]), predict)


def _rate(
    model: ModelConfig, machine: Machine, plan: Plan, flops: float, *, both: bool
) -> Callable[[Constants], float]:
    (block,) = describe(model, plan).blocks
    # The plain form takes copies of queries, keys and values from one tensor, and gives their gradients back so.
    copies = ("split", "merge", "stack") if plan.attention == "plain" else ()
    kinds = ("", "scores", "softmax", "mask", "values", *copies)
    passes = (*block.forward, *block.backward) if both else block.forward
    core = [
        op
        for op in passes
        if op.name.startswith("attention") and op.name.partition(".")[2].split(".")[0] in kinds
    ]

    def predict(constants: Constants) -> float:
        rates = rates_of(machine, plan, constants)
        return flops / sum(price(op, rates) for op in core) / 1e12

    return predict


def _backend(word: str) -> AttentionBackend:
    return next(one for one in get_args(AttentionBackend) if one == word)


def flash_training() -> Iterator[Row]:
    """TFLOP/s of training decoders with each generation of attention, each with the largest micro-batch that fits.

    The source names neither micro-batch nor layout: replicas that share out optimizer states are assumed, and fused
    kernels around attention, as in its code. Nothing says that norms write half numbers. What does not fit cannot have
    run so: then scores are computed again, the remedy of Megatron-LM, which is its example of plain attention.
    """
    sizes = {"GPT3-1.3B": (2048, 24, 16), "GPT3-2.7B": (2560, 32, 32)}
    machine = load_machine("a100-80g")
    for row in read("flash_training"):
        width, depth, heads = sizes[row["model"]]
        tokens = int(row["tokens"])
        model = replace(
            decoder("gpt-22b"),
            width=width,
            depth=depth,
            heads=heads,
            mlp_width=4 * width,
            sequence=tokens,
        )
        plan = Plan(
            precision="O1", optimizer="fused", compile="blocks", attention=_backend(row["backend"]), dp=8,
            sharding="zero1", micro_batch=1,
        )  # fmt: skip

        def fits(plan: Plan, model: ModelConfig = model) -> bool:
            return sum(memory(describe(model, plan, software=TORCH), plan).values()) <= room(machine)

        if not fits(plan):
            plan = replace(plan, recompute="selective")
        for micro in (2, 4, 8, 16, 32, 64):
            larger = replace(plan, micro_batch=micro)
            if fits(larger):
                plan = larger
        seconds = iteration_seconds(model, machine, plan, TORCH._replace(casts_norms=True))
        flops = plan.micro_batch * tokens * (6 * totals(model).parameters + 12 * depth * width * tokens)

        def predict(constants: Constants, seconds=seconds, flops=flops) -> float:  # type: ignore[no-untyped-def]
            return float(flops / seconds(constants) / 1e12)

        name = f"{row['model']}, {tokens} tokens, {row['backend']} attention, micro-batch {plan.micro_batch}"
        yield Row("flash_training", name, row["model"], float(row["tflops"]), predict)
