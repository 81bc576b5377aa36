"""Op lists as data, and what they cast: the half and fp32 lists, promotion, bans, and the cache of weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import _get_current_function_mode_stack
from torch.torch_version import TorchVersion

import penstock
from helpers.op_lists import GELU_FP32, accelerated, autocast_on
from helpers.watched import Watched
from penstock.errors import ConfigError
from penstock.precision.lists import OpLists, autocast_policy, default_lists, differences, region
from penstock.precision.lists.op_lists import functions_of, intercepted, name_of, register, registered

HALVES = [torch.float16, torch.bfloat16]


class TestData:
    def test_one_name_stands_for_every_function_of_an_operation(self) -> None:
        assert name_of(torch.softmax) == name_of(F.softmax) == name_of("torch.Tensor.softmax")
        assert name_of(torch.Tensor.__matmul__) == name_of("torch.matmul") == "torch.matmul"
        assert {torch.matmul, torch.Tensor.matmul, torch.Tensor.__rmatmul__} <= functions_of("torch.matmul")
        assert name_of(torch.ops.aten.exp) == "torch.ops.aten.exp"

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ("torch.sofmax", "Did you mean 'torch.nn.functional.softmax'|Did you mean 'torch.softmax'"),
            ("softmax", "Did you mean torch.Tensor.softmax or torch.nn.functional.softmax"),
            ("numpy.exp", r"f\(x\.float\(\)\) inside"),
            (copy.copy, r"copy is no operation of torch.*f\(x\.float\(\)\) inside"),
        ],
    )
    def test_an_unknown_operation_is_refused_with_a_remedy(self, wrong: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            OpLists().with_(half=[wrong])

    def test_decorators_that_are_gone_say_what_to_write(self) -> None:
        with pytest.raises(ImportError, match=r"fp32_function was removed; .*f\(x\.float\(\)\) inside"):
            from penstock.precision.lists import fp32_function  # type: ignore[attr-defined]  # noqa: F401

    def test_adding_moves_an_operation_from_the_list_it_was_in(self) -> None:
        lists = default_lists(torch.float16).with_(half=[F.softmax], banned={"torch.cdist": "use mine"})
        assert "torch.nn.functional.softmax" in lists.half
        assert "torch.nn.functional.softmax" not in lists.fp32
        assert dict(lists.banned)["torch.cdist"] == "use mine"
        assert "torch.cdist" not in lists.without(torch.cdist).policies()
        assert default_lists(torch.float16).policies()["torch.nn.functional.softmax"] == "fp32", "unchanged"

    def test_an_operation_has_one_place(self) -> None:
        with pytest.raises(ConfigError, match="in the lists half and fp32"):
            OpLists().with_(half=["torch.exp"], fp32=[torch.Tensor.exp])
        with pytest.raises(ConfigError, match="a module has one place"):
            OpLists(half_modules=("head",), fp32_modules=("head",))

    def test_lists_are_values(self) -> None:
        lists = default_lists(torch.bfloat16).with_(fp32=["torch.exp"], fp32_modules=(nn.Linear,))
        with accelerated(lists):
            pass
        assert copy.deepcopy(lists) is lists
        assert pickle.loads(pickle.dumps(lists)) == lists
        assert hash(lists) == hash(pickle.loads(pickle.dumps(lists)))

    def test_there_are_none_for_fp32(self) -> None:
        with pytest.raises(ConfigError, match=r"none for torch\.float32"):
            default_lists(torch.float32)

    def test_what_autocast_does_itself_is_no_difference(self) -> None:
        assert autocast_policy(torch.exp, "cuda") == "fp32"
        assert autocast_policy(torch.exp, "cpu") is None
        lists = OpLists(fp32=("torch.exp",), half=("torch.matmul",))
        assert differences(lists, "cuda") == {}
        assert differences(lists, "cpu") == {"torch.exp": "fp32"}

    @pytest.mark.parametrize(
        ("dtype", "device"), [(torch.bfloat16, "cpu"), (torch.bfloat16, "cuda"), (torch.float16, "cuda")]
    )
    def test_the_defaults_watch_no_calls(self, dtype: torch.dtype, device: str) -> None:
        lists = default_lists(dtype, device)
        if device == "cuda" and dtype == torch.float16 and torch.__version__ < TorchVersion("2.12"):
            assert {name for _, name in intercepted(lists, device).values()} == {
                "torch.nn.functional.rms_norm"
            }
            return
        assert intercepted(lists, device) == {}
        with region(lists, device, dtype):
            assert _get_current_function_mode_stack() == []

    def test_fp16_on_a_cpu_is_made_as_careful_as_on_cuda(self) -> None:
        """It serves to study numerics only, so the cost of watching does not matter there."""
        cpu, cuda = (default_lists(torch.float16, device) for device in ("cpu", "cuda"))
        assert set(cpu.fp32) == set(cuda.fp32)
        x = torch.full((4,), 12.0, dtype=torch.float16)
        with torch.autocast("cpu", dtype=torch.float16):
            assert x.exp().isinf().all()
            with region(cpu, "cpu", torch.float16):
                assert x.exp().isfinite().all()


class TestCasts:
    @pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
    def test_recurrent_cells_run_in_the_half_type_once_listed(self, cell: Any) -> None:
        """A CPU's cells are half products with an fp32 state added, whose sum is fp32 unless the cell is listed."""
        cells = ("torch.lstm_cell", "torch.gru_cell", "torch.rnn_tanh_cell")
        with accelerated(default_lists(torch.bfloat16, "cpu").with_(half=cells)):
            found = cell(4, 4)(torch.ones(2, 4))
            assert (found[0] if cell is nn.LSTMCell else found).dtype == torch.bfloat16

    def test_a_whole_recurrent_layer_can_be_kept_in_fp32(self) -> None:
        """Which a CPU without bf16 units needs: its kernel refuses the half type that autocast casts to."""
        layer = nn.LSTM(4, 4)
        with accelerated(default_lists(torch.bfloat16, "cpu").with_(fp32=["torch.lstm"])):
            y, _ = layer(torch.ones(2, 1, 4, dtype=torch.bfloat16))
        assert y.dtype == torch.float32
        y.sum().backward()
        assert layer.weight_ih_l0.grad is not None

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", HALVES)
    def test_a_whole_recurrent_layer_runs_in_the_half_type(self, dtype: torch.dtype) -> None:
        """cuDNN's layers are cast to fp16 by torch's autocast whatever its type is."""
        layer = nn.LSTM(4, 4).cuda()
        with accelerated(default_lists(dtype), dtype, "cuda"):
            assert layer(torch.ones(2, 1, 4, device="cuda"))[0].dtype == torch.float16

    @pytest.mark.parametrize("name", default_lists(torch.float16).fp32)
    def test_the_fp32_list_gives_fp32(self, name: str) -> None:
        from helpers.op_samples import Make, call

        with accelerated(default_lists(torch.float16, "cpu"), torch.float16):
            assert call(name, Make("cpu", torch.float16)).dtype == torch.float32

    @pytest.mark.parametrize(
        "call",
        [torch.exp, Tensor.exp, lambda x: x**2, lambda x: 2**x, lambda x: x.pow(2), lambda x: x.softmax(-1)],
    )
    def test_however_it_is_called(self, call: Callable[[Tensor], Tensor]) -> None:
        x = torch.ones(4, 4, dtype=torch.bfloat16)
        with accelerated(default_lists(torch.bfloat16, "cpu")):
            assert call(x).dtype == torch.bfloat16
        with accelerated(OpLists(fp32=("torch.exp", "torch.pow", "torch.softmax"))):
            assert call(x).dtype == torch.float32

    def test_a_listed_function_casts_both_ways(self) -> None:
        lists = OpLists().with_(half=[F.gelu], fp32=[torch.bmm, "torch.ops.aten.sigmoid"])
        with accelerated(lists):
            assert F.gelu(torch.ones(4)).dtype == torch.bfloat16
            assert torch.bmm(*[torch.ones(1, 4, 4, dtype=torch.bfloat16)] * 2).dtype == torch.float32
            assert torch.ops.aten.sigmoid(torch.ones(4, dtype=torch.bfloat16)).dtype == torch.float32
            assert torch.ops.aten.sigmoid.default(torch.ones(4, dtype=torch.bfloat16)).dtype == torch.bfloat16

    def test_gradients_flow_through_the_casts(self) -> None:
        x = torch.full((4,), 0.3, requires_grad=True)
        with accelerated(OpLists(half=("torch.exp",))):
            x.exp().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == torch.float32
        torch.testing.assert_close(x.grad, x.detach().exp(), rtol=2.0**-7, atol=0.0)

    def test_the_callers_own_type_and_fp64_stay(self) -> None:
        with accelerated(OpLists(half=("torch.exp",), fp32=("torch.softmax",))):
            assert torch.ones(4, dtype=torch.float64).exp().dtype == torch.float64
            assert torch.ones(4).softmax(-1, dtype=torch.bfloat16).dtype == torch.bfloat16
        fine = torch.tensor([1.0 + 2.0**-10])
        with accelerated(OpLists(half=("torch.sum",))):
            assert fine.sum() == 1.0
            assert fine.sum(dtype=torch.float32) == fine
            assert torch.ones(4, dtype=torch.int64).sum().dtype == torch.int64

    def test_where_autocast_is_off_nothing_is_cast(self) -> None:
        with accelerated(OpLists(half=("torch.exp",))), torch.autocast("cpu", enabled=False):
            assert torch.ones(4).exp().dtype == torch.float32

    def test_only_tensors_of_the_device_are_cast(self) -> None:
        with FakeTensorMode(), accelerated(OpLists(half=("torch.exp",))):
            assert torch.ones(4).exp().dtype == torch.bfloat16
            assert torch.ones(4, device="cuda").exp().dtype == torch.float32

    @pytest.mark.parametrize("dtype", HALVES)
    def test_a_banned_function_says_what_to_use(self, dtype: torch.dtype) -> None:
        lists = default_lists(dtype, "cpu").with_(banned=dict(default_lists(torch.float16).banned))
        probabilities = torch.full((4,), 0.5)
        with accelerated(lists, dtype):
            with pytest.raises(ConfigError, match="BCEWithLogitsLoss"):
                nn.BCELoss()(probabilities.to(dtype), probabilities)
            F.binary_cross_entropy(probabilities, probabilities)
            F.binary_cross_entropy_with_logits(probabilities.to(dtype), probabilities)
        F.binary_cross_entropy(probabilities, probabilities)


