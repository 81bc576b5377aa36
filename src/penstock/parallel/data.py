"""Data parallelism: every rank has different samples, and gradients are averaged over the ranks.

`replicate` keeps the whole model on each rank (Li et al., "PyTorch Distributed", VLDB 2020: gradients are all-reduced
in buckets during the backward pass). `penstock.parallel.fsdp` shards the weights over the ranks. With both the module
stays the same object, with the same names in its state dict, and is called as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn

from penstock.optim.tensors import local, mesh_of
from penstock.parallel.dims import LOSS, REPLICAS_OF_EXPERTS, ParallelDims
from penstock.shards import EXPERT

BUCKET_MB = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """The tasks of a training step on a model whose gradients are averaged over ranks."""

    model: Any
    dims: ParallelDims
    buffers: Sequence[Tensor] = field(default_factory=list)
    """Values besides gradients that each rank computes from its own samples: the running statistics of batch norms."""
    late: Callable[[], Sequence[Tensor]] | None = None
    """Gradients to average after the last backward pass, if the backward pass does not average them itself."""
    partial: Callable[[], Sequence[Tensor]] | None = None
    """Gradients to sum over the tensor-parallel ranks after the last backward pass."""

    def begin(self, micro_batch: int, count: int) -> None:
        """Micro-batch `micro_batch` (from 0) of `count` begins. Only the last one's backward pass reduces gradients;
        until then they accumulate on the rank.
        """
        if self.late is None:
            self.model.set_requires_gradient_sync(micro_batch == count - 1)

    def drop_copies(self) -> None:
        """Free copies of weights, which may be outdated: call it before and after a forward pass outside of steps."""

    @torch.no_grad()
    def end(self) -> None:
        """After the last backward pass, average all other gradients and buffers, so that ranks keep the same model."""
        if self.partial is not None:
            add_up_all(self.partial(), self.dims.group("tp"))
        if self.late is not None:
            average_all(self.late(), self.dims)
        average_all(self.buffers, self.dims)

    def held_bytes(self) -> int:
        """Bytes held between steps besides weights and gradients: the buckets into which the backward pass copies
        gradients."""
        if self.late is not None:
            return 0
        return sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)


def replicate(
    model: nn.Module, dims: ParallelDims, device: torch.device, *,
    late: Callable[[], Sequence[Tensor]] | None = None,
) -> DataParallel:  # fmt: skip
    """Make `model` one of `dims.size` replicas, in place; all ranks get rank 0's weights and buffers.

    Call it after everything that replaces parameters. Names stay the same. The backward pass of the last micro-batch
    averages gradients over the ranks. If gradients are collected elsewhere, `late` returns those that
    `DataParallel.end` averages instead.
    """
    if late is not None:
        broadcast(model, dims)
        return DataParallel(model=model, dims=dims, buffers=running_statistics(model), late=late)
    from torch.distributed._composable.replicate import replicate as torch_replicate

    # Torch itself would send rank 0's buffers before every forward pass, in evaluation too, where ranks may have
    # different numbers of batches; `DataParallel.end` averages them instead. The option has a new name since torch
    # 2.13, which warns about the old one.
    parameters = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    silent = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
    for buffer in model.buffers():
        distributed.broadcast(buffer, src=0)
    options: dict[str, Any] = {silent: False, "bucket_cap_mb": BUCKET_MB}
    torch_replicate(model, device_id=device, **options)
    # Now and not at the first forward pass, which on one rank may be in an evaluation that other ranks skip.
    torch_replicate.state(model).lazy_init()
    return DataParallel(model=model, dims=dims, buffers=running_statistics(model))


@torch.no_grad()
def broadcast(model: nn.Module, dims: ParallelDims, names: tuple[str, ...] = LOSS) -> None:
    """Copy the parameters and buffers of the first rank along some dimensions (by default those with different samples
    or tokens) to all ranks along them.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        distributed.broadcast(tensor.detach(), group=dims.group(*names), group_src=0)


@torch.no_grad()
def average_all(tensors: Sequence[Tensor], dims: ParallelDims) -> None:
    """Average tensors over the ranks with different samples or tokens, in place. All ranks pass tensors of the same
    shapes. Tensors of split experts are summed over the ranks that hold the same experts only, but divided alike.
    """
    ranks = dims.degree(*LOSS)
    experts = [tensor for tensor in tensors if is_of_split_experts(tensor)]
    if experts:
        assert dims.expert_mesh is not None
        add_up_all(experts, dims.expert_mesh.get_group(REPLICAS_OF_EXPERTS[0]), divisor=ranks)
        tensors = [tensor for tensor in tensors if not is_of_split_experts(tensor)]
    if ranks > 1:
        add_up_all(tensors, dims.group(*LOSS), divisor=ranks)


def is_of_split_experts(tensor: Tensor) -> bool:
    """Whether a tensor belongs to experts that are split over ranks."""
    names = getattr(mesh_of(tensor), "mesh_dim_names", None)
    return names is not None and EXPERT in names


@torch.no_grad()
def add_up_all(
    tensors: Sequence[Tensor], group: distributed.ProcessGroup | None, *, divisor: int = 1
) -> None:
    """Sum tensors over a group and divide them, in place, some megabytes at a time."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in map(local, tensors):
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for dtype, alike in by_type.items():
        while alike:
            bucket, room = [alike.pop(0)], BUCKET_MB << 20
            while alike and (room := room - bucket[-1].numel() * dtype.itemsize) > 0:
                bucket.append(alike.pop(0))
            # A large dense tensor, such as a flat buffer, is reduced in place.
            in_place = len(bucket) == 1 and bucket[0].is_contiguous()
            flat = bucket[0].view(-1) if in_place else torch.cat([tensor.reshape(-1) for tensor in bucket])
            distributed.all_reduce(flat, group=group)
            if divisor > 1:
                flat /= divisor
            if not in_place:
                parts = torch.split(flat, [tensor.numel() for tensor in bucket])
                torch._foreach_copy_(bucket, [p.view_as(t) for t, p in zip(bucket, parts)])


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Floating-point buffers that modules update during training."""
    return [
        buffer
        for module in model.modules()
        if getattr(module, "track_running_stats", False)
        for buffer in module.buffers(recurse=False)
        if buffer.is_floating_point()
    ]
