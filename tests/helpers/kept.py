"""What a step keeps and holds, measured: the bytes that autograd saves, and the peak of a whole step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from penstock.build import build
from penstock.config.model import DecoderConfig
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.step.memory import step_with_memory
from penstock.tasks import NextToken
from penstock.tasks.text import TextBatch


@contextmanager
def kept_blocks(*known: Tensor, autocast: bool = False) -> Iterator[dict[int, int]]:
    """Inside, the bytes of each distinct block of memory that autograd keeps on the CPU, by address, without those of
    `known` tensors; with `autocast` products are in bf16."""
    others = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept: dict[int, int] = {}
    alive = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        alive.append(tensor)
        if storage.data_ptr() not in others:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
    ):
        yield kept


def step_bytes(model: DecoderConfig, plan: Plan, recipe: Recipe | None = None) -> int:
    """The peak bytes of tensors in the third step of training a decoder. oneDNN is off, because it multiplies half
    numbers with scratch memory of its own, which differs by CPU and number of threads."""
    built = build(model, plan, loss=NextToken(), recipe=recipe or Recipe())
    tokens = torch.randint(0, model.vocabulary, (plan.micro_batch, model.sequence))
    inputs = (tokens, None, tokens)
    batch = TextBatch(inputs=inputs, ids=tokens[:, 0].numpy(), tokens=1, count=tokens.numel())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.backends.mkldnn, "enabled", False)
        for _ in range(2):
            built.step([batch] * plan.accumulate)
        return step_with_memory(built.step, [batch] * plan.accumulate)[1]
