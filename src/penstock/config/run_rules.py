"""Rules on Plans that can be predicted, but that training or inference cannot run."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.config.convert import word
from penstock.config.formats import PRODUCTS, Products, Weights
from penstock.config.graph import Run, TokenInput
from penstock.config.layout_rules import experts_are_split_over_ranks, heads_split_over_tensor_parallel
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig, stacks
from penstock.config.numerics import numerics_of
from penstock.config.optimizers import OPTIMIZERS, form_problems
from penstock.config.plan import TRAINED, TRAINING_ALONE, Plan
from penstock.config.rule import Rules, degrees_above_one, divisors

RUN_RULES = Rules()


@RUN_RULES.of("run")
def _fp16_skips_overflowed_steps(plan: Plan) -> Iterator[str]:
    """fp16 needs a loss scale, which needs an optimizer that can skip a step on the device."""
    skips = OPTIMIZERS[plan.algorithm].skips
    if numerics_of(plan).scales and plan.optimizer not in skips:
        name = f"plan.optimizer={plan.optimizer}" if skips else f"recipe.optimizer={plan.algorithm}"
        remedy = f"optimizer={' or '.join(skips)}, or dtype=bf16" if skips else "dtype=bf16"
        yield (
            f"plan.dtype=fp16 needs a loss scale, and {name} cannot skip an overflowed step without making the host "
            f"wait; use {remedy}."
        )


@RUN_RULES.of("run")
def _optimizer_has_the_form(plan: Plan) -> Iterator[str]:
    """The optimizer has the form that the Plan launches it in."""
    yield from form_problems(plan.algorithm, plan.optimizer)


@RUN_RULES.of("run")
def _matrices_are_whole(plan: Plan) -> Iterator[str]:
    """`adafactor` has whole weights on each device, and `muon` computes on the device, not in host memory."""
    matrices = OPTIMIZERS[plan.algorithm].matrices
    if matrices == "factored":
        split = [name for name, _ in degrees_above_one(plan, "tp", "ep")]
        split += ["sharding"] * (plan.sharding != "ddp" and plan.dp > 1)
        for name in split:
            value = {"sharding": "ddp"}.get(name, "1")
            yield (
                f"recipe.optimizer={plan.algorithm} keeps means of whole rows and columns, which plan.{name}="
                f"{getattr(plan, name)} splits over devices; use {name}={value}, or recipe.optimizer=muon."
            )
    if matrices == "orthogonal" and plan.offload == "optimizer":
        yield (
            f"recipe.optimizer={plan.algorithm} multiplies matrices, which plan.offload=optimizer would do in host "
            "memory; use offload=none, or recipe.optimizer=adamw."
        )


@RUN_RULES.of("run")
def _penstock_runs_on_the_machine(plan: Plan, machine: Machine) -> Iterator[str]:
    """Penstock trains on GPUs and CPUs."""
    if machine.device == "other":
        yield f"Machine {machine.name} can be planned for, but Penstock does not run on it; choose a GPU or a CPU."


@RUN_RULES.of("run")
def _runtime_has_the_setting(plan: Plan) -> Iterator[str]:
    """Training supports every setting of the Plan."""
    for name, supported in TRAINED.items():
        if (value := getattr(plan, name)) != supported:
            yield (
                f"plan.{name}={word(value)} can be predicted by `penstock plan`, but training cannot run it yet; "
                f"use {name}={word(supported)}."
            )


@RUN_RULES.of("run")
def _pipeline_runs_stages(plan: Plan) -> Iterator[str]:
    """A pipeline does not compile the whole model, and `zero_bubble` needs plain linears and whole weights."""
    if plan.pp == 1:
        if plan.schedule != "1f1b":
            yield f"plan.schedule={plan.schedule} orders the stages of a pipeline, but plan.pp=1; leave schedule out."
        return
    if plan.compiles_whole:
        yield (
            f"plan.compile={plan.compile} cannot be run with plan.pp={plan.pp}, which cuts the model; use "
            "compile=blocks."
        )
    if plan.schedule == "zero_bubble":
        whole = {"products": "plain", "sharding": "ddp"}
        for name, value in whole.items():
            if getattr(plan, name) != value:
                yield (
                    "plan.schedule=zero_bubble splits the backward pass of linears, which is not possible with "
                    f"plan.{name}={word(getattr(plan, name))}; use {name}={word(value)}, or schedule=1f1b."
                )


@RUN_RULES.of("run")
def _libraries_multiply_fp32(plan: Plan) -> Iterator[str]:
    """`matmul=probed` chooses libraries for plain products in fp32, whose backward pass is whole."""
    for name, value in (("precision", "O0"), ("products", "plain"), ("schedule", "1f1b")):
        present = getattr(plan, name)
        if plan.matmul == "probed" and present != value and (name != "schedule" or present == "zero_bubble"):
            yield (
                "plan.matmul=probed chooses a library for each plain product of a linear layer in fp32, which is not "
                f"possible with plan.{name}={present}; use {name}={value}, or leave matmul out."
            )


@RUN_RULES.of("run")
def _recorded_passes_repeat(plan: Plan) -> Iterator[str]:
    """`compile=graphs` needs one GPU, `accumulate=1` and `padding=keep`."""
    for name in ("dp", "tp", "pp", "cp", "accumulate", "padding") if plan.compile == "graphs" else ():
        value, default = getattr(plan, name), getattr(Plan(), name)
        if value != default:
            yield (
                "plan.compile=graphs replays the same work of one GPU in each step, and its gradients overwrite those "
                f"of the pass before, which plan.{name}={value} does not allow; use {name}={default}, or compile=whole."
            )


@RUN_RULES.of("run")
def _heads_of_keys_are_split(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """In training, `tp` divides the KV heads."""
    for kv in dict.fromkeys(layer.kv_heads for stack in stacks(model) for layer in stack.kinds):
        if plan.tp > 1 and kv % plan.tp and not plan.tp % kv:
            yield (
                f"plan.tp={plan.tp} would copy the model's {kv} KV heads, which can be predicted but not "
                f"trained yet; use a tp of {divisors(kv)}."
            )


@RUN_RULES.of("run")
def _split_layers_have_plain_weights(plan: Plan) -> Iterator[str]:
    """In training, `tp` allows only `products=plain` and those in int8."""
    if plan.tp > 1 and not PRODUCTS[plan.products].splits:
        yield f"plan.products={plan.products} cannot be trained with plan.tp={plan.tp} yet; leave one of them out."


@RUN_RULES.of("run")
def _split_tokens_have_whole_shards(plan: Plan) -> Iterator[str]:
    """In training, `cp` divides `shard`."""
    if plan.sharding == "hsdp" and plan.shard % plan.cp:
        yield (
            f"plan.shard={plan.shard} would separate the plan.cp={plan.cp} ranks that split a sample's tokens; use a "
            f"shard that plan.cp divides."
        )


@RUN_RULES.of("run")
def _offloaded_blocks_run_eagerly(plan: Plan) -> Iterator[str]:
    """Activations are offloaded from blocks that are neither compiled nor recomputed."""
    for name in ("compile", "recompute"):
        if plan.offload == "activations" and getattr(plan, name) != "none":
            yield (
                f"plan.offload=activations moves the tensors that blocks save, which plan.{name}={getattr(plan, name)} "
                f"chooses itself; use {name}=none, or offload=none."
            )


@RUN_RULES.of("run")
def _offload_keeps_shards(plan: Plan) -> Iterator[str]:
    """The optimizer is offloaded only if its states are sharded."""
    if plan.offload == "optimizer" and (plan.sharding == "ddp" or plan.dp == 1):
        yield (
            "plan.offload=optimizer keeps shards in host memory, but the plan shards nothing; use "
            "plan.sharding=fsdp with plan.dp of 2 or more, or offload=none."
        )


@RUN_RULES.of("run")
def _mixtures_are_compiled(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """Mixtures of experts are compiled if each rank has them whole, with `products=plain`, without recomputation, but
    not as `graphs`; with a `capacity` they need `token_order=batch_first`. Experts that are whole blocks are compiled
    with `compile=blocks`."""
    mixed = _mixed(model)
    if not mixed or plan.compile == "none":
        return
    setting = f"{mixed[0].setting}.experts={mixed[0].stack.experts}"
    whole = [run.setting for run in mixed if run.stack.experts_in == "block"]
    if whole and plan.compiles_whole:
        yield (
            f"plan.compile={plan.compile} cannot compile {whole[0]}.experts_in=block in one piece, because the number "
            "of samples of an expert changes with each step; use compile=blocks."
        )
    if plan.compile == "graphs":
        yield (
            f"plan.compile=graphs replays work on the GPU alone, and visits to the experts of {setting} are "
            "counted outside of it; use compile=whole."
        )
    if plan.products != "plain" and len(whole) < len(mixed):
        yield (
            f"plan.products={plan.products} multiplies the experts of {setting} one after the other, which compiled "
            "code cannot; use plan.products=plain, or plan.compile=none."
        )
    if plan.recompute != "none":
        yield (
            f"plan.recompute={plan.recompute} in compiled code would choose experts a second time, perhaps others, "
            f"with {setting}; use plan.recompute=none, or plan.compile=none."
        )
    for name, degree in degrees_above_one(plan, "tp", "pp", "cp", "ep"):
        yield (
            f"plan.compile={plan.compile} cannot be trained with plan.{name}={degree} and {setting} yet; use "
            f"compile=none, or {name}=1."
        )
    for run in mixed:
        if run.stack.capacity is not None and plan.token_order != "batch_first":
            yield (
                f"{run.setting}.capacity drops the last tokens in the order of samples, and with "
                f"plan.token_order={plan.token_order} compiled code cannot tell that order; use "
                "token_order=batch_first, or compile=none."
            )


@RUN_RULES.of("run")
def _experts_get_whole_samples(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """Routing that depends on all tokens of a sample needs them on one rank, and random routing needs `tp=1`. Experts
    that are whole blocks, in models of texts, need whole texts: `cp=1` and `padding=keep`."""
    mixed = _mixed(model)
    whole = [run.setting for run in mixed if run.stack.experts_in == "block"]
    for name, plain in (("padding", "keep"), ("cp", 1)) if model.graph.inputs_of(TokenInput) else ():
        if whole and getattr(plan, name) != plain:
            yield (
                f"{whole[0]}.experts_in=block sends whole samples to their experts, but "
                f"plan.{name}={getattr(plan, name)} does not keep the tokens of a sample together; use {name}={plain}."
            )
    for run in mixed:
        for name, degree in degrees_above_one(plan, "cp", "tp") if run.stack.chooses_by_sample else ():
            yield (
                f"{run.setting}.sample_capacity limits the tokens of a sample that an expert takes, so a rank needs "
                f"all tokens of a sample, but plan.{name}={degree} splits them over ranks; use {name}=1, or leave out "
                "sample_capacity."
            )
        if plan.tp > 1 and run.stack.chooses_by_chance:
            yield (
                f"{run.setting} chooses or masks experts with random numbers, which would differ between the ranks of "
                f"plan.tp={plan.tp}; use tp=1, or leave out router_jitter and expert_dropout."
            )


def _mixed(model: ModelConfig) -> list[Run]:
    """The runs of a model that have mixtures of experts, or experts that are whole blocks."""
    return [run for run in model.graph.runs if any(each.mixture or each.routed for each in run.stack.kinds)]


# -- rules for trained models on several devices: generate, embed, classify


INFER_RULES = Rules()


@INFER_RULES.of("infer")
def _tokens_are_made_one_at_a_time(plan: Plan) -> Iterator[str]:
    """In inference `tp` and `pp` split the model, `ep` its experts, and `dp` the texts; `cp`, `sp`, `fuse` and
    `sharding` are for training only."""
    for name, why in TRAINING_ALONE.items():
        if (value := getattr(plan, name)) != getattr(Plan(), name):
            yield f"plan.{name}={word(value)} {why}."


@INFER_RULES.of("infer")
def _a_compiled_step_is_on_one_device(plan: Plan) -> Iterator[str]:
    """For generation, `compile` does not allow `tp`, `pp` or `ep`, and is not `graphs`."""
    if plan.compile == "graphs":
        yield "plan.compile=graphs records training; use compile=whole, whose steps are recorded on a GPU already."
    degrees = " and ".join(
        f"plan.{name}={degree}" for name, degree in degrees_above_one(plan, "tp", "pp", "ep")
    )
    if plan.compile != "none" and degrees:
        yield (
            f"plan.compile={plan.compile} makes one graph of a step, within which the ranks of {degrees} exchange "
            "results; leave one of them out."
        )


@INFER_RULES.of("infer")
def _rounding_sees_whole_weights(plan: Plan, weights: Weights) -> Iterator[str]:
    """Quantised weights are not split by `tp`, nor distributed by `ep`."""
    form: Weights | Products = plan.products if weights == "auto" and plan.products != "plain" else weights
    if plan.tp > 1 and form != "auto" and PRODUCTS[form].weights is not None:
        yield (
            f"weights={form} rounds a whole row of weights together, and plan.tp={plan.tp} splits rows: "
            "texts would change with tp. Use weights=auto, or more processes with a whole model each in place of tp."
        )
    if plan.ep > 1 and form != "auto" and PRODUCTS[form].weights is not None:
        yield (
            f"weights={form} would have to round experts before plan.ep={plan.ep} sends them to the ranks that host "
            "them, which it cannot. Use weights=auto, or more processes with a whole model each in place of ep."
        )


@INFER_RULES.of("infer")
def _a_shortlist_takes_whole_rows(plan: Plan, shortlist: bool) -> Iterator[str]:
    """A shortlist does not allow `tp`."""
    if plan.tp > 1 and shortlist:
        yield (
            f"A shortlist selects rows of the output, which plan.tp={plan.tp} splits over ranks; use plan.dp "
            "in place of tp, or leave the shortlist out."
        )


INFER_RULES.of("infer")(heads_split_over_tensor_parallel)
INFER_RULES.of("infer")(experts_are_split_over_ranks)


@INFER_RULES.of("infer")
def _hosts_answer_at_any_time(plan: Plan) -> Iterator[str]:
    """In inference `ep` does not allow `pp`."""
    if plan.ep > 1 and plan.pp > 1:
        yield (
            f"plan.ep={plan.ep} lets ranks wait for each other's tokens, and so does plan.pp={plan.pp}: if ranks have "
            "different texts, they could wait for ever. Use plan.pp=1, and plan.tp to split the model."
        )


@INFER_RULES.of("infer")
def _every_rank_hosts_experts(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """In inference `ep` is at most the model's experts; routing that depends on a whole sample needs it on one rank."""
    if plan.ep == 1:
        return
    mixed = [run.stack for run in model.graph.runs if any(layer.mixture for layer in run.stack.layers)]
    if not mixed:
        yield f"plan.ep={plan.ep} hosts experts on several ranks, but the model has none; use plan.ep=1."
    for stack in mixed:
        if stack.experts < plan.ep:
            yield (
                f"plan.ep={plan.ep} leaves ranks without an expert: the model has {stack.experts}; use at most that."
            )
        if stack.chooses_by_sample and plan.tp > 1:
            yield (
                f"This model's experts depend on all tokens of a sample, which with plan.ep={plan.ep} "
                f"are split over the ranks of plan.tp={plan.tp}; use plan.tp=1, and plan.dp for texts."
            )


@INFER_RULES.of("infer")
def _every_stack_is_cut_into_stages(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """In inference every stage has a block of every stack: `pp` is at most each stack's number of blocks."""
    least = min(len(stack.layers) for stack in stacks(model))
    if plan.pp > least:
        yield (
            f"plan.pp={plan.pp} leaves stages without a block: a stack of the model has {least}; use at most that."
        )
