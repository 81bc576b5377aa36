"""Dropout from 16 bits an element, by the kernel and without it, beside torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL, c_int64, c_uint32, c_uint64
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.native_kernels import assert_changes_are_seen, needs_compiler
from penstock.kernels import dropout as module_of_dropout
from penstock.kernels.dropout import Dropout, dropout, mask_of
from penstock.kernels.native import address

COUNT = 1 << 20
BLOCK = 512
"""Elements that the kernel makes at a time."""
WORD = 0xFFFF_FFFF


def philox(key: int, counter: int) -> list[int]:
    """Four words of 32 bits by Philox-4x32 with 10 rounds (Salmon et al., SC 2011), of a counter of 128 bits."""
    a, b, c, d = (counter >> shift & WORD for shift in (0, 32, 64, 96))
    low, high = key & WORD, key >> 32
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second >> 32 ^ b ^ low, second & WORD, first >> 32 ^ d ^ high, first & WORD
        low, high = low + 0x9E3779B9 & WORD, high + 0xBB67AE85 & WORD
    return [a, b, c, d]


def bits_of(key: int, count: int) -> list[int]:
    """The 16 bits of each element, as `native/dropout.cpp` places them."""
    bits: list[int] = []
    for first in range(0, -(-count // BLOCK) * 64, 64):
        words = [philox(key, first + lane) for lane in range(64)]
        bits += [lane[word] >> shift & 0xFFFF for word in range(4) for lane in words for shift in (0, 16)]
    return bits[:count]


def masked_by(kernels: CDLL, key: int, count: int, least: int, threads: int) -> Tensor:
    """The mask by the kernel, with a byte behind it that must stay."""
    kept = torch.full((count + 1,), 7, dtype=torch.uint8)
    kernels.penstock_kept(address(kept), c_int64(count), c_uint64(key), c_uint32(least), threads)
    assert kept[-1] == 7
    return kept[:-1]


def assert_masks() -> None:
    kernels = module_of_dropout.library("dropout")
    assert kernels is not None
    for key in (0, 0x0123_4567_89AB_CDEF, (1 << 64) - 1):
        bits = torch.tensor(bits_of(key, 3 * BLOCK - 5))
        for count in (0, 1, BLOCK, len(bits)):
            for least in (1, 6554, int(bits[17]), 65535):
                for threads in (1, 3):
                    kept = masked_by(kernels, key, count, least, threads)
                    assert torch.equal(kept, (bits[:count] >= least).to(torch.uint8))


@contextmanager
def without_compiler() -> Iterator[None]:
    """Draw as where no kernel can be compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_of_dropout, "library", lambda name: None)
        yield


