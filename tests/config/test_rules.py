"""Every rule has a Plan that breaks it and says why, and all are asked at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.config.formats import PRODUCTS
from penstock.config.machine import Machine, load_machine
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.config.rules import RULES, inference_problems, problems, require
from penstock.config.run_rules import INFER_RULES
from penstock.errors import ConfigError

BROKEN = {
    "dtype_has_an_effect": ("dtype=fp16", "vit-s16", "h100", "dtype=fp16 has no effect"),
    "fp16_skips_overflowed_steps": (
        "precision=O1 dtype=fp16", "vit-s16", "h100", "cannot skip an overflowed step",
    ),
    "optimizer_has_the_form": (
        "algorithm=muon optimizer=contiguous", "gpt2", "h100", "flat buffers hold no matrices",
    ),
    "matrices_are_whole": ("algorithm=adafactor tp=2", "gpt2", "h100", "means of whole rows and columns"),
    "recorded_passes_repeat": ("compile=graphs accumulate=2", "vit-s16", "h100", "plan.accumulate=2 does not"),
    "libraries_multiply_fp32": ("matmul=probed precision=O1", "vit-s16", "cpu", "use precision=O0, or leave"),
    "products_have_gradients": ("precision=O1 products=int4", "vit-s16", "h100", "nothing would train them"),
    "budget_is_of_its_recomputation": ("budget=2", "vit-s16", "h100", "use recompute=budget"),
    "shard_is_of_hsdp": ("shard=2", "vit-s16", "h100", "shard=2 needs plan.sharding=hsdp"),
    "weights_gathered_in_fp8_have_one_scale": (
        "precision=O2 products=fp8 gather=products", "gpt2", "h100", "but the plan has products=fp8 sharding=ddp dp=1",
    ),
    "half_norms_are_of_o2": ("norms=half", "vit-s16", "h100", "has no effect with plan.precision=O0"),
    "sequence_parallel_needs_tensor_parallel": ("sp=true", "gpt2", "h100", "but plan.tp=1"),
    "virtual_stages_interleave": ("virtual=2", "gpt2", "h100", "needs plan.schedule=interleaved"),
    "experts_are_split_over_ranks": ("ep=2", "mixtral-8x7b", "h100", "must divide plan.dp=1"),
    "heads_split_over_tensor_parallel": ("tp=5", "gpt2", "h100", "12 attention heads"),
    "tokens_split_over_devices": ("cp=3", "gpt2", "h100", "1024 tokens"),
    "every_stage_has_a_block": ("pp=13", "gpt2", "h100", "leaves stages without a block"),
    "experts_split_evenly": ("ep=2 dp=2", "gpt2", "h100", "the model has none"),
    "experts_are_there": ("experts=loop", "gpt2", "h100", "is for mixtures of experts"),
    "chunked_loss_is_over_words": ("loss=chunked", "vit-s16", "h100", "which this model's outputs are not"),
    "padding_is_left_out_of_encoders": (
        "padding=remove", "vit-s16", "h100", "which this model does not have",
    ),
    "flash_takes_narrow_heads": (
        "precision=O1 attention=flash", None, "h100", "heads of at most 256 features",
    ),
    "sinks_are_in_the_plain_form_and_torchs": (
        "precision=O1 attention=flash", "gpt-oss-20b", "h100", "has no attention sinks, which this model has",
    ),
    "machine_computes_the_types": ("precision=O1", "vit-s16", "v100", "dtype=bf16 cannot be computed"),
    "fused_operators_are_named_once": (
        "fuse=auto,residual_norm", "vit-s16", "h100", "names an operator twice",
    ),
    "fused_operators_have_kernels": ("fuse=bias_activation", "vit-s16", "h100", "has kernels for cpu only"),
    "host_memory_matters_on_cpus": ("host_memory=keep", "vit-s16", "h100", "no effect on a GPU's step"),
    "native_attention_multiplies_bf16": ("attention=native", "vit-s16", "cpu", "multiplies bf16 only"),
    "attention_backend_exists": ("attention=flash", "vit-s16", "h100", "in half precision only"),
    "settings_are_of_gpus": ("offload=activations", "vit-s16", "cpu", "to host memory, where a CPU such as"),
    "offloaded_blocks_run_eagerly": (
        "offload=activations recompute=full", "vit-s16", "h100", "which plan.recompute=full chooses itself",
    ),
    "pipeline_runs_stages": (
        "pp=2 compile=whole",
        "vit-s16",
        "h100",
        "cannot be run with plan.pp=2, which cuts the model; use compile=blocks",
    ),
    "split_tokens_have_whole_shards": (
        "cp=2 dp=2 sharding=hsdp shard=1",
        "gpt2",
        "h100",
        "would separate the plan.cp=2 ranks that split a sample's tokens",
    ),
    "runtime_has_the_setting": ("gradients=half", "vit-s16", "h100", "training cannot run it yet"),
    "heads_of_keys_are_split": ("tp=16", "llama3-8b", "h100", "8 KV heads, which can be predicted"),
    "split_layers_have_plain_weights": (
        "tp=2 products=fp8_tensorwise precision=O1", "gpt2", "h100", "leave one of them out",
    ),
    "offload_keeps_shards": ("offload=optimizer", "vit-s16", "h100", "the plan shards nothing"),
    "penstock_runs_on_the_machine": ("precision=O1", "vit-s16", "tpu-v5p", "Penstock does not run on it"),
    "mixtures_are_compiled": (
        "compile=blocks recompute=full", "mixtral-8x7b", "h100", "in compiled code would choose experts a second time",
    ),
    "experts_get_whole_samples": ("tp=2", "switch-tiny", "h100", "so a rank needs all tokens of a sample"),
}  # fmt: skip


def _machine(name: str) -> Machine:
    gpu = load_machine("h100")
    return replace(gpu, name="a desk", device="cpu") if name == "cpu" else load_machine(name)


def test_every_rule_is_broken_by_an_example() -> None:
    assert set(BROKEN) == {rule.name for rule in RULES}
    assert all(rule.text.endswith(".") for rule in RULES)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_says_why(name: str) -> None:
    line, model, machine, words = BROKEN[name]
    config = PRESETS[model] if model else type(PRESETS["vit-s16"])(width=1024, heads=2)
    rule = next(rule for rule in RULES if rule.name == name)
    found = problems(Plan.parse(line), config, _machine(machine), run=True)
    assert any(words in problem for problem in found), found
    if rule.kind == "run":
        assert not any(words in problem for problem in problems(Plan.parse(line), config, _machine(machine)))
    if rule.kind == "degrees":
        assert not any(words in problem for problem in problems(Plan.parse(line), config, degrees=False))


@pytest.mark.parametrize(
    "products", [name for name, row in PRODUCTS.items() if row.trains and row.passes and not row.clips]
)
def test_products_in_eight_bits_stand_on_bf16(products: str) -> None:
    for line in (f"products={products}", f"precision=O1 dtype=fp16 products={products}"):
        (problem,) = problems(Plan.parse(line))
        assert f"products={products} replaces the bf16 products of plan.precision=O1 or O2" in problem
    assert problems(Plan.parse(f"precision=O2 products={products}")) == []
    desk = Machine(name="a desk", device="cpu", source="measured", peak_flops={"fp32": 1e11, "bf16": 1e11})
    (problem,) = problems(Plan.parse(f"precision=O2 products={products}"), machine=desk)
    assert (
        "measure it with penstock probe" if "int8" in products else "needs a GPU with fp8 units"
    ) in problem
    measured = replace(desk, peak_flops={**desk.peak_flops, "int8": 2e11})
    assert bool(problems(Plan.parse(f"precision=O2 products={products}"), machine=measured)) == (
        "fp8" in products
    )


def test_recorded_passes_are_for_training_on_one_gpu() -> None:
    for line, model, machine, words in (
        ("dp=2", "vit-s16", "h100", "plan.dp=2 does not"), ("padding=remove", "bert-base", "h100", "remove does not"),
        ("", "mixtral-8x7b", "h100", "are counted outside of it"), ("", "vit-s16", "cpu", "is no GPU; use compile"),
    ):  # fmt: skip
        found = problems(Plan.parse(f"compile=graphs {line}"), PRESETS[model], _machine(machine), run=True)
        assert any(words in problem for problem in found), found
    assert not problems(Plan.parse("compile=graphs"), PRESETS["gpt2"], load_machine("h100"), run=True)
    assert "records training; use compile=whole" in inference_problems(Plan.parse("compile=graphs"))[0]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("", "or gather=level"), ("dp=2 sharding=zero2", "sharding=zero2 dp=2; use"),
        ("sharding=fsdp", "sharding=fsdp dp=1; use"), ("dp=2 sharding=fsdp tp=2", "be trained with plan.tp=2 yet"),
        ("dp=2 sharding=fsdp recompute=full compile=blocks", ""), ("dp=4 sharding=hsdp shard=2", ""),
        ("cp=2 sharding=fsdp", ""),
    ],
)  # fmt: skip
def test_weights_are_gathered_in_fp8_where_they_are_sharded(more: str, words: str) -> None:
    plan = Plan.parse(f"precision=O2 products=fp8_tensorwise gather=products {more}")
    said = problems(plan, PRESETS["gpt2"], load_machine("h100"), run=True)
    assert len(said) == bool(words)
    assert words in "".join(said)


def test_learned_clips_stand_on_fp32_weights() -> None:
    for level in ("O0", "O1"):
        assert problems(Plan.parse(f"precision={level} products=int8_pact")) == []
    for line in ("precision=O2", "precision=O1 dtype=fp16", "precision=O3"):
        (problem,) = problems(Plan.parse(f"{line} products=int8_pact"))
        assert "rounds the weights that will be deployed" in problem


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        require(
            Plan.parse("products=fp8_tensorwise sp=true attention=cudnn"), PRESETS["gpt2"],
            load_machine("v100"),
        )  # fmt: skip
    assert len(caught.value.problems) == 5


INFERENCE: dict[str, tuple[str, str | None, dict[str, Any], str]] = {
    "tokens_are_made_one_at_a_time": ("cp=2", None, {}, "plan.cp=2 splits the tokens of a text"),
    "a_compiled_step_is_on_one_device": (
        "pp=2 compile=whole",
        None,
        {},
        "the ranks of plan.pp=2 exchange results",
    ),
    "rounding_sees_whole_weights": (
        "tp=2",
        None,
        {"weights": "int8"},
        "weights=int8 rounds a whole row of weights together",
    ),
    "a_shortlist_takes_whole_rows": ("tp=2", None, {"shortlist": True}, "plan.tp=2 splits over ranks"),
    "heads_split_over_tensor_parallel": ("tp=5", "gpt2", {}, "12 attention heads"),
    "every_stack_is_cut_into_stages": ("pp=13", "gpt2", {}, "a stack of the model has 12"),
    "experts_are_split_over_ranks": ("dp=2 ep=3", None, {}, "use an ep of"),
    "hosts_answer_at_any_time": ("dp=2 pp=2 ep=2", None, {}, "could wait for ever"),
    "every_rank_hosts_experts": ("dp=16 ep=16", "mixtral-8x7b", {}, "the model has 8; use at most that"),
}


def test_experts_in_few_bits_have_one_host() -> None:
    plan = Plan.parse("dp=2 ep=2")
    said = inference_problems(plan, PRESETS["mixtral-8x7b"], weights="int4")
    assert any("weights=int4 would have to round experts before" in problem for problem in said)
    assert not inference_problems(plan, PRESETS["mixtral-8x7b"], weights="auto")


@pytest.mark.parametrize("rule", INFER_RULES, ids=lambda rule: rule.name)
def test_a_broken_rule_of_inference_says_why(rule: Any) -> None:
    line, model, more, words = INFERENCE[rule.name]
    config = None if model is None else PRESETS[model]
    found = inference_problems(Plan.parse(line), config, **more)
    assert any(words in problem for problem in found), found
    bare = inference_problems(Plan.parse(line), config, prefix="", **more)
    assert bare == [problem.replace("plan.", "") for problem in found]
    assert not inference_problems(Plan.parse("dp=2"), PRESETS["gpt2"], **more)
