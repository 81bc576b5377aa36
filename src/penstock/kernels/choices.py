"""Which form an operator takes on a device, for types and lengths: asked by kernels, planner and ladder alike.

Nothing here needs torch. Devices have torch's names, such as `cuda`; types have those of `penstock.config.formats`.
"""

from __future__ import annotations

from penstock.config.formats import BYTES, Dtype
from penstock.config.plan import AttentionBackend

AUTO_PLAIN_TOKENS = 512
"""Longest sequence for which `attention=auto` is the plain form on a CPU that multiplies bf16, where it beats torch's
fused kernel forward and backward together: 4.1 against 13.8 ms with matrix units and 3.3 against 8.6 with vectors of
512 bits, at 197 tokens and 8 and 2 samples of 6 heads."""
CAUSAL_BLOCK = 128
"""Queries of a block of the plain form of causal attention, from twice as many tokens on. A block looks at no later
keys, so that nearly half is left out: on a CPU at 8 samples of 12 heads and 512 tokens 181 against 299 ms in bf16, and
340 against 532 in fp32, forward and backward."""
WINDOW_BLOCK = 64
"""Least tokens of a block of sliding windows: smaller products run slower than they save."""
WIDEST_HEAD, HEAD_MULTIPLE = 256, 16
"""Most features of a head in `native` attention, and the number that must divide them."""
UNPADDED_MEAN: dict[float, int] = {2: 64, 4: 32, 8: 32}
"""Tokens of a sample on average, by the bytes of an element, from which on attention without padding goes from sample
to sample on a CPU. In shorter ones so many small calls are slower than one with padding: for 32 samples of 8 to 64
tokens and 12 heads plain attention takes 22 against 39 ms in fp32, forward and backward, but 28 against 25 in bf16; of
16 to 384 tokens 185 against 796 and 92 against 295 (`benchmarks/padding.py`)."""
LOSS_BUDGET = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Bytes that the logits of `loss=chunked`, and what is made of them, take at one time. Each chunk reads all weights of
the output and adds to their gradients, so that a quicker device needs more rows in one."""
LOGIT_BYTES: dict[float, int] = {2: 10, 4: 8, 8: 16}
"""Most bytes that one of these logits takes, by the bytes of an element: itself, its log-probability, and, of a half
one, its cast to fp32. Where a kernel makes the gradient in its place it takes its own bytes only."""
LOSS_PIECE = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Logits of whose loss the gradient is made at one time, with `loss=whole`. What a CPU makes of them stays in its
caches; a GPU needs more of them to be busy, and makes 64 MiB of fp32."""
PADDED_TO = {"cuda": 64}
"""Multiple to which rows of logits are padded on a kind of device, unless 8 divides them: units for matrices read 16
bytes at a time, and cuBLAS multiplies rows that do not begin at such a place several times slower. Inductor pads
products of compiled code by itself."""
NATIVE: tuple[Dtype, ...] = ("fp32", "bf16")
"""Types of the kernels in C++."""


def auto_attention(
    backend: AttentionBackend, device: str, dtype: Dtype, queries: int, *, avx512: bool
) -> AttentionBackend:
    """The backend that `auto` means for samples with this number of queries; any other is returned as it is.

    On a CPU with AVX-512 the plain form wins for short sequences in bf16; elsewhere torch's own choice is taken.
    Without it batched products in bf16 run at about 1 GFLOP/s, and SDPA, whose kernel works in fp32 inside, is 20 times
    faster.
    """
    if backend != "auto":
        return backend
    short = device == "cpu" and dtype == "bf16" and avx512 and queries <= AUTO_PLAIN_TOKENS
    return "plain" if short else "sdpa"


def attention_kernel(
    backend: AttentionBackend, device: str, dtype: Dtype, queries: int, *, avx512: bool, dropout: bool = False,
    learned_bias: bool = False, shared: bool = False, capped: bool = False, sinks: bool = False, masked: bool = False,
) -> AttentionBackend:  # fmt: skip
    """The kernel that computes attention: what `auto` means, and on a CPU what `sdpa` does. torch's fused kernel there
    has neither dropout of weights nor gradients of biases (`learned_bias`). torch would compose several operators, with
    its own dropout and half types in fp32; the plain form is quicker with dropout, where products are. Samples that
    several devices have are `shared`: `auto` puts their parts together from torch's kernel, at whatever length. Every
    kernel gives way to the plain form where scores are `capped`. With `sinks` it is torch's kernel that reports sums of
    exponentials (`penstock.kernels.sinks`), or the plain form: with dropout, and on a GPU in fp32, where attention is
    `masked`, or of heads that are no multiple of 8 wide."""
    if capped:
        return "plain"
    backend = "sdpa" if shared and backend == "auto" else backend
    backend = auto_attention(backend, device, dtype, queries, avx512=avx512)
    if sinks:
        fused = not dropout and (device == "cpu" or (BYTES[dtype] == 2 and not masked))
        return "flash" if fused and backend != "plain" else "plain"
    if device != "cpu" or backend in ("plain", "math", "native"):
        return backend
    if dropout and (BYTES[dtype] >= 4 or (dtype == "bf16" and avx512)):
        return "plain"
    if backend == "sdpa":
        return "math" if dropout or learned_bias else "flash"
    return backend


