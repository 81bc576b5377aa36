"""Holding a model trained by several ranks to the one that a single process trains on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.build import Built, build
from penstock.config.model import ModelConfig, ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.containers import replaced
from penstock.kernels.cross_entropy import IGNORED
from penstock.parallel import ParallelDims, dims_of
from penstock.shards import whole_of

TINY = ViTConfig(
    image_size=8, patch_size=4, channels=1, width=16, depth=2, heads=2, mlp_width=32, classes=5, qkv_bias=False
)  # fmt: skip
"""Neither 2 nor 4 ranks can share out its 5 classes and 5 positions evenly. Without biases of keys: a softmax is blind
to them, so that their gradients are nothing but rounding, which Adam divides by its own size."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a few steps left: losses, gradient norms, and every weight whole."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


Batches = Callable[[int, int], Any]
"""Number of a step and how many samples: a batch that can be sliced by `part`."""


def images(step: int, samples: int) -> tuple[Tensor, Tensor]:
    """Images (samples, 1, 8, 8) and classes (samples) of a step, the same on every rank. Every fourth image has no
    class.
    """
    generator = torch.Generator().manual_seed(step)
    shape = (samples, TINY.channels, TINY.image_size, TINY.image_size)
    pictures = torch.randn(shape, generator=generator)
    classes = torch.randint(0, 5, (samples,), generator=generator)
    return pictures, classes.where(torch.arange(samples) % 4 != 3, IGNORED)


def part(batch: Any, start: int, stop: int) -> Any:
    """Samples `start` to `stop` of every tensor of a tuple or mapping."""
    if isinstance(batch, dict):
        return {name: value[start:stop] for name, value in batch.items()}
    return tuple(None if value is None else value[start:stop] for value in batch)


def micro_batches(batch: Any, plan: Plan, rank: int) -> list[Any]:
    """This rank's micro-batches of a global batch, as the Loader deals samples out."""
    size = plan.micro_batch
    starts = [(index * plan.dp + rank) * size for index in range(plan.accumulate)]
    return [part(batch, start, start + size) for start in starts]


def trained(
    model: ModelConfig | nn.Module | Callable[[], nn.Module],
    plan: Plan,
    *,
    steps: int,
    recipe: Recipe | None = None,
    batches: Batches = images,
    double: bool = False,
    dims: ParallelDims | None = None,
    loss_scale: float = 2.0**10,
    **options: Any,
) -> Trained:
    """Train under `plan` in this process, alone or as a rank of the group that stands.

    fp16 begins with `loss_scale`: at the usual 65536 the first steps may overflow, and not the same ones, for ranks
    scale the loss of a micro-batch and one process its share of it.
    """
    if dims is None and plan.gpus > 1:
        dims = dims_of(plan, "cpu")
    torch.manual_seed(0)
    built = build(model, plan, recipe=recipe or Recipe(lr=1e-3), dims=dims, **options)
    if built.scaler is not None:
        built.scaler.scale.fill_(loss_scale)
    result = Trained()
    for step in range(steps):
        batch = batches(step, plan.global_batch)
        if double:
            batch = replaced(batch, lambda value: value.double() if value.is_floating_point() else value)
        out = built.step(micro_batches(batch, plan, dims.data_rank if dims else 0))
        loss = out.loss.detach().clone()
        if dims is not None and not dims.alone:
            torch.distributed.all_reduce(loss)
            loss /= dims.size
        result.losses.append(float(loss))
        if out.grad_norm is not None:
            result.norms.append(float(out.grad_norm))
    result.weights.update(whole_weights(built))
    return result


def whole_weights(built: Built) -> dict[str, Tensor]:
    """The state dict with every tensor whole, on all ranks."""
    return {name: whole_of(value.detach()).clone() for name, value in built.model.state_dict().items()}


def alone(plan: Plan) -> Plan:
    """The Plan of a single process that takes all samples of a step at once."""
    from dataclasses import replace

    return replace(
        plan,
        dp=1,
        sharding="ddp",
        shard=1,
        offload="none",
        micro_batch=plan.global_batch,
        accumulate=1,
        tp=1,
        sp=False,
        pp=1,
        schedule="1f1b",
        virtual=1,
        cp=1,
        cp_exchange="ring",
    )
