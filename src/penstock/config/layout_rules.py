"""Rules on Plans that can be predicted: types, kernels and device features, and degrees of parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.config.convert import word
from penstock.config.formats import HALVES, PRODUCTS
from penstock.config.fused import FUSED
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig, stacks
from penstock.config.numerics import numerics_of
from penstock.config.plan import WITH_SINKS, Plan
from penstock.config.rule import Rules, divisors

CPU_ATTENTION = ("auto", "plain", "sdpa", "flash", "math", "native")
"""Attention backends that exist on a CPU."""
HALF_ONLY_ATTENTION = ("flash", "cudnn")
"""Attention backends that compute only in half precision on a GPU."""
FLASH_HEAD_WIDTH = 256
"""The widest heads that flash attention supports."""

LAYOUT_RULES = Rules()

# Contradictions within the Plan.


@LAYOUT_RULES.of("types")
def _fused_operators_are_named_once(plan: Plan) -> Iterator[str]:
    """`fuse` names each operator once, or `auto` alone."""
    if len(set(plan.fuse)) < len(plan.fuse) or ("auto" in plan.fuse and len(plan.fuse) > 1):
        yield (
            f"plan.fuse={word(plan.fuse)} names an operator twice, as auto stands for all that pay; use fuse=auto, or "
            f"some of {','.join(FUSED)}."
        )


@LAYOUT_RULES.of("types")
def _dtype_has_an_effect(plan: Plan) -> Iterator[str]:
    """`dtype` is set only if something is computed in half precision."""
    if plan.precision == "O0" and plan.dtype != "bf16":
        yield (
            f"plan.dtype={plan.dtype} has no effect with plan.precision=O0, which computes in fp32; "
            "choose precision=O1, O2 or O3, or leave dtype out."
        )


@LAYOUT_RULES.of("types")
def _half_norms_are_of_o2(plan: Plan) -> Iterator[str]:
    """`norms=half` is set with O2 only, the one level that has a choice."""
    if plan.norms == "half" and plan.precision != "O2":
        has = "half ones anyway" if plan.precision == "O3" else "fp32 ones"
        yield (
            f"plan.norms=half has no effect with plan.precision={plan.precision}, which has {has}; use precision=O2, "
            "or leave norms out."
        )


@LAYOUT_RULES.of("types")
def _products_have_gradients(plan: Plan) -> Iterator[str]:
    """`products` is a form for training, and replaces the bf16 products of O1 or O2; with learned clips, the bf16
    products of O1 or the fp32 products of O0."""
    row = PRODUCTS[plan.products]
    if not row.trains:
        able = " or ".join(name for name, row in PRODUCTS.items() if row.trains)
        yield (
            f"plan.products={plan.products} stores weights for inference, and nothing would train them; use "
            f"products={able}, and weights={plan.products} where the trained model is opened."
        )
    elif row.clips and (plan.precision == "O0" or (plan.precision, plan.dtype) == ("O1", "bf16")):
        return
    elif row.clips:
        yield (
            f"plan.products={plan.products} rounds the weights that will be deployed, which are fp32 with "
            "plan.precision=O0, or O1 and dtype=bf16, but the plan has "
            f"precision={plan.precision} dtype={plan.dtype}; change these, or use products=int8."
        )
    elif plan.products != "plain" and (plan.precision not in ("O1", "O2") or plan.dtype != "bf16"):
        yield (
            f"plan.products={plan.products} replaces the bf16 products of plan.precision=O1 or O2 with dtype=bf16, "
            f"but the plan has precision={plan.precision} dtype={plan.dtype}; change these, or leave products out."
        )


@LAYOUT_RULES.of("types")
def _budget_is_of_its_recomputation(plan: Plan) -> Iterator[str]:
    """`budget` is set with `recompute=budget` only, and `recompute_every` then keeps its default."""
    if plan.budget and plan.recompute != "budget":
        yield (
            f"plan.budget={word(plan.budget)} has no effect with plan.recompute={plan.recompute}; use "
            "recompute=budget, or leave budget out."
        )
    if plan.recompute == "budget" and plan.recompute_every != 1:
        yield (
            f"plan.recompute_every={word(plan.recompute_every)} says which blocks recompute, and plan.recompute=budget "
            "chooses for each by itself; leave recompute_every out, or use another recompute."
        )


@LAYOUT_RULES.of("degrees")
def _shard_is_of_hsdp(plan: Plan) -> Iterator[str]:
    """`shard` is set only with `sharding=hsdp`, and divides the number of replicas."""
    replicas = plan.replicas
    if plan.sharding != "hsdp":
        if plan.shard > 1:
            yield f"plan.shard={plan.shard} needs plan.sharding=hsdp; use shard=1, or sharding=hsdp."
    elif replicas % plan.shard:
        named = f"plan.dp={plan.dp}" + (f" times plan.cp={plan.cp}" if plan.cp > 1 else "")
        yield f"plan.shard={plan.shard} does not divide the replicas, {named}; use a shard that does."


@LAYOUT_RULES.of("degrees")
def _weights_gathered_in_fp8_have_one_scale(plan: Plan) -> Iterator[str]:
    """`gather=products` needs products with one fp8 scale per weight, and weights sharded over several replicas."""
    shards = plan.sharding in ("fsdp", "hsdp") and plan.replicas > 1
    if plan.gather == "products" and not (shards and PRODUCTS[plan.products].scales == "tensorwise"):
        yield (
            "plan.gather=products needs shards of weights with one fp8 scale each, but the plan has products="
            f"{plan.products} sharding={plan.sharding} dp={plan.dp}; use products=fp8_tensorwise with sharding=fsdp or "
            "hsdp and dp of 2 or more, or gather=level."
        )


@LAYOUT_RULES.of("degrees")
def _sequence_parallel_needs_tensor_parallel(plan: Plan) -> Iterator[str]:
    """`sp` needs tensor parallelism."""
    if plan.sp and plan.tp == 1:
        yield "plan.sp=true splits what tensor parallelism does not, but plan.tp=1; use sp=false, or a larger tp."


@LAYOUT_RULES.of("degrees")
def _virtual_stages_interleave(plan: Plan) -> Iterator[str]:
    """`virtual` above 1 needs an interleaved schedule over several stages, and a multiple of `pp`
    micro-batches."""
    if plan.virtual == 1:
        return
    if plan.schedule != "interleaved":
        yield (
            f"plan.virtual={plan.virtual} needs plan.schedule=interleaved, which plan.schedule={plan.schedule} is not."
        )
    elif plan.accumulate % plan.pp:
        yield (
            f"plan.accumulate={plan.accumulate} is not a multiple of plan.pp={plan.pp}, but an interleaved schedule "
            "takes micro-batches in groups of pp; use a multiple, or schedule=1f1b with virtual=1."
        )
    if plan.pp == 1:
        yield f"plan.virtual={plan.virtual} cuts pipeline stages into chunks, but plan.pp=1; use virtual=1."


@LAYOUT_RULES.of("degrees")
def experts_are_split_over_ranks(plan: Plan) -> Iterator[str]:
    """`ep` divides the ranks of a pipeline stage, `dp` times `cp` times `tp`."""
    ranks = plan.dp * plan.cp * plan.tp
    if ranks % plan.ep:
        yield (
            f"plan.ep={plan.ep} must divide plan.dp={plan.dp} times plan.cp={plan.cp} times plan.tp={plan.tp}, because "
            f"experts are split over the ranks of a pipeline stage; use an ep of {divisors(ranks)}."
        )


# Rules that need the model.


@LAYOUT_RULES.of("degrees")
def heads_split_over_tensor_parallel(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """`tp` divides the heads and the MLP's hidden width, and divides or is a multiple of the KV heads."""
    if plan.tp == 1:
        return
    layers = [layer for stack in stacks(model) for layer in stack.kinds]
    for heads, kv in dict.fromkeys((layer.heads, layer.kv_heads) for layer in layers):
        if heads % plan.tp:
            yield (
                f"plan.tp={plan.tp} cannot split the model's {heads} attention heads evenly; "
                f"use a tp of {divisors(heads)}."
            )
        elif kv % plan.tp and plan.tp % kv:
            yield (
                f"plan.tp={plan.tp} neither divides the model's {kv} KV heads nor is a multiple of them; "
                f"use a tp that divides {kv}, or a multiple of it."
            )
    # With ep, experts are whole.
    whole = plan.ep > 1 and not any(stack.shared_experts for stack in stacks(model))
    for width in dict.fromkeys(layer.perceptron.width for layer in layers if not (whole and layer.mixture)):
        if width % plan.tp:
            yield (
                f"plan.tp={plan.tp} cannot split the MLP's hidden width {width} evenly; use a tp that divides it."
            )