def holds_scores(kernel: AttentionBackend) -> bool:
    """Whether a kernel of attention makes all scores and keeps them for the backward pass; the others never do."""
    return kernel in ("plain", "math")


def knows_lengths(
    backend: AttentionBackend, device: str, dtype: Dtype, *, dropout: bool = False, biased: bool = False
) -> bool:
    """Whether attention goes through a kernel of variable lengths, which has neither dropout nor biases of scores."""
    half = device == "cuda" and BYTES[dtype] == 2
    return backend == "flash" and half and not (dropout or biased)


def native_obstacle(device: str, dtype: Dtype, width: int, *, bf16_pairs: bool) -> str | None:
    """The first property that `native` attention of heads with `width` features cannot take, in words, or None."""
    if device != "cpu" or not bf16_pairs:
        return "devices other than x86 CPUs with AVX512-BF16"
    if dtype != "bf16":
        return f"{dtype}, only for bf16: plan.precision O1, O2 or O3 with dtype=bf16"
    if width % HEAD_MULTIPLE or width > WIDEST_HEAD:
        return f"heads of {width} features, only for multiples of {HEAD_MULTIPLE} up to {WIDEST_HEAD}"
    return None


def window_blocks(window: int, tokens: int, *, causal: bool) -> tuple[int, int, int] | None:
    """How attention within a window is cut: tokens of a block, and keys before and after it that it looks at. None
    where all blocks would compute no less than all tokens together."""
    before, after = (window - 1, 0) if causal else (window // 2, window // 2)
    block = max(before, after, WINDOW_BLOCK)
    return None if before + block + after > tokens // 2 else (block, before, after)


def cuts_causal(device: str, queries: int, keys: int, *, causal: bool) -> bool:
    """Whether the plain form computes blocks of `CAUSAL_BLOCK` queries, none of which looks at later keys."""
    return device != "cuda" and causal and queries == keys and queries >= 2 * CAUSAL_BLOCK


def least_mean_unpadded(device: str, dtype_bytes: float, *, varlen: bool) -> float:
    """Tokens of a sample on average from which on attention computes no padding: always where the kernel knows lengths
    (`varlen`), never on other devices than a CPU."""
    if varlen:
        return 0.0
    return UNPADDED_MEAN[dtype_bytes] if device == "cpu" else float("inf")


def loss_budget(device: str) -> int:
    """Bytes that chunks of logits may take on a device."""
    return LOSS_BUDGET["cuda" if device == "cuda" else "cpu"]


def padded_entries(device: str, entries: int) -> int:
    """Entries of a vocabulary that its products are computed with."""
    return entries if entries % 8 == 0 else -(-entries // PADDED_TO.get(device, 1)) * PADDED_TO.get(device, 1)


def fuses_rows(device: str, dtype: Dtype, *, taught: bool = False) -> bool:
    """Whether a kernel makes the loss of rows of logits, and their gradient in their place; `taught`, beside a
    teacher's, on a GPU only."""
    return dtype != "fp64" if device == "cuda" else device == "cpu" and dtype in NATIVE and not taught


def logit_bytes(each: int, *, fused: bool) -> int:
    """Bytes that a logit of `each` bytes takes while its loss is made; `fused`, only its gradient is, in its place."""
    return each if fused else LOGIT_BYTES[each]


def rows_in_chunk(budget: int, columns: int, each: int, *, fused: bool) -> int:
    """Most rows of a chunk of the loss, whose logits have `each` bytes."""
    return max(1, budget // (logit_bytes(each, fused=fused) * columns))


def loss_piece(device: str) -> int:
    """Logits of whose loss the gradient is made at one time, where they are all in memory."""
    return LOSS_PIECE["cuda" if device == "cuda" else "cpu"]
