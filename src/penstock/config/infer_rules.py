"""Rules of what models can do on several devices once they are trained: generate, embed, classify."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.config.convert import word
from penstock.config.decoding import Weights
from penstock.config.formats import PRODUCTS, Products
from penstock.config.layout_rules import experts_are_split_over_ranks, heads_split_over_tensor_parallel
from penstock.config.model import ModelConfig, stacks
from penstock.config.plan import TRAINING_ALONE, Plan
from penstock.config.rule import Rules

INFER_RULES = Rules()


@INFER_RULES.of("infer")
def _tokens_are_made_one_at_a_time(plan: Plan) -> Iterator[str]:
    """In inference `tp` and `pp` split the model, `ep` its experts, and `dp` the texts; `cp`, `sp`, `fuse` and
    `sharding` are for training alone."""
    for name, why in TRAINING_ALONE.items():
        if (value := getattr(plan, name)) != getattr(Plan(), name):
            yield f"plan.{name}={word(value)} {why}."


@INFER_RULES.of("infer")
def _a_compiled_step_is_on_one_device(plan: Plan) -> Iterator[str]:
    """`compile` goes with neither `tp`, `pp` nor `ep` where text is generated."""
    degrees = " and ".join(
        f"plan.{name}={getattr(plan, name)}" for name in ("tp", "pp", "ep") if getattr(plan, name) > 1
    )
    if plan.compile != "none" and degrees:
        yield (
            f"plan.compile={plan.compile} makes one graph of a step, within which the ranks of {degrees} exchange "
            "results; leave one of them out."
        )


@INFER_RULES.of("infer")
def _rounding_sees_whole_weights(plan: Plan, weights: Weights) -> Iterator[str]:
    """Weights that are rounded are not split by `tp`, nor hosted by `ep`."""
    form: Weights | Products = plan.products if weights == "auto" and plan.products != "plain" else weights
    if plan.tp > 1 and form != "auto" and PRODUCTS[form].weights is not None:
        yield (
            f"weights={form} rounds by what is beside it, and with plan.tp={plan.tp} each rank has another part: "
            "texts would change with tp. Use weights=auto, or more processes with a whole model each in place of tp."
        )
    if plan.ep > 1 and form != "auto" and PRODUCTS[form].weights is not None:
        yield (
            f"weights={form} rounds experts where they are whole, and with plan.ep={plan.ep} each is sent to the ranks "
            "that host it as it is. Use weights=auto, or more processes with a whole model each in place of ep."
        )


@INFER_RULES.of("infer")
def _a_shortlist_takes_whole_rows(plan: Plan, shortlist: bool) -> Iterator[str]:
    """A shortlist goes without `tp`."""
    if plan.tp > 1 and shortlist:
        yield (
            f"A shortlist takes rows of the output, of which with plan.tp={plan.tp} each rank has others; use plan.dp "
            "in place of tp, or leave the shortlist out."
        )


INFER_RULES.of("infer")(heads_split_over_tensor_parallel)
INFER_RULES.of("infer")(experts_are_split_over_ranks)


@INFER_RULES.of("infer")
def _hosts_answer_at_any_time(plan: Plan) -> Iterator[str]:
    """In inference `ep` goes without `pp`."""
    if plan.ep > 1 and plan.pp > 1:
        yield (
            f"plan.ep={plan.ep} lets ranks wait for each other's tokens, and so does plan.pp={plan.pp}: together they "
            "could wait for ever where ranks have other texts. Use plan.pp=1, and plan.tp to split what is left."
        )


@INFER_RULES.of("infer")
def _every_rank_hosts_experts(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """In inference `ep` is at most the model's experts, and whoever chooses experts by a whole sample has it on one
    rank."""
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
                f"This model's experts are chosen by looking at all tokens of a sample, of which with "
                f"plan.ep={plan.ep} each rank of plan.tp={plan.tp} has a part; use plan.tp=1, and plan.dp for texts."
            )


@INFER_RULES.of("infer")
def _every_stack_is_cut_into_stages(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """In inference every stage has a block of every stack: `pp` is at most the blocks of each."""
    least = min(len(stack.layers) for stack in stacks(model))
    if plan.pp > least:
        yield (
            f"plan.pp={plan.pp} leaves stages without a block: a stack of the model has {least}; use at most that."
        )