@LAYOUT_RULES.of("degrees")
def _tokens_split_over_devices(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """`cp` divides the tokens of a sample."""
    if plan.cp == 1:
        return
    if any(run.more_inputs for run in model.graph.runs):
        yield f"plan.cp={plan.cp} cannot cut samples of several inputs of one run; use cp=1."
    for tokens in model.graph.lengths:
        if tokens % plan.cp:
            yield (
                f"plan.cp={plan.cp} cannot split the model's {tokens} tokens evenly; use a cp that divides them."
            )


@LAYOUT_RULES.of("degrees")
def _every_stage_has_a_block(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """`pp` times `virtual` is at most the number of blocks, and divides it where `virtual` is above 1, with or without
    embedding and head."""
    chunks = plan.pp * plan.virtual
    if chunks == 1:
        return
    depth = sum(len(stack.layers) for stack in stacks(model))
    degrees = f"plan.pp={plan.pp}" + f" times plan.virtual={plan.virtual}" * (plan.virtual > 1)
    if chunks > depth:
        yield f"{degrees} leaves stages without a block: the model has {depth}; use at most that."
    elif plan.virtual > 1 and depth % chunks and (depth + 2) % chunks:
        yield (
            f"{degrees} does not divide the model's {depth} blocks (nor {depth + 2} with embedding and head); choose "
            "another virtual."
        )


@LAYOUT_RULES.of("degrees")
def _experts_split_evenly(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """`ep` divides the model's experts."""
    if plan.ep == 1:
        return
    counts = sorted({stack.experts for stack in stacks(model) if stack.mixes})
    if not counts:
        whole = any(stack.experts for stack in stacks(model))
        yield (
            f"plan.ep={plan.ep} splits experts, but the model's are whole blocks; use ep=1, and sharding=fsdp."
            if whole
            else f"plan.ep={plan.ep} splits experts, but the model has none; use ep=1."
        )
    for experts in counts:
        if experts % plan.ep:
            yield (
                f"plan.ep={plan.ep} cannot split the model's {experts} experts evenly; use an ep of "
                f"{divisors(experts)}."
            )


@LAYOUT_RULES.of("types")
def _flash_takes_narrow_heads(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """Flash attention supports heads of at most 256 features."""
    if plan.attention != "flash":
        return
    widest = max(stack.layers[0].head_width for stack in stacks(model))
    if widest > FLASH_HEAD_WIDTH:
        yield (
            f"plan.attention=flash takes heads of at most {FLASH_HEAD_WIDTH} features, but this model's have "
            f"{widest}; use more model.heads, or attention=math."
        )


@LAYOUT_RULES.of("types")
def _sinks_are_in_the_plain_form_and_torchs(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """Attention sinks need `attention` plain, sdpa or auto."""
    if plan.attention not in WITH_SINKS and any(stack.sinks for stack in stacks(model)):
        yield (
            f"plan.attention={plan.attention} has no attention sinks, which this model has; use "
            f"attention={' or '.join(WITH_SINKS)}."
        )


@LAYOUT_RULES.of("types")
def _chunked_loss_is_over_words(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """`loss=chunked` needs a model whose outputs are logits over a vocabulary."""
    if plan.loss == "chunked" and model.graph.words is None:
        yield (
            "plan.loss=chunked cuts up logits over a vocabulary, which this model's outputs are not; leave loss out."
        )


@LAYOUT_RULES.of("types")
def _padding_is_left_out_of_encoders(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """`padding=remove` needs an encoder, or an encoder–decoder's."""
    if plan.padding == "remove" and not model.graph.padded:
        yield (
            "plan.padding=remove leaves padding out of an encoder, which this model does not have; leave padding out."
        )


@LAYOUT_RULES.of("types")
def _experts_are_there(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """`experts=loop` needs a mixture of experts."""
    if plan.experts == "loop" and not any(layer.mixture for stack in stacks(model) for layer in stack.layers):
        yield "plan.experts=loop is for mixtures of experts, which this model does not have; leave experts out."


# Rules that need the machine.


@LAYOUT_RULES.of("types")
def _machine_computes_the_types(plan: Plan, machine: Machine) -> Iterator[str]:
    """The machine has units for the types that the Plan computes in."""
    if numerics_of(plan).half and plan.dtype not in machine.peak_flops:
        able = [dtype for dtype in HALVES if dtype in machine.peak_flops]
        remedy = f"use dtype={able[0]}" if able else "use precision=O0"
        yield f"plan.dtype={plan.dtype} cannot be computed on machine {machine.name}; {remedy}."
    if not numerics_of(plan).half and "fp32" not in machine.peak_flops:
        yield (
            f"plan.precision={plan.precision} computes in fp32, and machine {machine.name} has rates for "
            f"{', '.join(machine.peak_flops)} only; use precision=O1, O2 or O3, or give machine.peak_flops.fp32."
        )
    row = PRODUCTS[plan.products]
    if row.trains and row.weights is not None and row.weights not in machine.peak_flops:
        units = f"a GPU with {row.weights} units (compute capability {row.capability[0]}.{row.capability[1]} or newer)"
        lacks = f"needs {units}, and machine {machine.name} has none; leave it out"
        if machine.device in row.trains and "cpu" in row.trains:
            lacks = (
                f"needs the rate of {row.weights} products, which machine {machine.name} does not give; measure it "
                "with penstock probe, or leave products out"
            )
        yield f"plan.products={plan.products} {lacks}."
    if plan.matmul == "probed" and machine.device != "cpu":
        yield (
            f"plan.matmul=probed chooses between a CPU's libraries, and machine {machine.name} is none; use "
            "matmul=high for TF32, or leave matmul out."
        )
    elif plan.matmul != "highest" and machine.device == "cuda" and "tf32" not in machine.peak_flops:
        yield (
            f"plan.matmul={plan.matmul} asks for TF32, which machine {machine.name} does not have; "
            "use matmul=highest."
        )


@LAYOUT_RULES.of("types")
def _fused_operators_have_kernels(plan: Plan, machine: Machine) -> Iterator[str]:
    """Operators in `fuse` have a kernel for the machine's device; `auto` takes none where there is none."""
    for name in plan.fuse:
        if name != "auto" and machine.device not in FUSED[name].devices:
            yield (
                f"plan.fuse={name} has kernels for {' and '.join(FUSED[name].devices)} only, and machine "
                f"{machine.name} is a {machine.device}; leave it out."
            )


@LAYOUT_RULES.of("types")
def _host_memory_matters_on_cpus(plan: Plan, machine: Machine) -> Iterator[str]:
    """`host_memory` affects only CPUs."""
    if plan.host_memory != "release" and machine.device == "cuda":
        yield (
            f"plan.host_memory={plan.host_memory} has no effect on a GPU's step, and machine {machine.name} is "
            "one; leave it out."
        )


@LAYOUT_RULES.of("types")
def _settings_are_of_gpus(plan: Plan, machine: Machine) -> Iterator[str]:
    """`offload=activations` and `compile=graphs` are for GPUs."""
    if plan.compile == "graphs" and machine.device != "cuda":
        yield f"plan.compile=graphs records CUDA graphs, and machine {machine.name} is no GPU; use compile=whole."
    if plan.offload == "activations" and machine.device == "cpu":
        yield (
            f"plan.offload=activations moves activations to host memory, where a CPU such as {machine.name} has them "
            "already; leave it out."
        )


@LAYOUT_RULES.of("types")
def _native_attention_multiplies_bf16(plan: Plan) -> Iterator[str]:
    """`attention=native` is set with bf16, of whole sequences."""
    if plan.attention != "native":
        return
    if numerics_of(plan).compute != "bf16":
        yield (
            "plan.attention=native multiplies bf16 only; use precision=O1, O2 or O3 with dtype=bf16, or attention=auto."
        )
    if plan.cp > 1:
        yield (
            f"plan.attention=native computes whole sequences, but plan.cp={plan.cp} shards them; use attention=sdpa, "
            "or cp=1."
        )


@LAYOUT_RULES.of("types")
def _attention_backend_exists(plan: Plan, machine: Machine) -> Iterator[str]:
    """The attention backend exists on the machine, in the type that the Plan computes in."""
    if machine.device == "cpu" and plan.attention not in CPU_ATTENTION:
        yield (
            f"plan.attention={plan.attention} exists on GPUs only, and machine {machine.name} is a CPU; "
            f"use one of {', '.join(CPU_ATTENTION)}."
        )
    if machine.device == "cuda" and plan.attention == "native":
        yield (
            f"plan.attention=native is a kernel for CPUs, and machine {machine.name} is a GPU; use attention=sdpa or "
            "flash."
        )
    if machine.device == "cuda" and plan.attention in HALF_ONLY_ATTENTION:
        if not numerics_of(plan).half:
            yield (
                f"plan.attention={plan.attention} computes in half precision only, but plan.precision=O0 is "
                "fp32; use precision=O1, O2 or O3, or attention=efficient."
            )
        if "bf16" not in machine.peak_flops:
            yield (
                f"plan.attention={plan.attention} needs a GPU of compute capability 8.0, which machine "
                f"{machine.name} is not; use attention=efficient or math."
            )
