"""The memory of one training step, counted in tensors, as the planner does."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.containers import tensors as tensors_in
from penstock.optim.tensors import local, parameters_of
from penstock.step.train_step import StepResult, TrainStep


def step_with_memory(step: TrainStep, micro_batches: Sequence[Any]) -> tuple[StepResult, int]:
    """Take one step, and count the peak bytes of tensors, weights, optimizer state and batch included.

    A GPU's allocator counts this itself. On a CPU the resident size of the process says little, so the step runs under
    torch's memory profiler, which records every allocation of tensors, including compiled code's.
    """
    resident = _between_steps(step, micro_batches)
    if step.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(step.device)
        before = torch.cuda.memory_allocated(step.device)
        result = step(micro_batches)
        torch.cuda.synchronize(step.device)
        return result, resident + torch.cuda.max_memory_allocated(step.device) - before
    # Silences the profiler's own messages on stderr; it reads this when it first starts.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    with _errors_only(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = step(micro_batches)
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results
    assert events is not None
    held = peak = 0
    for _, change in sorted((e.start_ns(), e.nbytes()) for e in events.events() if e.name() == "[memory]"):
        held += change
        peak = max(peak, held)
    return result, resident + peak


@contextmanager
def _errors_only() -> Iterator[None]:
    """Within this context, torch's C++ code logs errors but no warnings, if its library allows this.

    Its memory profiler warns about every block that existed before it started; `_between_steps` counts these bytes.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        yield
        return
    before, level.value = level.value, max(level.value, 2)
    try:
        yield
    finally:
        level.value = before


def _between_steps(step: TrainStep, micro_batches: Sequence[Any]) -> int:
    """Bytes that exist when a step starts: weights, buffers, optimizer state, batch; each storage once.

    The last step's gradients are freed first, as the step would do before it allocates. Gradients in a permanent buffer
    are counted: weak references show which these are.
    """
    model, optimizer = step.model, step.optimizer
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    gradients = [
        weakref.ref(local(p.grad).untyped_storage()) for p in model.parameters() if p.grad is not None
    ]
    optimizer.zero_grad(set_to_none=True)
    tensors += tensors_in(list(optimizer.state.values()))
    tensors += parameters_of(optimizer)
    tensors += tensors_in(micro_batches)
    with torch.no_grad():
        storages = [local(tensor).untyped_storage() for tensor in tensors]
    storages += [storage for reference in gradients if (storage := reference()) is not None]
    buckets = 0 if step.replicas is None else step.replicas.held_bytes()
    return buckets + sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
