"""The form of each operator for a device, dtypes and lengths; kernels, planner and ladder share these rules.

Nothing here needs torch. Devices have torch's names, such as `cuda`; dtypes are named as in `penstock.config.formats`.
"""

from __future__ import annotations

from penstock.config.formats import BYTES, Dtype
from penstock.config.plan import AttentionBackend

AUTO_PLAIN_TOKENS = 512
"""Longest sequence for which `attention=auto` is the plain form on a CPU that multiplies bf16. It beats torch's fused
kernel over forward and backward together: 4.1 against 13.8 ms with matrix units (8 samples) and 3.3 against 8.6 ms with
512-bit vectors (2 samples), at 197 tokens and 6 heads."""
CAUSAL_BLOCK = 128
"""Queries per block in the plain form of causal attention, used from twice this number of tokens. A block reads no
later keys, which saves nearly half of the work: on a CPU, with 8 samples of 12 heads and 512 tokens, 181 against 299 ms
in bf16, and 340 against 532 in fp32, forward and backward."""
WINDOW_BLOCK = 64
"""Least tokens per block of a sliding window: smaller matrix products lose more time than they save."""
WIDEST_HEAD, HEAD_MULTIPLE = 256, 16
"""Most features per head in `native` attention, and the number that they must be a multiple of."""
UNPADDED_MEAN: dict[float, int] = {2: 64, 4: 32, 8: 32}
"""Average tokens per sample, by the bytes of an element, from which attention on a CPU runs sample by sample without
padding. For shorter samples the many small calls are slower than one call with padding: with 32 samples of 8 to 64
tokens and 12 heads, plain attention takes 22 against 39 ms in fp32, forward and backward, but 28 against 25 in bf16;
with 16 to 384 tokens, 185 against 796 and 92 against 295 (`benchmarks/padding.py`)."""
LOSS_BUDGET = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Bytes for the logits of one chunk of `loss=chunked` and the tensors computed from them. Each chunk reads all weights
of the output layer and adds to their gradients, so that a faster device needs more rows per chunk."""
LOGIT_BYTES: dict[float, int] = {2: 10, 4: 8, 8: 16}
"""Most bytes per logit, by the bytes of an element: the logit itself, its log-probability and, in half precision, its
cast to fp32. If a kernel writes the gradient in place, a logit needs its own bytes only."""
LOSS_PIECE = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Number of logits per piece when `loss=whole` computes the gradient. On a CPU the intermediate results stay in its
caches; a GPU needs larger pieces to be busy, with 64 MiB of fp32."""
PADDED_TO = {"cuda": 64}
"""Multiple to which rows of logits are padded on a device type, unless their length is a multiple of 8: matrix units
read 16 bytes at a time, and cuBLAS is several times slower on rows that are not aligned to that. In compiled code
Inductor pads matrix products itself."""
NATIVE: tuple[Dtype, ...] = ("fp32", "bf16")
"""Dtypes of the C++ kernels."""


