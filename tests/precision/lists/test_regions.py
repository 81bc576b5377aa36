"""Where op lists reach: compiled, checkpointed and nested forward passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from helpers.op_lists import GELU_FP32, Model, accelerated
from penstock.errors import ConfigError
from penstock.precision.lists import OpLists, apply_modules, region


def gradients(model: Model, x: Tensor, forward: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()  # reentrant checkpointing needs one
    with accelerated(GELU_FP32):
        y = (model if forward is None else forward)(x)
    y.float().square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class TestWhereItRuns:
    def reference(self) -> tuple[Model, Tensor, list[Tensor]]:
        torch.manual_seed(0)
        model, x = Model(), torch.randn(3, 8)
        expected = gradients(model, x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.zero_grad()
            model(x).float().square().sum().backward()
        plain = [p.grad for p in model.parameters()]
        assert any(not torch.equal(a, b) for a, b in zip(expected, plain)), "the lists matter here"
        return model, x, expected

    def like(self, model: Model, how: str) -> Model:
        other = Model(how)
        other.load_state_dict(model.state_dict())
        return other

    def test_compiled_whole(self) -> None:
        model, x, expected = self.reference()

        def forward(x: Tensor) -> Tensor:
            with accelerated(GELU_FP32):
                return model(x)

        compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
        apply_modules(model, GELU_FP32)
        for found, wanted in zip(gradients(model, x, compiled), expected):
            torch.testing.assert_close(found, wanted)

    def test_compiled_blocks(self) -> None:
        model, x, expected = self.reference()
        other = self.like(model, "plain")
        apply_modules(other, GELU_FP32)
        for block in other.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
        for found, wanted in zip(gradients(other, x), expected):
            torch.testing.assert_close(found, wanted)

    @pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
    @pytest.mark.parametrize("compiled", [False, True])
    def test_checkpointed(self, how: str, compiled: bool) -> None:
        model, x, expected = self.reference()
        other = self.like(model, how)
        apply_modules(other, GELU_FP32)
        if compiled:
            for block in other.blocks:
                block.compile(fullgraph=True, backend="aot_eager")
        for found, wanted in zip(gradients(other, x), expected):
            torch.testing.assert_close(found, wanted)

    def test_a_checkpoint_inside_compiled_code_breaks_the_graph_or_is_refused(self) -> None:
        model, x, expected = self.reference()
        other = self.like(model, "not reentrant")
        apply_modules(other, GELU_FP32)
        for found, wanted in zip(gradients(other, x, torch.compile(other, backend="aot_eager")), expected):
            torch.testing.assert_close(found, wanted)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="Compile the modules inside the checkpoint"):
            gradients(other, x, torch.compile(other, fullgraph=True, backend="aot_eager"))

    def test_nested_forwards(self) -> None:
        lists = OpLists(fp32=("torch.exp",))
        half = torch.ones(4, dtype=torch.bfloat16)
        with accelerated(lists):
            with accelerated(lists):
                assert half.exp().dtype == torch.float32
                assert len(_get_current_function_mode_stack()) == 1
            assert half.exp().dtype == torch.float32
        assert half.exp().dtype == torch.bfloat16
        with accelerated(lists), pytest.raises(ConfigError, match="only the outer"):
            region(OpLists(half=("torch.exp",)), "cpu", torch.bfloat16)

    def test_no_lists_are_no_region(self) -> None:
        with region(None, "cpu", torch.bfloat16):
            assert _get_current_function_mode_stack() == []
