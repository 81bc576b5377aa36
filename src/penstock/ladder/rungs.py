"""Penstock's own rungs, in the order in which they are climbed. `ladder/rung.py` defines a rung."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

from penstock.boundary.files import quoted
from penstock.config.convert import nearest
from penstock.config.formats import HalfDtype
from penstock.config.fused import FUSED, FusedName
from penstock.config.model import stacks, with_stacks
from penstock.config.numerics import numerics_of
from penstock.config.plan import AttentionBackend, Recompute
from penstock.config.stack import Stack
from penstock.errors import ConfigError
from penstock.kernels.choices import attention_kernel
from penstock.ladder.rung import REGISTERED, Rung, Setting, Situation, plan, register, vision_only
from penstock.planner.libraries import library_obstacle
from penstock.process import unavailable


def _needless_fp16(_: Setting, situation: Situation) -> str | None:
    both = {"bf16", "fp16"} <= situation.machine.peak_flops.keys()
    return "bf16 runs here too, has the same size, and needs no loss scale" if both else None


def _autocast(dtype: HalfDtype, place: int, **more: Any) -> Rung:
    return Rung(
        f"half-{dtype}", place, f"autocast {dtype}",
        f"Matrix products run in {dtype}, half the size of fp32; weights, norms and sums stay in fp32.",
        plan(precision="O1", dtype=dtype), choice="precision", **more,
    )  # fmt: skip


def _pooled(setting: Setting, situation: Situation) -> Setting:
    vit: Any = setting.model  # `_has_class_token` ensures this
    return replace(setting, model=replace(vit, classifier="pooled"))


def _has_class_token(setting: Setting, situation: Situation) -> str | None:
    obstacle = vision_only(setting)
    if obstacle or getattr(setting.model, "classifier", "") == "pooled":
        return obstacle or "the model has a pooled classifier already"
    return "distillation needs a class token" if getattr(setting.model, "distilled", False) else None


def _attention(backend: AttentionBackend, place: int, why: str) -> Rung:
    def obstacle(setting: Setting, situation: Situation) -> str | None:
        from penstock.cpu import this_cpu  # late: it imports torch

        machine, now, dtype = situation.machine, setting.plan.attention, numerics_of(setting.plan).compute
        if backend == "native" and machine.device == "cpu" and not this_cpu().bf16_pairs:
            return "this CPU does not multiply bf16 in AVX-512"
        lengths = (1 << 30,) if setting.model is None else setting.model.graph.lengths
        new, old = (
            [attention_kernel(one, machine.device, dtype, n, avx512=this_cpu().avx512) for n in lengths]
            for one in (backend, now)
        )
        return f"attention={now} uses that kernel here already" if new == old and backend != now else None

    title, change = f"{backend} attention", plan(attention=backend)
    return Rung(f"attention-{backend}", place, title, why, change, obstacle=obstacle)


def _fused(names: tuple[FusedName, ...], place: int) -> Rung:
    """A rung of one fused operator, or of all."""

    def obstacle(setting: Setting, situation: Situation) -> str | None:
        if situation.machine.device not in set.intersection(*(set(FUSED[name].devices) for name in names)):
            return f"there is no kernel for a {situation.machine.device}"
        return None

    alone = names[0] if len(names) == 1 else None
    name, title = f"fuse-{alone or 'all'}", f"fused {FUSED[alone].title if alone else 'operators'}"
    return Rung(
        name, place, title, " ".join(FUSED[n].why for n in names), plan(fuse=names), obstacle=obstacle
    )


_procs = attrgetter("procs")
_ONE_BATCH = "its factory returns a single batch, from which no other batches can be made"


def _not_packed(setting: Setting, situation: Situation) -> str | None:
    if situation.packable:
        return None
    if (share := situation.unpacked_padding) is not None:
        return (
            f"its documents are packed already; with one document per sample {share:.0%} would be padding "
            "(--data.packed false measures that)"
        )
    return _ONE_BATCH if setting.model is None else "its samples are not continuous text"


def _not_by_length(setting: Setting, situation: Situation) -> str | None:
    if setting.model is None:
        return _ONE_BATCH
    able = situation.groupable and not setting.packed
    return None if able else "its samples are equally long, or are grouped by length already"


def _batch(factor: int, place: int, recompute: Recompute = "none") -> Rung:
    change = plan(micro_batch=lambda situation: situation.micro_batch * factor, recompute=recompute)

    def obstacle(setting: Setting, situation: Situation) -> str | None:
        if not situation.splittable:
            return "your batch could not be split into samples, so it cannot be made larger"
        kept = plan(**change.fields | {"recompute": "none"})(setting, situation)
        needless = recompute != "none" and situation.holds(kept)
        return f"a batch × {factor} fits into memory without recomputation" if needless else None

    again = recompute != "none"
    name, title = f"batch-x{factor}{'-recomputed' * again}", f"batch × {factor}{', recomputed' * again}"
    why = " To fit into memory, norms and activations are recomputed in the backward pass." * again
    return Rung(
        name, place, title, "More samples per step: matrix products are larger, and each launch and each update serve "
        f"more samples. The global batch grows by this factor, which the recipe must allow.{why}", change,
        obstacle=obstacle,
    )  # fmt: skip


def group_size(procs: int) -> int:
    """Ranks of a group with sharding=hsdp: the largest that leaves two groups or more; 1 where none does."""
    return max((size for size in range(1, procs // 2 + 1) if procs % size == 0), default=1)


def _several(kind: str, place: int, title: str, why: str, **fields: Any) -> Rung:
    """A rung for several processes: one replica each with the baseline's micro-batch, sharded or not, or one replica
    split over all."""

    def obstacle(setting: Setting, situation: Situation) -> str | None:
        if situation.procs == 1:
            return "it needs several processes; set their number, such as --procs 2"
        if kind == "hsdp" and group_size(situation.procs) == 1:
            return f"{situation.procs} processes cannot form two groups of two or more; set --procs 4, for instance"
        if "sharding" not in fields and setting.model is None:
            return "your model is not one of Penstock's own"
        if "pp" in fields and situation.micro_batch % situation.procs:
            return (
                f"a micro-batch of {situation.micro_batch} samples cannot be split into one for each of "
                f"{situation.procs} stages; use --batch {situation.micro_batch * situation.procs}"
            )
        return None

    alone: dict[str, Any] = {"dp": 1, "sharding": "ddp", "shard": 1, "cp": 1, "pp": 1, "tp": 1}
    return Rung(f"parallel-{kind}", place, title, why, plan(**alone | fields), obstacle=obstacle, twin=True)


def _larger_image(setting: Setting, situation: Situation) -> Setting:
    """256 pixels for the usual 224; for other sizes, a seventh more, as whole patches."""
    vit: Any = setting.model  # `vision_only` ensures this
    patches = vit.image_size // vit.patch_size
    size = vit.patch_size * (patches + max(1, round(patches / 7)))
    size = 256 if vit.image_size == 224 and 256 % vit.patch_size == 0 else size
    return replace(setting, model=replace(vit, image_size=size))


def _half_depth(stack: Stack) -> Any:
    return replace(stack, depth=(stack.depth + 1) // 2, unequal=stack.unequal[::2])


def _half_width(stack: Stack) -> Any:
    experts = None if stack.expert_width is None else stack.expert_width // 2
    return replace(stack, mlp_width=stack.mlp_width // 2, expert_width=experts)


def _compressed(part: str, place: int, title: str, why: str, change: Callable[[Stack], Any]) -> Rung:
    """A rung with a smaller model, as pruning makes it. It is always faster, so it is not carried over."""

    def smaller(setting: Setting, situation: Situation) -> Setting:
        assert setting.model is not None  # `obstacle` ensures this
        return replace(setting, model=with_stacks(setting.model, change))

    def obstacle(setting: Setting, situation: Situation) -> str | None:
        if setting.model is None:
            return "it changes Penstock's own models, and this model is your own"
        every = stacks(setting.model)
        if part == "depth" and all(stack.depth < 2 for stack in every):
            return "its stacks have one layer each"
        if part == "width" and any(stack.unequal for stack in every):
            return "its layers have been pruned already"
        return None

    why = (
        f"{why} It starts untrained like the baseline, so its loss shows the most that this can cost: `penstock "
        "compress` starts from a trained model, and a teacher helps. It is reported, and not carried over."
    )
    return Rung(f"compress-{part}", place, title, why, smaller, obstacle=obstacle, carried=False)


for _each in (
    Rung(
        "matmul", 100, "fast fp32 matmul",
        "Matrix products of fp32 are faster with fewer bits of the fraction: 10 in TF32 on a GPU, 7 on a CPU with AMX. "
        "Other CPUs with bf16 units use oneDNN's fp32, up to twice as fast as MKL's; the rest gain nothing.",
        plan(matmul=lambda situation: "high" if situation.machine.device == "cuda" else "medium"),
    ),
    Rung(
        "matmul-probed", 110, "faster fp32 library",
        "Each fp32 product of a linear layer uses the library, MKL or oneDNN, that was measured to be faster here.",
        plan(matmul="probed"), obstacle=lambda now, there: library_obstacle(there.machine, now.model, now.plan),
    ),
    Rung(
        "memory", 150, "keep freed memory",
        "The allocator keeps memory that a step frees, so that Linux need not clear and map the same pages again.",
        plan(host_memory="keep"),
        obstacle=lambda setting, situation: unavailable() if situation.machine.device == "cpu" else None,
    ),
    _autocast("bf16", 200),
    Rung(
        "optimizer-foreach", 300, "foreach optimizer",
        "Each operator of the update covers many tensors in one launch. On a CPU torch has no such kernels.",
        plan(optimizer="foreach"),
    ),
    Rung(
        "optimizer-fused", 310, "fused optimizer",
        "The whole update is one kernel per group of tensors: weights, gradients and moments are read once.",
        plan(optimizer="fused"),
    ),
    Rung(
        "optimizer-contiguous", 320, "contiguous optimizer",
        "Weights and gradients are in one flat buffer per group; update, clipping and clearing pass over it once each.",
        plan(optimizer="contiguous"),
    ),
    # After the optimizers: an overflowed step can be skipped on the device by the fused ones only.
    _autocast("fp16", 340, obstacle=_needless_fp16),
    Rung(
        "masters", 350, "fp32 master weights",
        "Weights, activations and gradients have half the size, without casts; the optimizer updates fp32 weights.",
        plan(precision="O2", dtype=lambda situation: situation.half), choice="precision",
    ),
    Rung(
        "classifier", 400, "pooled classifier",
        "The mean over patches is classified instead of a class token: one token fewer, a number that suits kernels.",
        _pooled, obstacle=_has_class_token,
    ),
    Rung(
        "token-order", 500, "batch second",
        "Tokens are stored as (sequence, batch, width), so that attention reads heads in place, without transposes.",
        plan(token_order="batch_second"),
    ),
    _attention(
        "plain", 600, "Two batched matrix products with all scores in memory, fast for short sequences."
    ),
    _attention("flash", 610, "Pins the FlashAttention kernel of torch, which keeps no scores in memory."),
    _attention("efficient", 620, "Pins torch's memory-efficient kernel, which keeps no scores in memory."),
    _attention(
        "native", 605,
        "Penstock's own C++ kernel, which stores no scores, reads heads in place and applies dropout as it goes.",
    ),
    _attention("cudnn", 630, "Pins cuDNN's fused kernel, often the fastest on Hopper and later."),
    Rung(
        "loss-chunked", 650, "loss in chunks",
        "Logits over a vocabulary, and their gradients, are computed for some tokens at a time and never all stored.",
        plan(loss="chunked"),
    ),
    Rung(
        "padding", 660, "padding left out",
        "An encoder skips padding. On a GPU attention still computes it, unless it is flash.", plan(padding="remove"),
        obstacle=lambda _, situation: None if situation.padding_share else "no token of its batches is padding",
    ),
    Rung(
        "packed", 665, "packed sequences",
        "Documents fill samples one after the other, so that there is no padding. Speeds are compared per token, "
        "because a packed sample holds several of the baseline's.",
        lambda setting, situation: replace(setting, packed=True), obstacle=_not_packed,
    ),
    Rung(
        "length-groups", 670, "similar lengths",
        "Each batch holds samples of similar length: less padding, but batches are no longer fully random.",
        lambda setting, situation: replace(setting, by_length=True), obstacle=_not_by_length,
    ),
    Rung(
        "experts-loop", 680, "experts one by one",
        "Each expert has its own matrix product: faster on some machines for few experts with many tokens each.",
        plan(experts="loop"),
    ),
    Rung(
        "compile-blocks", 700, "compile blocks",
        "Fuses a block's pointwise work into few kernels; one compilation serves all blocks.", plan(compile="blocks"),
    ),
    Rung(
        "compile-whole", 710, "compile whole",
        "Compiles the whole model at once: more to fuse, and longer to compile.", plan(compile="whole"),
    ),
    *(_fused(names, place) for place, names in enumerate((*((name,) for name in FUSED), tuple(FUSED)), 720)),
    # After compilation, which fuses the scaling into its neighbours: eager, the scaling costs what fp8 gains.
    Rung(
        "fp8", 750, "fp8 products",
        "Products in the blocks read half the bytes of bf16 and run at twice the rate on GPUs that have fp8.",
        plan(products="fp8_tensorwise"), choice="products",
    ),
    Rung(
        "int8", 755, "int8 products",
        "Products in the blocks run at twice the rate of bf16 where there are units for int8 (VNNI on a CPU), and "
        "inputs are kept in half the bytes. Rounding takes back part of the gain, most where it is not compiled.",
        plan(products="int8_all"), choice="products",
    ),
    _batch(2, 800), _batch(2, 805, "elementwise"),
    _batch(4, 810), _batch(4, 815, "elementwise"),
    _several(
        "pipeline", 840, "stages (pipeline)",
        "Each process holds some of the blocks, and a batch passes through them in pieces: memory per process shrinks, "
        "and little is sent, but stages are idle while the first piece arrives and after their last.",
        pp=_procs, accumulate=_procs, micro_batch=lambda situation: situation.micro_batch // situation.procs,
    ),
    _several(
        "tensor", 842, "layers split (tensor)",
        "Each process holds a part of every layer, and partial results are summed twice per block: for blocks that are "
        "too large for one device, over links as fast as those within a node.",
        tp=_procs,
    ),
    _several(
        "context", 845, "tokens split (context)",
        "Each process computes some of the tokens of every sample, and keys and values are passed around: for samples "
        "whose activations are too large for one device.",
        cp=_procs,
    ),
    _several(
        "ddp", 850, "replicas (DDP)",
        "Each process has a copy of the model and its own samples; gradients are averaged during the backward "
        "pass. The global batch grows with the number of processes, which the recipe must allow.",
        dp=_procs, sharding="ddp",
    ),
    _several(
        "fsdp", 860, "shards (FSDP)",
        "Each process keeps its rows of weights, gradients and optimizer states, and gathers one block ahead: memory "
        "per process shrinks, and more is sent than with DDP.",
        dp=_procs, sharding="fsdp",
    ),
    _several(
        "fsdp-fp8", 862, "shards gathered in fp8",
        "Weights with one fp8 scale each are gathered in fp8: half the bytes, and a small reduction for the scales.",
        dp=_procs, sharding="fsdp", gather="products",
    ),
    _several(
        "hsdp", 870, "grouped shards (HSDP)",
        "Weights are sharded within groups of neighbours and replicated between groups: they are gathered within a "
        "group, and only gradients are sent between groups, once a step.",
        dp=_procs, sharding="hsdp", gather="level", shard=lambda situation: group_size(situation.procs),
    ),
    Rung(
        "image", 900, "larger image (FLOP/s)",
        "256 pixels make 16 × 16 patches, which fill the kernels' tiles; 224 make 14 × 14. A sample is more work, so "
        "this is compared in model FLOP/s; it is reported, and not carried over to later rungs.",
        _larger_image, obstacle=lambda setting, situation: vision_only(setting), compared_by="flops", carried=False,
    ),
    _compressed("depth", 910, "half the layers", "Every second layer is left out.", _half_depth),
    _compressed("width", 920, "half perceptrons", "Perceptrons have half as many hidden features.", _half_width),
    Rung(
        "muon", 930, "Muon for AdamW",
        "Updates of the blocks' matrices are orthogonalised. A step takes longer, but fewer steps may reach the same "
        "loss; the time to a loss is measured over a few steps, at AdamW's learning rate. Results differ, so it is "
        "reported and not carried over to later rungs; `--recipe.optimizer muon` trains with it.",
        plan(algorithm="muon", optimizer="fused"), carried=False,
    ),
    # Without fp32 weights there are no masters, and without autocast nothing chooses fp8.
    Rung(
        "whole-half", 1000, "whole model half",
        "Weights, gradients and optimizer state have half the size too: no casts, half the traffic, half the memory. "
        "Small updates can be lost in rounding, so look at the loss.",
        plan(precision="O3", dtype=lambda situation: situation.half, products="plain", gather="level"),
    ),
):  # fmt: skip
    register(_each)


def all_rungs() -> tuple[Rung, ...]:
    """Every registered rung, in the order of climbing."""
    return tuple(sorted(REGISTERED.values(), key=lambda rung: (rung.place, rung.name)))


def choose(only: tuple[str, ...] = (), skip: tuple[str, ...] = ()) -> tuple[Rung, ...]:
    """The rungs to climb: those named in `only` (all, if empty), except those in `skip`.

    A name is a rung's own or its group's (`optimizer` names every `optimizer-…`). Raises ConfigError for unknown ones.
    """
    rungs = all_rungs()
    names = {rung.name for rung in rungs} | {rung.group for rung in rungs}
    problems = [
        f"There is no rung {quoted(name)}.{nearest(name, sorted(names))} "
        f"The rungs are {', '.join(r.name for r in rungs)}."
        for name in (*only, *skip)
        if name not in names
    ]
    if problems:
        raise ConfigError(problems)

    def named(rung: Rung, names: tuple[str, ...]) -> bool:
        return rung.name in names or rung.group in names

    return tuple(rung for rung in rungs if (not only or named(rung, only)) and not named(rung, skip))
