"""How much memory one training step takes, counted in tensors, as the planner counts."""

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
from penstock.optim.groups import parameters_of
from penstock.optim.tensors import local
from penstock.step.train_step import StepResult, TrainStep


def step_with_memory(step: TrainStep, micro_batches: Sequence[Any]) -> tuple[StepResult, int]:
    """Take one step, and count the bytes of tensors at its worst moment: weights, optimizer state and batch too.

    A GPU's allocator keeps that count. On a CPU the resident size of the process says little, so the step is run under
    torch's memory profiler, which sees every allocation of tensors, those of compiled code too.
    """
    resident = _between_steps(step, micro_batches)
    if step.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(step.device)
        before = torch.cuda.memory_allocated(step.device)
        result = step(micro_batches)
        torch.cuda.synchronize(step.device)
        return result, resident + torch.cuda.max_memory_allocated(step.device) - before
    # The profiler's own messages would go to stderr; it reads this when it first starts.
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
    """Inside, torch's C++ code logs errors and no warnings, where its library lets us say so.

    Its memory profiler warns of every block that was there before it started, of which `_between_steps` has the bytes.
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
    """Bytes that are there when a step starts: weights, buffers, optimizer state, batch; each storage once.

    Gradients of the last step are let go first, as they would be within the step, where neither count would see it.
    Those in a buffer that stays are counted: a weak reference shows which these are.
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