@pytest.fixture(params=[pytest.param("kernel", marks=needs_compiler), "no compiler"])
def drawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both forms, one after the other."""
    if request.param == "kernel":
        yield
        return
    with without_compiler():
        yield


def test_the_reference_is_philox() -> None:
    """Answers that the authors of Random123 publish with it (kat_vectors)."""
    assert philox(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox((1 << 64) - 1, (1 << 128) - 1) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@needs_compiler
def test_the_kernel_draws_the_bits_of_philox_whatever_the_threads() -> None:
    assert_masks()


@needs_compiler
def test_the_number_of_threads_changes_no_mask() -> None:
    masks, before = [], torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(7)
        masks.append(mask_of(torch.ones(COUNT), 0.1)[0])
    torch.set_num_threads(before)
    assert torch.equal(*masks)


@needs_compiler
def test_changes_of_the_kernel_are_seen(tmp_path: Path) -> None:
    changes = [
        ("ROUNDS = 10", "ROUNDS = 9"), ("0xD2511F53u", "0xD2511F51u"), ("0xBB67AE85u", "0xBB67AE84u"),
        ("low += FIRST_STEP", "low += SECOND_STEP"), ("^ words[3][lane] ^ high", "^ words[3][lane] ^ low"),
        ("u64(block) * LANES", "u64(block) * ELEMENTS"), ("bits[i] >= least", "bits[i] > least"),
        ("std::min<i64>(ELEMENTS,", "std::min<i64>(ELEMENTS - 1,"),
    ]  # fmt: skip
    assert_changes_are_seen("dropout", changes, [module_of_dropout], assert_masks, tmp_path)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.3, 0.5, 0.9])
def test_as_many_are_left_out_as_torch_leaves_out(drawn: None, p: float) -> None:
    torch.manual_seed(0)
    ours, theirs = ((drop(torch.ones(COUNT), p) == 0).sum().item() for drop in (dropout, F.dropout))
    # Six standard deviations of a binomial count; 2^-17 is what rounding p changes at most.
    spread = 6 * (COUNT * p * (1 - p)) ** 0.5
    assert abs(ours - COUNT * p) < spread + COUNT * 2.0**-17
    assert abs(ours - theirs) < 1.5 * spread + COUNT * 2.0**-17


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0,), (), (5,), (3, 7, 11), (2, 64, 64)])
def test_what_is_kept_is_scaled_forward_and_backward(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = (1 + torch.rand(shape)).to(dtype).requires_grad_()
    out = dropout(x, 0.25)
    assert (out.dtype, out.shape) == (dtype, x.shape)
    kept = out.detach() != 0
    # 0.25 is a multiple of 2^-16, so that the scale is exactly 4 / 3, as torch's.
    torch.testing.assert_close(out, torch.where(kept, x * (4 / 3), 0.0))
    gradient = torch.rand(shape).to(dtype)
    out.backward(gradient)
    torch.testing.assert_close(x.grad, torch.where(kept, gradient * (4 / 3), 0.0))


def test_the_mean_stays_whatever_p_is_rounded_to(drawn: None) -> None:
    torch.manual_seed(2)
    for p in (1e-4, 0.1, 0.33333):
        kept = 1 - round(p * 65536) / 65536
        out = dropout(torch.ones(COUNT), p)
        assert out.max().item() == pytest.approx(1 / kept, rel=1e-6)


def test_neighbours_and_calls_are_independent(drawn: None) -> None:
    """Elements whose bits came from one draw, and two calls, agree as often as chance has it."""
    torch.manual_seed(3)
    first, second = ((dropout(torch.ones(COUNT), 0.5) == 0) for _ in range(2))
    spread = 6 * 0.5 / COUNT**0.5
    for distance in (1, 2, 3, 4, 5, 64, 128, 512):
        same = (first[distance:] == first[:-distance]).double().mean().item()
        assert abs(same - 0.5) < spread, distance
    assert abs((first == second).double().mean().item() - 0.5) < spread


def test_a_seed_tells_what_is_kept(drawn: None) -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(4)
        found.append(dropout(torch.ones(100), 0.5))
    assert torch.equal(*found)
    before = torch.get_rng_state()
    own = [dropout(torch.ones(100), 0.5, generator=torch.Generator().manual_seed(4)) for _ in range(2)]
    assert torch.equal(*own)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (1.0, True), (0.5, False), (1e-9, True)])
def test_where_nothing_is_drawn_it_is_torchs(p: float, training: bool) -> None:
    x = torch.rand(9)
    assert torch.equal(dropout(x, p, training), F.dropout(x, p, training) if p != 1e-9 else x)
    module = Dropout(p).train(training)
    assert isinstance(module, nn.Dropout)
    assert torch.equal(module(x), dropout(x, p, training))


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="probability"):
        dropout(torch.ones(3), 1.5)


def test_a_byte_is_kept_of_each_number() -> None:
    kept: list[Tensor] = []
    x = torch.rand(64, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        dropout(x, 0.1)
    assert sum(t.untyped_storage().nbytes() for t in kept) == x.numel()


def test_compiled_code_draws_it_as_one_operation() -> None:
    graphs = []

    def kept(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    module = torch.compile(Dropout(0.5), backend=kept, fullgraph=True)
    torch.manual_seed(5)
    found = module(torch.ones(1000))
    torch.manual_seed(5)
    assert torch.equal(found, Dropout(0.5)(torch.ones(1000)))
    assert sum("kept" in name for name in graphs[0]) == 1
    assert not torch.equal(module(torch.ones(1000)), found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor imports torch.jit
def test_inductor_draws_the_same_numbers() -> None:
    module = torch.compile(nn.Sequential(nn.Linear(16, 16), Dropout(0.5), nn.ReLU()), fullgraph=True)
    x = torch.randn(8, 16)

    def run(model: nn.Module) -> tuple[Tensor, Tensor]:
        torch.manual_seed(6)
        given = x.clone().requires_grad_()
        out = model(given)
        out.sum().backward()
        assert given.grad is not None
        return out.detach(), given.grad

    torch.testing.assert_close(run(module), run(module._orig_mod))
