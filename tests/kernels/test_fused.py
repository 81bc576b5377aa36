"""Fused operators against torch's own, forward and backward, and against fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from helpers.native_kernels import changed_terms_are_seen, needs_compiler
from helpers.operators import OPERATORS, PLAIN, assert_close_to_exact, gradients, hold, strided
from penstock.cpu import this_cpu
from penstock.errors import ConfigError
from penstock.kernels import bias_activation as activations
from penstock.kernels import native
from penstock.kernels import residual_norm as norms
from penstock.kernels.bias_activation import (
    _SigmoidForm,
    activate,
    bias_activation,
    gelu_tanh,
    gelu_tanh_in_inference,
)
from penstock.kernels.dropout import dropout
from penstock.kernels.residual_norm import add_norm, residual_norm

FORMS = pytest.mark.parametrize("form", [pytest.param("native", marks=needs_compiler), "python"])


@needs_compiler
@pytest.mark.parametrize("kernels", get_args(native.Kernels))
def test_every_source_compiles_where_there_is_a_compiler(kernels: native.Kernels) -> None:
    """Else tests of kernels that are not there would be left out, and nobody would know."""
    if kernels in ("attention", "grouped", "integers") and this_cpu().isa != "AVX512":
        pytest.skip("it is made of AVX-512 instructions")
    assert native.library(kernels) is not None


def _use(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "python":
        for module in (norms, activations):
            monkeypatch.setattr(module, "library", lambda: None)
    else:
        assert native.library() is not None


@FORMS
def test_residual_norm_of_two_types_and_of_one_output(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast the stream is fp32 and the branch bf16; after a post-norm nobody reads the sum."""
    _use(form, monkeypatch)
    norm = nn.LayerNorm(48)
    x, branch = torch.randn(4, 9, 48, requires_grad=True), torch.randn(4, 9, 48).bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        s, normed = residual_norm(x, branch, norm, for_products=True)
    assert (s.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
    upstream = torch.randn(4, 9, 48)
    normed.backward(upstream.bfloat16())
    assert x.grad is not None
    assert branch.grad is not None
    assert (x.grad.dtype, branch.grad.dtype) == (torch.float32, torch.bfloat16)
    ours = [x.grad, branch.grad.float(), norm.weight.grad, norm.bias.grad]
    x2, branch2 = (one.detach().float().requires_grad_() for one in (x, branch))
    norm.zero_grad()
    expected = norm(x2 + branch2)
    torch.testing.assert_close(s, (x2 + branch2).detach())
    torch.testing.assert_close(normed, expected.detach().bfloat16())
    expected.backward(upstream.bfloat16().float())
    torch.testing.assert_close(ours[0], x2.grad)
    torch.testing.assert_close(ours[1].bfloat16(), branch2.grad.bfloat16())
    torch.testing.assert_close(ours[2:], [norm.weight.grad, norm.bias.grad])


@FORMS
def test_dropout_inside_draws_what_dropout_draws(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(form, monkeypatch)
    _hold_dropout()


def _hold_dropout() -> None:
    norm = nn.RMSNorm(64, eps=1e-6)
    inputs = [torch.randn(8, 16, 64), torch.randn(8, 16, 64)]

    def plain(x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)
        s = x + dropout(branch, 0.3)
        return s, norm(s)

    def ours(x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)
        return residual_norm(x, branch, norm, dropout=0.3)

    mine, theirs = gradients(ours, inputs), gradients(plain, inputs)
    torch.testing.assert_close(mine, theirs)
    assert 0.25 < float((mine[3] == 0).float().mean()) < 0.35


MUTANTS = (
    ("- shift - unit * slope", "- unit * slope"), ("- shift - unit * slope", "- shift"),
    ("by_bias[i] += given;", "by_bias[i] = given;"), ("d[i] += wide(more[i])", "d[i] -= wide(more[i])"),
    ("(v[i] - mean) * (v[i] - mean)", "v[i] * v[i]"), ("/ n + eps)", "/ n + 2 * eps)"),
    ("bell * 0.398942280f", "bell * 0.3989f"), ("tail = tail * t + 0.593852520f", "tail = tail * t + 0.593f"),
    ("0.214064449f", "0.0713548162f"), ("1.702f", "1.7f"), ("sums[n + i] += into_up", "sums[i] += into_up"),
    ("wide(up[i]) + bias[n + i]", "wide(up[i])"),
    ("static_cast<T*>(second_out) + row * stride", "static_cast<T*>(second_out) + row * n"),
    ("wide(b[i]) * scale : 0.0f", "wide(b[i]) : 0.0f"), ("here[i] ? d[i] * scale : 0.0f", "d[i] * scale"),
)  # fmt: skip
"""Changes of one term of the kernels, each of which `_hold` sees."""


def _hold() -> None:
    for kernel, shapes in {"add_norm": ((5, 33), (40, 9)), "bias_activation": ((9, 34),)}.items():
        for row in OPERATORS[kernel]:
            hold(row, torch.float32, shapes)
    _hold_dropout()


test_a_changed_term_is_seen = changed_terms_are_seen("fused", MUTANTS, [norms, activations], _hold)


def test_the_sigmoid_form_of_gelu_has_its_gradient() -> None:
    x = torch.linspace(-6, 6, 31).double().requires_grad_()
    assert torch.autograd.gradcheck(_SigmoidForm.apply, (x,))


def _gelu(x: Tensor) -> Tensor:
    return nn.functional.gelu(x, approximate="tanh")


def test_a_compiled_graph_has_no_tanh_and_eager_code_and_exports_torchs_own() -> None:
    graphs = []

    def keep(graph: Any, _: list[Tensor]) -> Any:
        graphs.append(graph.code)
        return graph

    x = torch.randn(3, 4)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(gelu_tanh, backend=keep)(x), _gelu(x))
    assert "exp" in graphs[0]
    assert "tanh" not in graphs[0].replace("gelu_tanh", "")
    assert torch.equal(gelu_tanh(x), _gelu(x))

    class Activation(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return gelu_tanh(x)

    assert "aten.gelu" in str(torch.export.export(Activation(), (x,)).graph)


@needs_compiler
def test_activations_at_extremes_are_those_of_torch() -> None:
    ends = torch.tensor(
        [0.0, -0.0, 1e-30, -1e-30, 5.0, -5.0, 12.0, -12.0, 90.0, -90.0, 3e4, -3e4, float("nan")]
    )
    for kind in PLAIN:

        def ours(x: Tensor, kind: Any = kind) -> Tensor:
            return bias_activation(x, None, kind)

        def plain(x: Tensor, kind: str = kind) -> Tensor:
            return activations.apply_activation(x, kind)

        mine, theirs = (gradients(each, [ends], [torch.ones(13)]) for each in (ours, plain))
        torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensors of one shape"):
        residual_norm(torch.zeros(2, 8), torch.zeros(1, 8), nn.LayerNorm(8))
    with pytest.raises(ConfigError, match="one bias per feature"):
        bias_activation(torch.zeros(2, 8), torch.zeros(4), "gelu")
    with pytest.raises(ConfigError, match="only without bias and gate"):
        bias_activation(torch.zeros(2, 8), torch.zeros(8), "gelu", second=torch.zeros(2, 8))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference_computes_gelu_by_the_kernel(dtype: torch.dtype) -> None:
    """As exactly as torch, and only where nobody can differentiate."""
    torch.manual_seed(0)
    for x in (3 * torch.randn(5, 2, 70).to(dtype), strided(torch.randn(4, 34).to(dtype))):
        theirs, exact = activate(x, "gelu_tanh"), activate(x.double(), "gelu_tanh")
        with torch.no_grad():
            assert gelu_tanh_in_inference(x) is None
            assert torch.equal(activate(x, "gelu_tanh"), theirs)
        with torch.inference_mode():
            ours = gelu_tanh_in_inference(x)
            assert ours is not None
            assert torch.equal(activate(x, "gelu_tanh"), ours)
            assert gelu_tanh_in_inference(x.double()) is None
            assert torch.equal(gelu_tanh_in_inference(x[:1]), ours[:1])
        assert_close_to_exact(ours, theirs, exact, least=torch.finfo(dtype).eps / 4)


@needs_compiler
def test_threads_share_the_rows() -> None:
    """Sums over rows are those of one thread, up to their order."""
    inputs, results = [torch.randn(1024, 64), torch.randn(64)], []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(
            gradients(lambda x, bias: bias_activation(x, bias, "gelu"), inputs)
            + gradients(lambda x, bias: add_norm(x, x, bias, None, 1e-5)[1], inputs)
        )
    # Sums of 1,024 rows, of some tens: 5e-5 apart.
    torch.testing.assert_close(*results, rtol=1e-5, atol=2e-4)


@needs_compiler
def test_the_library_is_compiled_once_and_a_broken_compiler_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_FLAGS", tuple(flag for flag in native._FLAGS if flag != "-O3"))  # quicker
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "empty"))
    first = native._built("fused")
    stamp = first.stat().st_mtime_ns
    assert native._built("fused") == first
    assert first.stat().st_mtime_ns == stamp
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho it is broken >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    assert native.library.__wrapped__() is None
    assert "it is broken" in caplog.text
    assert "Python form" in caplog.text
    assert not list((tmp_path / "cache").rglob("*.so"))
