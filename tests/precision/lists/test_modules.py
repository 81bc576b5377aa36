"""Modules on the op lists, and torch's own that `keep` spares a copy in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion

import penstock
from helpers.op_lists import Model, accelerated
from penstock.errors import ConfigError
from penstock.precision.lists import OpLists, apply_modules, default_lists, modules, region, restore_modules


class TestModules:
    def types(self, model: nn.Module, lists: OpLists) -> dict[str, tuple[torch.dtype, torch.dtype]]:
        """Input and output type of each module in an accelerated pass."""
        seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        handles = []
        for name, module in model.named_modules():

            def note(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
                seen[name] = (args[0].dtype, output.dtype)

            handles.append(module.register_forward_hook(note))
        with accelerated(lists):
            model(torch.randn(3, 8))
        for handle in handles:
            handle.remove()
        return seen

    def test_by_name_pattern_and_class(self) -> None:
        model = Model()
        names = list(model.state_dict())
        plain = self.types(model, default_lists(torch.bfloat16, "cpu"))
        assert plain["head"][1] == plain["blocks.0.linear"][1] == torch.bfloat16
        lists = default_lists(torch.bfloat16, "cpu").with_(
            fp32_modules=("head", "blocks.1.*"), half_modules=(nn.LayerNorm,)
        )
        with pytest.raises(ConfigError, match="one place"):
            lists.with_(half_modules=("head",))
        apply_modules(model, lists)
        found = self.types(model, lists)
        assert found["head"][1] == found["blocks.1.linear"][1] == torch.float32
        assert found["blocks.0.linear"][1] == torch.bfloat16
        assert list(model.state_dict()) == names
        assert type(model.head).__name__ == "Linear"
        assert isinstance(model.head, nn.Linear)
        restore_modules(model)
        assert type(model.head) is nn.Linear
        assert self.types(model, default_lists(torch.bfloat16, "cpu")) == plain

    def test_half_modules_get_half_inputs(self) -> None:
        model = nn.Sequential(nn.LayerNorm(8), nn.GELU())
        lists = OpLists(half_modules=("1",))
        apply_modules(model, lists)
        with accelerated(lists):
            assert model(torch.randn(2, 8)).dtype == torch.bfloat16
        assert model(torch.randn(2, 8)).dtype == torch.float32, "outside, it is as it was"

    def test_an_fp32_module_is_fp32_throughout(self) -> None:
        model = Model()
        lists = OpLists(fp32_modules=("blocks.0",), half_modules=("blocks.0.linear",))
        apply_modules(model, lists)
        assert self.types(model, lists)["blocks.0.linear"][1] == torch.float32

    @pytest.mark.parametrize("choice", ["haed", nn.Conv2d])
    def test_what_fits_no_module_is_refused(self, choice: Any) -> None:
        with pytest.raises(ConfigError, match=r"Did you mean 'head'|no module"):
            apply_modules(Model(), OpLists(fp32_modules=(choice,)))

    def test_a_replaced_forward_is_refused(self) -> None:
        model = Model()
        model.head.forward = lambda x: x  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="replaced on the instance"):
            apply_modules(model, OpLists(fp32_modules=("head",)))

    def test_compiles(self) -> None:
        model = Model()
        lists = OpLists(fp32_modules=("head",))
        apply_modules(model, lists)

        def forward(x: Tensor) -> Tensor:
            with accelerated(lists):
                return model(x)

        x = torch.randn(3, 8)
        found = torch.compile(forward, fullgraph=True, backend="aot_eager")(x)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, forward(x))


class TestRecurrent:
    @pytest.mark.parametrize("precision", ["O1", "O2"])
    @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
    @pytest.mark.parametrize("packed", [False, True])
    def test_an_lstm_trains_on_any_cpu(self, packed: bool, dtype: str, precision: str) -> None:
        layer = nn.LSTM(4, 4, num_layers=2, bidirectional=True)
        x = torch.randn(5, 3, 4)
        expected = layer(x)[0]
        given: Any = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 5, 5])) if packed else x
        model, optimizer = penstock.accelerate(
            Outer(layer), torch.optim.AdamW(layer.parameters()), precision=precision, dtype=dtype
        )
        for step in range(2):
            optimizer.zero_grad()
            found = model(given)[0]
            found = found.data.view(5, 3, 8) if packed else found
            assert found.dtype == torch.float32
            if step == 0:
                torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
            with penstock.scale_loss(found.square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        assert torch.compile(model, backend="eager")(x)[0].dtype == torch.float32

    def test_the_cpu_is_asked_only_for_an_lstm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[torch.dtype] = []
        monkeypatch.setattr(modules, "cpu_runs_lstm", lambda dtype: bool(asked.append(dtype)))
        lists = default_lists(torch.bfloat16, "cpu")
        plain, listed, recurrent = Model(), nn.Sequential(nn.LSTM(4, 4)), nn.Sequential(nn.LSTM(4, 4))
        apply_modules(plain, lists)
        apply_modules(listed, lists.with_(fp32=["torch.lstm"]))
        assert asked == []
        apply_modules(recurrent, lists)
        assert set(asked) == {torch.float16, torch.bfloat16}
        restore_modules(recurrent)
        monkeypatch.setattr(modules, "cpu_runs_lstm", lambda dtype: True)
        apply_modules(recurrent, lists)
        assert type(recurrent[0]) is nn.LSTM


class Outer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(x)


class TestKept:
    @pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
    def test_norms_and_softmax_stay_half_on_cuda(self) -> None:
        """Seen with fake tensors: what a GPU would do, without one."""
        lists = default_lists(torch.bfloat16, "cuda")
        with FakeTensorMode(), torch.no_grad():
            model = nn.Sequential(
                nn.LayerNorm(8, device="cuda"),
                nn.RMSNorm(8, device="cuda"),
                nn.GroupNorm(2, 8, device="cuda"),
                nn.Softmax(-1),
            )
            x = torch.randn(3, 8, device="cuda", dtype=torch.bfloat16)
            found = {}
            for treated in (False, True):
                apply_modules(model, lists if treated else None)
                torch.set_autocast_enabled("cuda", True)
                torch.set_autocast_dtype("cuda", torch.bfloat16)
                found[treated] = [module(x).dtype for module in model]
                assert model[0](x.float()).dtype == torch.float32, "an fp32 stream stays fp32"
                torch.set_autocast_enabled("cuda", False)
        by_autocast = [torch.float32] * 4
        if torch.__version__ < TorchVersion("2.12"):  # which left RMS norms as they are
            by_autocast[1] = torch.bfloat16
        assert found == {False: by_autocast, True: [torch.bfloat16] * 4}
        assert model[0].weight.dtype == torch.float32

    def test_on_a_cpu_they_are_left_alone(self) -> None:
        model = nn.Sequential(nn.LayerNorm(8))
        apply_modules(model, default_lists(torch.bfloat16, "cpu"))
        assert type(model[0]) is nn.LayerNorm

    @pytest.mark.gpu
    def test_keeping_pays(self) -> None:
        """A norm over half activations, forward and backward: no copies in fp32, so less memory and less time."""
        lists = default_lists(torch.bfloat16, "cuda")
        norm = nn.Sequential(nn.LayerNorm(4096)).cuda()
        x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        found = {}
        for treated in (False, True, False, True):
            apply_modules(norm, lists if treated else None)
            for _ in range(3):  # the last is measured
                torch.cuda.reset_peak_memory_stats()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                with torch.autocast("cuda", dtype=torch.bfloat16), region(lists, "cuda", torch.bfloat16):
                    y = norm(x)
                # What the next product is given; half, whoever makes it so.
                y.to(torch.bfloat16).backward(torch.ones_like(x))
                end.record()
                torch.cuda.synchronize()
                found[treated] = (start.elapsed_time(end), torch.cuda.max_memory_allocated(), y.detach())
                x.grad = norm[0].weight.grad = norm[0].bias.grad = None
        (slow, much, wide), (fast, little, narrow) = found[False], found[True]
        assert narrow.dtype == torch.bfloat16
        torch.testing.assert_close(narrow, wide.bfloat16())
        assert fast < 0.8 * slow
        assert little < 0.8 * much
