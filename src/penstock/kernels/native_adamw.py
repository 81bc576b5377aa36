"""AdamW in C++ on CPUs, all tensors of a batch in one pass over memory.

The kernel and its formulas are in `native/adamw.cpp`. It is the form `native` of `penstock.kernels.remainder_adamw`,
whose other forms are the references.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_double, c_int, c_int64, c_void_p

from torch import Tensor
from torch.profiler import record_function

from penstock.kernels.native import TYPES, address, library, threads_for

Arrays = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]
"""Weight, remainder, gradient, both moments, bf16 copy and average of one tensor, all of one length, and the fp32 count
of its steps, with this one."""


def has_adamw() -> bool:
    """Whether the kernel is there. Compiles it where nobody has."""
    return library("adamw") is not None


def update(
    arrays: Sequence[Arrays],
    divisor: Tensor | None,
    stops: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    average_part: float,
) -> None:
    """One step on all tensors, in place. `divisor` is that of gradients; nothing changes where `stops` is not 0; both
    0-d fp32."""
    kernels = library("adamw")
    assert kernels is not None
    count = len(arrays)
    sizes = [one[0].numel() for one in arrays]
    # The kernel reads fp32 and bf16. The list keeps what is made here alive until it returns.
    given = [one[2] if one[2].dtype in TYPES else one[2].float() for one in arrays]
    addresses = [
        None if tensor is None else tensor.data_ptr()
        for one, gradient in zip(arrays, given)
        for tensor in (*one[:2], gradient, *one[3:])
    ]
    numbers = (lr, beta1, beta2, eps, weight_decay, -1.0 if maximize else 1.0, average_part)
    with record_function("penstock::adamw"):
        kernels.penstock_adamw(
            c_int64(count), (c_int64 * count)(*sizes), (c_void_p * (8 * count))(*addresses),
            (c_int * count)(*(TYPES[gradient.dtype] for gradient in given)), address(divisor), address(stops),
            (c_double * len(numbers))(*numbers), threads_for(sum(sizes)),
        )  # fmt: skip