WIDEST: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.maximum, torch.atan2, lambda a, b: torch.cat([a, b]), lambda a, b: torch.stack((a, b)),
    lambda a, b: torch.where(torch.ones(4, dtype=torch.bool), a, b),
]  # fmt: skip


class TestPromotion:
    @pytest.mark.parametrize("dtype", HALVES)
    @pytest.mark.parametrize("call", WIDEST)
    def test_mixed_types_give_the_wider(self, call: Callable[..., Tensor], dtype: torch.dtype) -> None:
        lists = default_lists(dtype, "cpu").with_(promote=["torch.atan2", "torch.maximum"])
        half, single = torch.ones(4, dtype=dtype), torch.ones(4)
        with accelerated(lists, dtype):
            assert call(half, half).dtype == dtype
            assert call(half, single).dtype == torch.float32
            assert call(single, half).dtype == torch.float32

    def test_two_half_types_give_fp32(self) -> None:
        with accelerated(OpLists(promote=("torch.dot",))):
            mixed = torch.dot(torch.ones(4, dtype=torch.float16), torch.ones(4, dtype=torch.bfloat16))
        assert mixed.dtype == torch.float32

    def test_what_takes_one_type_only_takes_mixed_ones(self) -> None:
        half, single = torch.ones(4, dtype=torch.bfloat16), torch.ones(2, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError):
            F.layer_norm(single, (4,), half)
        with accelerated(OpLists(promote=("torch.nn.functional.layer_norm",))):
            assert F.layer_norm(single, (4,), half).dtype == torch.float32

    @pytest.mark.parametrize("dtype", HALVES)
    @pytest.mark.parametrize("name", sorted(registered()))
    def test_a_cpu_takes_mixed_arguments_unwatched(self, name: str, dtype: torch.dtype) -> None:
        from helpers.op_samples import Make, call

        lists = default_lists(dtype, "cpu")
        policy = registered()[name]
        widest = torch.float32 if policy == "promote" else dtype
        alone = {torch.float32: widest, dtype: dtype}
        assert lists.policies()[name] == policy
        assert all(called != name for _, called in intercepted(lists, "cpu").values())
        with accelerated(lists, dtype):
            for dtypes in ((dtype, torch.float32), (torch.float32, dtype)):
                assert call(name, Make("cpu", *dtypes)).dtype == widest
            for same, expected in alone.items():
                assert call(name, Make("cpu", same)).dtype == expected
            assert call(name, Make("cpu", torch.float64)).dtype == torch.float64

    @pytest.mark.slow
    def test_that_holds_for_layers_compiled_code_and_gradients(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bilinear = nn.Bilinear(8, 8, 8)
                self.weight = nn.Parameter(torch.randn(8))
                self.product = nn.Parameter(torch.randn(8, 8))

            def forward(self, x: Tensor) -> Tensor:
                y = self.bilinear(x, x) + torch.mv(x, self.weight)[:, None]
                return torch.tensordot(y, self.product, 1)

        x = torch.randn(4, 8)
        model = Net()
        expected = model(x)
        model = penstock.accelerate(model, torch.optim.SGD(model.parameters()), precision="O2", dtype="bf16")[
            0
        ]
        for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
            found = run(x)
            torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
            found.sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.dtype == torch.bfloat16

    @pytest.mark.parametrize("dtype", HALVES)
    def test_in_place_operations_keep_their_own_type(self, dtype: torch.dtype) -> None:
        lists = default_lists(dtype, "cpu").with_(promote=[torch.add, torch.mul], fp32=[torch.exp])
        with accelerated(lists, dtype):
            for mine, other in ((dtype, torch.float32), (torch.float32, dtype)):
                x = torch.ones(4, dtype=mine)
                x += torch.ones(4, dtype=other)
                x.mul_(torch.ones(4, dtype=other)).exp_()
                assert x.dtype == mine

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    @pytest.mark.parametrize(("mine", "other"), [(torch.float32, HALVES[1]), (HALVES[1], torch.float32)])
    def test_what_is_written_in_place_becomes_of_that_type(
        self, mine: torch.dtype, other: torch.dtype, device: str
    ) -> None:
        register()
        with FakeTensorMode(), autocast_on(device):
            x, y = (torch.ones(2, 3, dtype=dtype, device=device) for dtype in (mine, other))
            at, rows = (torch.zeros(size, dtype=torch.int64, device=device) for size in ((2, 3), (2,)))
            x.index_put_((rows,), y).index_add_(0, rows, y).index_copy_(0, rows, y).masked_scatter_(
                at == 0, y
            )
            x.scatter_(0, at, y).scatter_add_(0, at, y).scatter_reduce_(0, at, y, "sum").lerp_(y, 0.5)
            assert x.dtype == mine

    def test_values_written_in_place_are_cast(self) -> None:
        values = torch.full((2,), 1.0 + 2.0**-10, requires_grad=True)
        with accelerated(default_lists(torch.bfloat16, "cpu")):
            x = torch.zeros(4, dtype=torch.bfloat16)
            x[torch.tensor([1, 3])] = values
        assert x.tolist() == [0.0, 1.0, 0.0, 1.0]
        x.float().sum().backward()
        assert values.grad is not None
        assert values.grad.tolist() == [1.0, 1.0]


class TestCachedWeights:
    """Within one forward pass autocast casts a weight once; nothing of it may outlive the pass."""

    @pytest.mark.parametrize(
        "lists", [default_lists(torch.bfloat16, "cpu"), GELU_FP32], ids=["default", "own"]
    )
    def test_a_step_is_seen_by_the_next_pass(self, lists: OpLists) -> None:
        linear = nn.Linear(4, 4, bias=False)
        optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
        x = torch.eye(4)

        def forward() -> Tensor:
            with accelerated(lists):
                return linear(x) + linear(x)

        for _ in range(2):
            forward().float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(forward().float(), 2 * linear.weight.T.bfloat16().float())

    def test_a_pass_without_gradients_leaves_no_weight_behind(self) -> None:
        """A weight cached under no_grad knows no gradient: the next training pass must cast it anew."""
        linear = nn.Linear(4, 4)
        for _ in range(2):
            with torch.no_grad(), accelerated(GELU_FP32):
                linear(torch.ones(1, 4))
            with accelerated(GELU_FP32):
                linear(torch.ones(1, 4)).sum().backward()
            assert linear.weight.grad is not None
            linear.zero_grad()

    def test_a_weight_is_cast_once_per_pass(self) -> None:
        cast, casts = torch.ops.aten._to_copy.default, list[bool]()
        linear = nn.Linear(8, 8, bias=False)
        x = torch.randn(3, 8, dtype=torch.bfloat16)
        watched = Watched(lambda func, args, _: casts.append(func is cast and args[0].shape == (8, 8)))
        for passes in (1, 2):
            with watched, accelerated(GELU_FP32):
                linear(linear(x))
            assert sum(casts) == passes
