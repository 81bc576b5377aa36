"""Published rows of mixtures of experts. None of the planner's constants is fitted to them.

As in `rows`, how a row becomes a Plan is said once per table, from what its source says of the software.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from calibration.table import Row, Software, decoder, iteration_seconds, read
from penstock.config.formats import Products
from penstock.config.machine import Machine, load_machine
from penstock.config.model import DecoderConfig
from penstock.config.plan import Plan, Recompute
from penstock.planner.constants import Constants
from penstock.planner.describe import describe
from penstock.planner.operators import Op, Part, Workload
from penstock.planner.price import distinct_places, exchange_seconds, group_of
from penstock.planner.rates import Rates, rates_of
from penstock.planner.serve import Serving, predict_inference
from penstock.planner.step import layout_of, part_time

MEGATRON_CORE = Software(
    host_waits=True,
    even_stages=True,
    adds_in_products=True,
    adds_parts=True,
    shards_in_place=True,
    experts_apart=True,
)
"""Its timers wait for the device. Gradients are added in products, embedding and output count as a block each where
stages are cut, and the loss is fused (ModelZoo's configurations of these models)."""
HOST_SECONDS = 8.4e-3
"""The host's time for one block of a mixture besides its launches, where no part of it is a CUDA graph: Python's, most
of it. Fitted between the two rows of Qwen3-235B-A22B whose devices wait for it: 1,024 tokens on each device, and
exchanges that are hidden. That the host holds these back is what the source says: with routers captured in CUDA graphs
the second ran at 320 TFLOP/s in place of 276."""
SMALL_KERNELS = 56
"""Kernels of a block, both passes, that move next to nothing, and that the planner does not list: casts of routes, sums
of loads, and what sets up exchanges. The profile of the rows with HybridEP has 463,348 kernels in 64 × 48 passes of a
block, 151 each, of which the planner lists 95."""
_MIXTURE = ("router", "experts", "perceptron")


def _burst(constants: Constants) -> Constants:
    """What an H100 does in milliseconds after a pause: no power limit holds it back, so that it runs at its highest
    clock, 1,980 MHz, where its datasheet's rate is that of 1,830."""
    return replace(constants, gemm_share_hopper=1980 / 1830)


def layers() -> Iterator[Row]:
    """Forward and backward milliseconds of a mixture without attention, of Megatron-Core on eight H100.

    Each pass comes after a pause and a long product behind which it is launched. The source's cases name a shared
    expert and the script that runs them builds none; of its eight groups of experts, one on each device, a token visits
    four. Products in fp8 want rows in multiples for each expert: HybridEP brings them so, and behind the other
    dispatchers `TEGroupedMLP` copies tokens to where they are padded, and results back.
    """
    machine = load_machine("h100")
    for row in read("moe_megatron_moe_layer"):
        groups = (8, 4) if row["proxy"] == "deepseek" else (1, 1)
        model = replace(
            decoder("mixtral-tiny"), width=int(row["hidden"]), depth=1, heads=32, kv_heads=32,
            sequence=int(row["seq_len_tokens"]), experts=int(row["experts"]), router_groups=groups[0],
            groups_per_token=groups[1], experts_per_token=int(row["experts_per_token"]),
            expert_width=int(row["expert_hidden"]),
        )  # fmt: skip
        products: Products = "fp8" if row["precision"] == "FP8" else "plain"
        ep = int(row["ep"])
        plan = Plan(
            precision="O2", optimizer="fused", compile="blocks", attention="cudnn", token_order="batch_second",
            products=products, ep=ep, dp=ep, micro_batch=int(row["micro_batch_sequences"]),
        )  # fmt: skip
        software = MEGATRON_CORE._replace(sends_once=row["dispatcher"] != "a2a", scaling="blockwise")
        (block,) = describe(model, plan, software=software).blocks
        pads = products == "fp8" and row["dispatcher"] != "hybridep"
        part = replace(
            block,
            forward=tuple(_of_mixture(block.forward, pads=pads)),
            backward=tuple(_of_mixture(block.backward, pads=pads)),
        )
        for name in ("forward", "backward"):

            def predict(constants: Constants, part=part, plan=plan, name=name) -> float:  # type: ignore[no-untyped-def]
                time = part_time(part, rates_of(machine, plan, _burst(constants)), layout_of(plan))
                return float(1e3 * getattr(time, name).total)

            words = f"{row['proxy']}, {row['dispatcher']}, {row['precision']}, {name}"
            yield Row("moe_layer", words, row["proxy"], float(row[f"{name}_ms"]), predict)


def _of_mixture(ops: Iterable[Op], *, pads: bool) -> Iterator[Op]:
    """The operators of a mixture; with those that pad its tokens and take padding off its results, if it does."""
    for op in ops:
        if _is_of_mixture(op):
            yield op
        if pads and op.name in ("experts.regroup", "experts.ungroup"):
            moved = 2.0 * op.elements
            yield Op("pad", "copy", op.forward, read=moved, written=moved)


def _is_of_mixture(op: Op) -> bool:
    return op.module in _MIXTURE or op.axis == "expert"


def training() -> Iterator[Row]:
    """TFLOP/s per GPU of Qwen3-235B-A22B under Megatron-Core on H100, 8 × 50 GB/s of InfiniBand a node.

    In which type Megatron's FSDP reduces gradients is not said. It must be bf16: in fp32 what each adapter has to send
    would take longer than the whole step did.
    Only rows whose balance was forced: what real routing adds depends on the loads, which the source does not state.
    FLOPs are Megatron's: without embeddings, and half of causal attention.
    """
    machine = load_machine("h100")
    for row in read("moe_modelzoo_qwen3"):
        if row["gpu"] != "H100" or row["balance"] != "forced" or "Next" in row["model"]:
            continue
        model = replace(decoder("qwen3-235b-a22b"), sequence=int(row["seq_len_tokens"]))
        sharded, virtual, pp, tp = row["fsdp"] == "1", int(row["virtual"]), int(row["pp"]), int(row["tp"])
        again: Recompute = "full" if row["recomputed"] == "full" else "none"
        plan = Plan(
            precision="O2", gradients="half" if sharded else "weights", optimizer="fused", compile="blocks",
            attention="cudnn", token_order="batch_second", tp=tp, sp=tp > 1, pp=pp, cp=int(row["cp"]),
            dp=int(row["dp"]), ep=int(row["ep"]), virtual=virtual,
            schedule="interleaved" if virtual > 1 else "1f1b", sharding="fsdp" if sharded else "zero1",
            micro_batch=int(row["micro_batch_sequences"]), accumulate=int(row["accumulation"]), recompute=again,
        )  # fmt: skip
        hidden = row["overlaps_exchange_1f1b"] == "1"
        software = MEGATRON_CORE._replace(
            sends_once=row["dispatcher"] != "A2A", hides_exchange=hidden, block_host_seconds=HOST_SECONDS
        )
        kinds = row["recomputed"].split("+")
        seconds = iteration_seconds(model, machine, plan, software, partial(_as_megatron_does, kinds=kinds))
        useful = plan.global_batch * _flops(model) / plan.gpus

        def predict(constants: Constants, seconds=seconds, useful: float = useful) -> float:  # type: ignore[no-untyped-def]
            return float(useful / seconds(constants) / 1e12)

        name = (
            f"{model.sequence} tokens, {row['dispatcher']}{', overlap' if hidden else ''}, tp {tp} cp {plan.cp} pp {pp}"
            f" ep {plan.ep} dp {plan.dp}, recomputed {row['recomputed']}"
        )
        yield Row("moe_training", name, row["model"], float(row["tflops_per_gpu"]), predict)


def bridge() -> Iterator[Row]:
    """Seconds of a step of Qwen3-30B-A3B under Megatron-Bridge on two nodes of H100.

    The host's time for a block is that of the other model's rows, and none where routers are CUDA graphs: what is left
    of it then is not published.
    """
    machine, model = load_machine("h100"), replace(decoder("qwen3-30b-a3b"), sequence=4096)
    for row in read("moe_bridge_qwen3"):
        gpus, hidden = int(row["gpus"]), row["overlaps_exchange"] == "1"
        plan = Plan(
            precision="O2", gradients="half", optimizer="fused", compile="blocks", attention="cudnn",
            token_order="batch_second", dp=gpus, ep=int(row["ep"]), sharding="zero1",
            micro_batch=int(row["micro_batch_sequences"]), accumulate=int(row["global_batch_sequences"]) // gpus,
        )  # fmt: skip
        software = MEGATRON_CORE._replace(
            sends_once=row["dispatcher"] != "A2A", hides_exchange=hidden,
            block_host_seconds=0.0 if row["graphed_routers"] == "1" else HOST_SECONDS,
        )  # fmt: skip
        # Its configuration names no fused permutations beside plain exchanges.
        rewrite = partial(_as_megatron_does, adds_rows=row["dispatcher"] == "A2A")
        seconds = iteration_seconds(model, machine, plan, software, rewrite)
        words = f"{row['dispatcher']}{', overlap' if hidden else ''}"
        words += ", delayed gradients" * int(row["delays_gradients"])
        yield Row("moe_bridge", words, "qwen3-30b-a3b", float(row["step_seconds"]), seconds)


def deepseek() -> Iterator[Row]:
    """Tokens per second of one H800 that trained DeepSeek-V3, by the hours that its report states.

    What a Plan and `Software` say: its stages, experts and replicas; fp8 with a scale for each 128 numbers; tokens that
    are sent once to each node and device; norms, activations and projections out of latents that run again. What they
    do not say: DualPipe, whose bubble is taken to be that of deferred gradients of weights, and behind whose other
    micro-batch all exchanges are taken to hide, as the report states; tokens in fp8 on the way to experts, which halves
    what they move; the further block of its multi-token prediction, which is counted, and that one's output, which is
    not. Its micro-batch is not stated: one sequence is taken. The host's time is unknown and left out.
    """
    for row in read("moe_deepseek_v3"):
        model, dp, micro = decoder("deepseek-v3"), int(row["dp"]), int(row["micro_batch_sequences"])
        model = replace(model, sequence=int(row["seq_len_tokens"]), depth=model.depth + 1)
        plan = Plan(
            precision="O2", optimizer="fused", compile="blocks", attention="cudnn", token_order="batch_second",
            products="fp8", pp=int(row["pp"]), dp=dp, ep=int(row["ep"]), schedule="zero_bubble", sharding="zero1",
            micro_batch=micro, accumulate=int(row["global_batch_sequences"]) // dp // micro,
        )  # fmt: skip
        software = Software(sends_once=True, hides_exchange=True, scaling="blockwise")
        seconds = iteration_seconds(model, _h800(), plan, software, _as_deepseek_does)
        tokens = plan.global_batch * model.sequence / plan.gpus

        def predict(constants: Constants, seconds=seconds, tokens: float = tokens) -> float:  # type: ignore[no-untyped-def]
            return float(tokens / seconds(replace(constants, exchange_hidden_share=1.0)))

        measured = 1e12 / float(row["hours_per_trillion_tokens"]) / 3600
        yield Row("moe_deepseek", f"{plan.gpus:,} {row['gpu']}", "deepseek-v3", measured, predict)


def _as_deepseek_does(work: Workload, plan: Plan, machine: Machine) -> Workload:
    """Dispatched tokens, and gradients of combined ones, in fp8; and what runs again (section 3.2.3)."""
    latents = ("attention.q_up", "attention.kv_up")

    def block(part: Part) -> Part:
        again = [op for op in part.forward if op.kind in ("norm", "activation") or op.name in latents]
        forward, backward = ([*passed] for passed in (part.forward, (*again, *part.backward)))
        for ops in (forward, backward):
            first = next((i for i, op in enumerate(ops) if op.kind == "exchange"), None)
            if first is not None:
                ops[first] = ops[first]._replace(read=ops[first].read / 2)
        return replace(part, forward=tuple(forward), backward=tuple(backward))

    return replace(work, parts=tuple(part if part.block is None else block(part) for part in work.parts))


def _flops(model: DecoderConfig) -> float:
    """FLOPs of a sample as Megatron counts them."""
    width, layer = model.width, model.layers[0]
    heads = layer.heads * layer.head_width
    attention = width * 2 * (heads + layer.kv_heads * layer.head_width) + model.sequence * heads
    mixture = 3 * width * layer.perceptron.width * model.experts_per_token + width * model.experts
    return 6.0 * model.sequence * (model.depth * (attention + mixture) + width * model.vocabulary)


def _as_megatron_does(
    work: Workload, plan: Plan, machine: Machine, *, kinds: Sequence[str] = (), adds_rows: bool = False
) -> Workload:
    """Blocks with their small kernels, and with operators that run a second time in the backward pass where Megatron
    recomputes parts of a block: norms, the activations of experts, or the whole mixture.

    With `adds_rows` its permutations are torch's own operators: the results of a token's experts, and in the backward
    pass the gradients of its copies, are read and added to rows in memory one by one (`unpermute` of its
    `moe_utils.py`), and not summed by one kernel.
    """

    def runs_again(op: Op) -> bool:
        norm = "norm" in kinds and op.kind == "norm"
        activation = "act" in kinds and op.kind == "activation"
        return norm or activation or ("moe" in kinds and _is_of_mixture(op))

    def block(part: Part) -> Part:
        more = {
            forward: [Op("small", "copy", forward, launches=SMALL_KERNELS // 2)] for forward in (True, False)
        }
        for op in part.forward if adds_rows else ():
            if op.name == "experts.sort":
                added = Op("experts.add", "copy", read=op.read, written=op.written)
                more[True].append(added)
                more[False].append(added._replace(forward=False))
        again = filter(runs_again, part.forward)
        return replace(
            part, forward=(*part.forward, *more[True]), backward=(*again, *part.backward, *more[False])
        )

    return replace(work, parts=tuple(part if part.block is None else block(part) for part in work.parts))


def _h800() -> Machine:
    """An H100 whose links are cut to 200 GB/s in one direction."""
    return replace(load_machine("h100"), name="h800", link_bytes_per_second=200e9)


def exchanges() -> Iterator[Row]:
    """GB/s of DeepEP's kernels for training, dispatch in fp8 and combine in bf16, by its count: what goes through the
    bottleneck that it names, with what a device or node sends to itself. Kernels of low latency are left out."""
    for row in read("moe_deepep"):
        if row["kernel"] == "low latency" or row["gpu"] == "SM100":
            continue
        machine = _h800() if row["gpu"] == "H800" else load_machine("h100")
        size, k = int(row["ep"]), int(row["experts_per_token"])
        nodes = size // machine.devices_per_node
        # Each node is a group of experts, of which a token visits four at most.
        reach = min(1.0, int(row["groups_per_token"] or nodes) / nodes)
        for name, element in (("dispatch", 1.0), ("combine", 2.0)):
            token = int(row["tokens_per_gpu"]) * int(row["hidden"]) * element

            def predict(
                constants: Constants, machine=machine, size=size, k=k, nodes=nodes, reach=reach, token=token,
            ) -> float:  # type: ignore[no-untyped-def]  # fmt: skip
                rates: Rates = rates_of(machine, Plan(precision="O2"), constants)
                group = group_of(rates, size, 1)
                through = distinct_places((nodes if nodes > 1 else size) * reach, k)
                return float(token * through / exchange_seconds(group, token * k, k, reach) / 1e9)

            words = f"{row['version']}, {row['gpu']}, {size} devices, {name}"
            yield Row("moe_exchange", words, row["gpu"], float(row[f"{name}_gb_per_s"]), predict)


def serving() -> Iterator[Row]:
    """Tokens per second of one stream of Qwen3-235B-A22B on eight devices, weights in four bits (Tutel)."""
    machines = {"A100": "a100-80g", "MI300": "mi300x"}
    for row in read("moe_serving"):
        if row["model"] != "Qwen3-235B-A22B":
            continue
        tp = int(row["gpus"])
        serving = Serving(batch=1, prompt=512, generated=128, tp=tp, weight_bytes=0.5625)
        machine = load_machine(machines[row["gpu"]])

        def predict(constants: Constants, machine=machine, serving=serving) -> float:  # type: ignore[no-untyped-def]
            decoded = predict_inference(decoder("qwen3-235b-a22b"), machine, serving)
            return 1.0 / decoded.decode_seconds_per_token

        yield Row("moe_serving", f"{row['gpu']} × {tp}", row["gpu"], float(row["tokens_per_second"]), predict)
