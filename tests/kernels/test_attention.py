"""Every form of attention against the plain reference, and that against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.config.plan import WITH_SINKS, AttentionBackend
from penstock.errors import ConfigError
from penstock.kernels.attention import Scores, attention, plain_attention, split_heads, token_attention
from penstock.kernels.choices import attention_kernel

ON_CPU: tuple[AttentionBackend, ...] = ("plain", "sdpa", "flash", "math", "auto")


def _qkv(dtype: torch.dtype = torch.float64, *, tokens: int = 7) -> list[Tensor]:
    return [torch.randn(2, 3, tokens, 8, dtype=dtype, requires_grad=True) for _ in range(3)]


def test_the_reference_is_the_definition() -> None:
    q, k, v = _qkv()
    out = plain_attention(q, k, v)
    for b in range(2):
        for h in range(3):
            for i in range(7):
                weights = torch.stack([(q[b, h, i] @ k[b, h, j] / 8**0.5).exp() for j in range(7)])
                torch.testing.assert_close(out[b, h, i], weights @ v[b, h] / weights.sum())
    assert torch.autograd.gradcheck(plain_attention, (q, k, v))


@pytest.mark.parametrize("backend", [*ON_CPU, "native"])
@pytest.mark.parametrize("masked", [False, True])
def test_capped_scores_are_the_definition_whatever_the_backend(
    backend: AttentionBackend, masked: bool
) -> None:
    q, k, v = _qkv(tokens=280 if masked else 7)  # long enough for blocks
    tokens = q.shape[2]
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    scores = (2.0 * torch.tanh(q @ k.transpose(2, 3) * 0.7 / 2.0)).masked_fill(later & masked, -torch.inf)
    expected, gradient = scores.softmax(-1) @ v, torch.randn_like(v)
    out = attention(q, k, v, backend, Scores(causal=masked, scale=0.7, cap=2.0))
    torch.testing.assert_close(out, expected)
    inputs = [q, k, v]
    for one, other in zip(
        torch.autograd.grad(out, inputs, gradient), torch.autograd.grad(expected, inputs, gradient)
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", ON_CPU)
def test_the_packed_form_in_both_orders(backend: AttentionBackend) -> None:
    batch, tokens, heads, width = 2, 7, 3, 8
    packed = torch.randn(batch, tokens, 3 * heads * width, dtype=torch.float64, requires_grad=True)
    q, k, v = (t.transpose(1, 2) for t in split_heads(packed, width))
    # Row (head, kind, feature), as documented.
    assert torch.equal(k[0, 2], packed[0, :, 2 * 3 * width + width : 2 * 3 * width + 2 * width])
    expected = plain_attention(q, k, v).transpose(1, 2).flatten(2)
    gradient = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad(expected, packed, gradient)

    first = token_attention(*split_heads(packed, width), backend, sequence_first=False)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(torch.autograd.grad(first, packed, gradient)[0], wanted)

    turned = packed.detach().transpose(0, 1).contiguous().requires_grad_()
    second = token_attention(*split_heads(turned, width), backend, sequence_first=True)
    torch.testing.assert_close(second, expected.transpose(0, 1))
    (got,) = torch.autograd.grad(second, turned, gradient.transpose(0, 1))
    torch.testing.assert_close(got, wanted.transpose(0, 1))


@pytest.mark.parametrize("backend", ["sdpa", "flash"])
def test_sequence_first_writes_its_output_in_place(backend: AttentionBackend) -> None:
    """The fused kernel's own output is what is returned: no copy puts its heads in order."""
    packed = torch.randn(7, 2, 3 * 24)
    q, k, v = (t.flatten(1, 2).transpose(0, 1).unsqueeze(0) for t in split_heads(packed, 24))
    out = attention(q, k, v, backend)
    assert out.squeeze(0).transpose(0, 1).is_contiguous()


def test_autocast_keeps_the_scores_narrow() -> None:
    q, k, v = _qkv(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert plain_attention(q, k, v).dtype == torch.bfloat16


def test_auto_is_plain_only_where_that_is_faster() -> None:
    assert attention_kernel("auto", "cpu", "bf16", 197, avx512=True) == "plain"
    assert attention_kernel("auto", "cpu", "bf16", 4096, avx512=True) == "flash"
    assert attention_kernel("auto", "cpu", "fp32", 197, avx512=True) == "flash"
    assert attention_kernel("auto", "cuda", "bf16", 197, avx512=True) == "sdpa"
    assert attention_kernel("auto", "cpu", "bf16", 197, avx512=False) == "flash"
    assert attention_kernel("auto", "cpu", "bf16", 197, avx512=True, shared=True) == "flash"


def test_sinks_are_one_more_term_of_each_head() -> None:
    q, k, v = _qkv()
    sinks = torch.randn(3, 1, dtype=torch.float64, requires_grad=True)

    def defined(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, hidden: Tensor) -> Tensor:
        scores = (q @ k.transpose(2, 3) / 8**0.5).exp() * ~hidden
        return scores @ v / (scores.sum(-1) + sinks.exp())[..., None]

    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    gradient = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    for hidden, scores in (
        (later, Scores(causal=True)), (later & False, Scores()), (later.T, Scores(mask=~later.T[None, None])),
    ):  # fmt: skip
        given = (q, k, v, sinks)
        expected = defined(*given, hidden)
        wanted = torch.autograd.grad(expected, given, gradient)
        for backend in WITH_SINKS:
            out = attention(q, k, v, backend, scores._replace(sinks=sinks))
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(torch.autograd.grad(out, given, gradient), wanted)
            turned = (x.permute(2, 0, 1, 3) for x in (q, k, v))
            first = token_attention(
                *turned, backend, sequence_first=True, scores=scores._replace(sinks=sinks)
            )
            torch.testing.assert_close(first, expected.permute(2, 0, 1, 3).flatten(2))
    with pytest.raises(ConfigError, match="'math' has no kernel of attention sinks; use auto, sdpa, plain"):
        attention(q, k, v, "math", Scores(sinks=sinks))
    kernels = {
        attention_kernel("sdpa", "cuda", dtype, 9, avx512=True, sinks=True, masked=masked)
        for dtype, masked in (("fp32", False), ("bf16", True))
    }  # fmt: skip
    assert kernels == {"plain"}
    assert attention_kernel("auto", "cuda", "bf16", 9, avx512=True, sinks=True) == "flash"


def test_a_backend_without_kernel_is_said() -> None:
    q, k, v = _qkv(torch.float32)
    with pytest.raises(ConfigError, match=r"'cudnn' has no kernel for torch.float32 on cpu with 8 features"):
        attention(q, k, v, "cudnn")
    with pytest.raises(ConfigError, match="no attention backend 'fast'"):
        attention(q, k, v, "fast")  # type: ignore[arg-type]
