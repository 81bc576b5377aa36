"""Counts against real modules of other libraries, and against the arithmetic that everybody quotes."""

from __future__ import annotations

import pytest
import torch

from penstock.config.model import PRESETS, ModelConfig
from penstock.config.plan import Plan
from penstock.planner.describe import describe, totals

transformers = pytest.importorskip("transformers")


def block_flops(model: ModelConfig) -> float:
    """Forward FLOPs of all blocks for one sample."""
    work = describe(model, Plan(micro_batch=1))
    return sum(part.count * sum(op.flops for op in part.forward) for part in work.blocks)


def hugging_face(name: str) -> torch.nn.Module:
    """The published model that a preset describes, without memory."""
    config = PRESETS[name]
    with torch.device("meta"):
        if name == "gpt2":
            return transformers.GPT2LMHeadModel(transformers.GPT2Config())
        if name == "bert-base":
            return transformers.BertForMaskedLM(transformers.BertConfig())
        if name == "llama3-8b":
            return transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    vocab_size=config.vocabulary, hidden_size=config.width, intermediate_size=config.mlp_width,
                    num_hidden_layers=config.depth, num_attention_heads=config.heads,
                    num_key_value_heads=config.kv_heads,
                )
            )  # fmt: skip
        if name == "mixtral-8x7b":
            return transformers.MixtralForCausalLM(transformers.MixtralConfig())
        if name == "bloom-176b":
            return transformers.BloomForCausalLM(
                transformers.BloomConfig(
                    hidden_size=config.width, n_layer=config.depth, n_head=config.heads, vocab_size=config.vocabulary
                )
            )  # fmt: skip
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=config.encoder.width, d_kv=config.encoder.layers[0].head_width, d_ff=config.encoder.mlp_width,
                num_layers=config.encoder.depth, num_heads=config.encoder.heads, vocab_size=config.vocabulary,
            )
        )  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "llama3-8b", "mixtral-8x7b", "bloom-176b", "t5-small"])
def test_parameters_are_those_of_real_modules(name: str) -> None:
    model = hugging_face(name)
    assert totals(PRESETS[name]).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # llm-foundry, scripts/train/benchmarking/README.md, at 2,048 tokens.
        ("mpt-125m", 125311488), ("mpt-350m", 355985408), ("mpt-760m", 760470528), ("mpt-1b", 1315950592),
        ("mpt-3b", 2651837440), ("mpt-7b", 6658859008), ("mpt-13b", 12853954560), ("mpt-30b", 29975214080),
        ("mpt-70b", 64862437376),
    ],
)  # fmt: skip
def test_parameters_are_the_published_ones(name: str, parameters: int) -> None:
    assert totals(PRESETS[name]).parameters == parameters


def test_narayanan_s_formula_of_flops() -> None:
    """F = 96 B s l h² (1 + s/6h + V/16lh), recomputation included (Narayanan et al. 2021, equation 3)."""
    for name in ("gpt-1.7b", "gpt-22b", "gpt-175b", "gpt-530b", "gpt-1t"):
        model, shape = PRESETS[name], totals(PRESETS[name])
        s, layers, h, v = model.sequence, model.depth, model.width, model.vocabulary
        formula = 96 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
        blocks = block_flops(model)
        assert shape.model_flops + blocks == pytest.approx(formula, rel=1e-12)


def test_korthikanti_s_formula_of_model_flops() -> None:
    """72 B L s h² (1 + s/6h + v/12hL) (Korthikanti et al. 2022, equation 7), and Table 5's figures from it."""
    for name, batch, flops in (
        ("gpt-22b", 4, 1.1436e15),
        ("gpt-175b", 64, 1.4109e17),
        ("gpt-1t", 512, 6.4259e18),
    ):
        model, shape = PRESETS[name], totals(PRESETS[name])
        s, layers, h, v = model.sequence, model.depth, model.width, model.vocabulary
        formula = 72 * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
        assert shape.model_flops == pytest.approx(formula, rel=1e-12)
        assert batch * shape.model_flops == pytest.approx(flops, rel=1e-4)


def test_gpt_3_needs_2_79_terabytes() -> None:
    parameters = totals(PRESETS["gpt-175b"]).parameters
    assert 16 * parameters == pytest.approx(2.79e12, rel=0.002)
    assert 16 * parameters / 80e9 == pytest.approx(34.9, abs=0.1)  # so 35 devices hold nothing else


def test_gpt_3_s_iteration_and_training_in_flops() -> None:
    shape = totals(PRESETS["gpt-175b"])
    model = 1536 * shape.model_flops
    blocks = block_flops(PRESETS["gpt-175b"])
    recomputed = model + 1536 * blocks
    assert recomputed == pytest.approx(4.51e18, rel=0.001)
    assert model == pytest.approx(3.39e18, rel=0.002)
    steps = 300e9 / (1536 * 2048)
    assert steps * recomputed == pytest.approx(430e21, rel=0.001)
    assert steps * recomputed / 312e12 / 86400 == pytest.approx(16_000, rel=0.01)