def auto_attention(
    backend: AttentionBackend, device: str, dtype: Dtype, queries: int, *, avx512: bool
) -> AttentionBackend:
    """The backend that `auto` means for samples with this number of queries; any other backend is returned unchanged.

    On a CPU with AVX-512 the plain form wins for short sequences in bf16; otherwise torch chooses. Without AVX-512,
    batched matrix products in bf16 run at about 1 GFLOP/s, and SDPA, whose kernel works in fp32 inside, is 20 times
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
    """The kernel that computes attention: resolves `auto`, and on a CPU `sdpa`. torch's fused CPU kernel supports
    neither dropout of attention weights nor gradients of biases (`learned_bias`). In their place torch composes several
    operators, with its own dropout and with half types in fp32; with dropout, the plain form is faster wherever matrix
    products in that dtype are fast. `shared` means that several devices hold parts of a sample: `auto` then combines
    results of torch's kernel, at any length. If scores are `capped`, the plain form is used. With `sinks` it is torch's
    kernel that returns sums of exponentials (`penstock.kernels.sinks`), or the plain form: with dropout, and on a GPU
    in fp32, or if attention is `masked` or the head width is not a multiple of 8."""
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
    """Whether an attention kernel materialises all scores and keeps them for the backward pass; the others never do."""
    return kernel in ("plain", "math")


def knows_lengths(
    backend: AttentionBackend, device: str, dtype: Dtype, *, dropout: bool = False, biased: bool = False
) -> bool:
    """Whether attention uses a variable-length kernel, which supports neither dropout nor biases of scores."""
    half = device == "cuda" and BYTES[dtype] == 2
    return backend == "flash" and half and not (dropout or biased)


def native_obstacle(device: str, dtype: Dtype, width: int, *, bf16_pairs: bool) -> str | None:
    """The first property that `native` attention does not support for heads of `width` features, in words, or None."""
    if device != "cpu" or not bf16_pairs:
        return "devices other than x86 CPUs with AVX512-BF16"
    if dtype != "bf16":
        return f"{dtype}, only for bf16: plan.precision O1, O2 or O3 with dtype=bf16"
    if width % HEAD_MULTIPLE or width > WIDEST_HEAD:
        return f"heads of {width} features, only for multiples of {HEAD_MULTIPLE} up to {WIDEST_HEAD}"
    return None


def window_blocks(window: int, tokens: int, *, causal: bool) -> tuple[int, int, int] | None:
    """How sliding-window attention is split into blocks: tokens per block, and the keys before and after it that it
    attends to. None if blocks would compute no less than full attention."""
    before, after = (window - 1, 0) if causal else (window // 2, window // 2)
    block = max(before, after, WINDOW_BLOCK)
    return None if before + block + after > tokens // 2 else (block, before, after)


def cuts_causal(device: str, queries: int, keys: int, *, causal: bool) -> bool:
    """Whether the plain form computes blocks of `CAUSAL_BLOCK` queries, without reading keys after a block."""
    return device != "cuda" and causal and queries == keys and queries >= 2 * CAUSAL_BLOCK


def least_mean_unpadded(device: str, dtype_bytes: float, *, varlen: bool) -> float:
    """Average tokens per sample from which attention skips padding: 0 if the kernel supports variable lengths
    (`varlen`); otherwise infinite on any device but a CPU."""
    if varlen:
        return 0.0
    return UNPADDED_MEAN[dtype_bytes] if device == "cpu" else float("inf")


def loss_budget(device: str) -> int:
    """Bytes that chunks of logits may take on a device."""
    return LOSS_BUDGET["cuda" if device == "cuda" else "cpu"]


def padded_entries(device: str, entries: int) -> int:
    """The size of a vocabulary after padding for its matrix products."""
    return entries if entries % 8 == 0 else -(-entries // PADDED_TO.get(device, 1)) * PADDED_TO.get(device, 1)


def fuses_rows(device: str, dtype: Dtype, *, taught: bool = False) -> bool:
    """Whether a kernel computes the loss of rows of logits and writes the gradient in place. With a teacher's logits
    (`taught`) such a kernel exists on a GPU only."""
    return dtype != "fp64" if device == "cuda" else device == "cpu" and dtype in NATIVE and not taught


def logit_bytes(each: int, *, fused: bool) -> int:
    """Bytes per logit of `each` bytes during the loss; if `fused`, just its own, which the gradient overwrites."""
    return each if fused else LOGIT_BYTES[each]


def rows_in_chunk(budget: int, columns: int, each: int, *, fused: bool) -> int:
    """Most rows per chunk of the loss, with logits of `each` bytes."""
    return max(1, budget // (logit_bytes(each, fused=fused) * columns))


def loss_piece(device: str) -> int:
    """Number of logits whose gradient is computed at one time, when all logits are in memory."""
    return LOSS_PIECE["cuda" if device == "cuda" else "cpu"]
