"""The planner lists attention in the form that the kernels take: each run by its own length, type and device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.cpus import pretend
from penstock.config.model import ModelConfig, Seq2SeqConfig, preset, with_stacks
from penstock.config.plan import Plan
from penstock.models.inputs import RunInputs
from penstock.models.stack import TokenStack
from penstock.planner.describe import describe

FORMS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: "fused",
    torch.ops.aten._softmax: "plain",
    torch.ops.aten._safe_softmax: "math",
}
"""The form of attention by the operator that it alone has."""


class _Attention(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, the form of each attention is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.forms: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in FORMS:
            self.forms.append(FORMS[func.overloadpacket])
        return func(*args, **(kwargs or {}))


def _computed(model: ModelConfig, plan: Plan, number: int, dtype: torch.dtype) -> list[str]:
    """Forms of attention in the blocks of a run, as they are computed."""
    run, graph = model.graph.runs[number], model.graph
    stack = TokenStack(run, width=run.stack.width, memory=run.stack.width).to(dtype)
    for block in stack.blocks:
        for module in block.modules():
            if hasattr(module, "backend"):
                module.backend = plan.attention  # type: ignore[assignment]
    memory = sum(graph.length(graph.run(name)) for name in run.memories)
    inputs = {"memory": torch.randn(1, memory, run.stack.width, dtype=dtype)} if memory else {}
    if run.modulated:
        inputs["condition"] = torch.randn(1, run.stack.width, dtype=dtype)
    with _Attention() as seen:
        stack(torch.randn(1, graph.length(run), run.stack.width, dtype=dtype), RunInputs(**inputs))
    return seen.forms


def _listed(model: ModelConfig, plan: Plan, number: int, avx512: bool) -> list[str]:
    """The same as the planner lists them: torch computes in fp32."""
    parts = describe(model, plan, "cpu", avx512=avx512).blocks
    (part,) = (part for part in parts if part.block is not None and part.block.run == number)
    forms = []
    for op in part.forward:
        if op.kind == "attention":
            forms.append("fused")
        elif op.kind == "softmax":
            forms.append("plain" if op.written == op.elements * 2 else "math")
    return forms


def _tiny(name: str, **changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {"width": 32, "depth": 1, "heads": 2, "mlp_width": 32, "head_features": 16}
    sizes["experts_in"] = "mlp"
    made = with_stacks(preset(name), lambda stack: replace(stack, **sizes, dropout=0.0, **changes))
    return replace(made, vocabulary=32)


def _marian(**changes: Any) -> ModelConfig:
    config: Any = _tiny("marian-base", **changes)
    assert isinstance(config, Seq2SeqConfig)
    return replace(config, sequence=1024, decoder_sequence=128)


@pytest.mark.parametrize(
    ("model", "line", "kind", "forms"),
    [
        (_tiny("ernie-vilg2-24b", experts=0), "attention=auto", "avx512", [["plain"], ["fused", "fused"]]),
        (_marian(), "attention=auto", "avx512", [["fused"], ["plain", "plain"]]),
        (_marian(), "attention=auto", "avx2", [["fused"], ["fused", "fused"]]),
        # Blocks of a window are as short as it is.
        (_marian(window=64), "attention=auto", "avx512", [["plain"], ["plain", "plain"]]),
        (_marian(attention_dropout=0.1), "attention=sdpa", "avx512", [["plain"], ["plain", "plain"]]),
        (_marian(attention_dropout=0.1), "attention=flash", "avx512", [["plain"], ["plain", "plain"]]),
        (_marian(attention_dropout=0.1), "attention=sdpa", "avx2", [["math"], ["math", "math"]]),
        # Learned biases are those of attention to a run's own tokens alone.
        (_marian(positions="relative"), "attention=sdpa", "avx2", [["math"], ["math", "fused"]]),
    ],
)  # fmt: skip
def test_the_planner_lists_what_kernels_compute(
    model: ModelConfig, line: str, kind: str, forms: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, kind)
    plan = Plan.parse(f"{line} precision=O3 dtype=bf16")
    for number, expected in enumerate(forms):
        assert _computed(model, plan, number, torch.bfloat16) == expected
        assert _listed(model, plan, number, avx512=kind != "avx2") == expected
